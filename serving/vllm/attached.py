"""Names of vLLM that an engine needs which somebody else starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

logger = logging.getLogger(__name__)


def on_engine_config(prepare: Callable[[Any], None]) -> None:
    """Have `prepare` called with vLLM's `EngineArgs` before a configuration is made of them. Called
    again, it changes nothing. What fails leaves the arguments to vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "is_ours", False):
        return

    @wraps(create)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            prepare(self)
        except Exception:
            logger.exception("this engine is not attached; it serves as without")
        return create(self, *args, **kwargs)

    prepared.is_ours = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = prepared  # type: ignore[method-assign]


def api_process_rank(engine: Any) -> int:
    """Which of several API processes of one engine this is."""
    return int(engine.vllm_config.parallel_config._api_process_rank)
