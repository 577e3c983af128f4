"""The named scopes that vLLM enters around each part of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def enter(scope: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Have vLLM enter `scope(name)` around the part of a step that has this name."""
    from vllm.v1 import utils

    utils._PROFILER_FUNC = scope  # type: ignore[assignment]
