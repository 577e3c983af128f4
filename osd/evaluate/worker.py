"""The worker of a measured engine: the draft sleeps where none is wanted, and each step's parts are
timed one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import serving.worker  # noqa: F401  mends how vLLM samples on CPUs
from serving.speculation.memory.certain import verify_certain
from serving.speculation.sleep.runners import can_sleep, lazy_draft
from serving.speculation.step_split import PARTS
from serving.vllm import scopes
from serving.vllm.heads import MODEL_METHOD

ORDER = ("draft", "verify", "sample", "other")
FIRST = "gpu_model_runner: preprocess"
"""The scope with which a step begins in the worker."""


class StepParts:
    """Seconds of each part, of one step after the other."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rows: list[dict[str, float]] = []

    def scope(self, name: str) -> _Scope:
        """A context manager around the part of this name."""
        if name == FIRST:
            self._rows.append(dict.fromkeys(ORDER, 0.0))
        return _Scope(self, PARTS.get(name), self._clock)

    def add(self, part: str, seconds: float) -> None:
        if self._rows:
            self._rows[-1][part] += seconds

    def take(self) -> list[list[float]]:
        """In the order of `ORDER`, since they were last taken."""
        taken, self._rows = self._rows, []
        return [[row[part] for part in ORDER] for row in taken]


class _Scope:
    __slots__ = ("_at", "_clock", "_part", "_parts")

    def __init__(self, parts: StepParts, part: str | None, clock: Callable[[], float]) -> None:
        self._parts, self._part, self._clock = parts, part, clock

    def __enter__(self) -> None:
        self._at = self._clock()

    def __exit__(self, *_: object) -> None:
        if self._part is not None:
            self._parts.add(self._part, self._clock() - self._at)


class MeasuredWorker:
    """vLLM mixes it into the worker of each rank."""

    osd_parts: StepParts

    def osd_measure(self) -> str:
        """Begin to time, let the draft sleep where it can, and the memory propose beside it."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        config: Any = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        self.osd_parts = StepParts()
        scopes.enter(self.osd_parts.scope)
        if getattr(config, "method", "") == MODEL_METHOD and can_sleep(runner):
            lazy_draft(runner)
        verify_certain(self, {})
        return ""

    def osd_forget(self) -> str:
        """Empty what vLLM's suffix decoding has cached of earlier answers."""
        drafter: Any = getattr(self.model_runner, "drafter", None)  # type: ignore[attr-defined]
        config: Any = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        if (cache := getattr(drafter, "suffix_cache", None)) is not None:
            drafter.suffix_cache = type(cache)(
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
            )
        return ""

    def osd_measured(self) -> str:
        """Parts of the steps since this was last asked, as JSON."""
        return json.dumps(self.osd_parts.take())
