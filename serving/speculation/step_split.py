"""Where a step's time goes in the worker: draft, verify, sample, other.

vLLM enters a named scope around each part of a step, and one global makes its context manager; ours
adds up seconds. On a GPU, which works asynchronously, these are the times of launching the work.
"""

from __future__ import annotations

import time
from typing import Any

from serving.vllm import scopes

PARTS = {
    "gpu_model_runner: forward": "verify",
    "gpu_model_runner: sample": "sample",
    "gpu_model_runner: draft": "draft",
    "gpu_model_runner: preprocess": "other",
    "gpu_model_runner: postprocess": "other",
    "gpu_model_runner: bookkeep": "other",
}


class StepSplit:
    """Adds up from `start` on. Scopes of one part do not nest."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS.values(), 0.0)
        self._num_steps = 0

    def start(self) -> None:
        """Let vLLM enter our scopes."""
        scopes.enter(self._scope)

    def report(self) -> dict[str, Any]:
        """{"steps", "draft", "verify", "sample", "other"}: seconds since the start."""
        return {"steps": self._num_steps, **self._seconds}

    def _scope(self, name: str) -> _Scope:
        return _Scope(self, PARTS.get(name))

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds
        self._num_steps += part == "verify"


class _Scope:
    __slots__ = ("_at", "_part", "_split")

    def __init__(self, split: StepSplit, part: str | None) -> None:
        self._split, self._part = split, part

    def __enter__(self) -> None:
        self._at = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._part is not None:
            self._split.add(self._part, time.perf_counter() - self._at)
