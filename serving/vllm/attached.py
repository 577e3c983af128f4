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


def api_process(engine: Any) -> tuple[int, int]:
    """Which of how many API processes of one engine this is."""
    parallel = engine.vllm_config.parallel_config
    return int(parallel._api_process_rank), int(parallel._api_process_count)


def models(engine: Any) -> tuple[str, str, str | None, str | None, str | None]:
    """Target and draft as vLLM was given them, their revisions, and where the hub's files lie."""
    config = engine.vllm_config
    draft = config.speculative_config.draft_model_config
    return (
        str(config.model_config.model),
        str(draft.model),
        config.model_config.revision,
        draft.revision,
        config.load_config.download_dir,
    )
