"""Made-up runs of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from osd.evaluate.figures import counted
from osd.evaluate.runs import Request, Run, Served, Step, Verified

REQUESTS = tuple(
    Request(prompt_ids=(1, 2, index), data="sums" if index % 2 else "sql", max_tokens=8)
    for index in range(4)
)


def step(batch: int, width: int, *, verify: float, at: float = 0.0, **fields: Any) -> Step:
    """One that only decodes, ten times as long as its verification."""
    values: dict[str, Any] = {
        "at": at,
        "seconds": 10 * verify,
        "scheduling": verify,
        "own": 0.0,
        "batch": batch,
        "width": width,
        "is_pure": True,
        "proposed": width - batch,
        "parts": (2 * verify, verify, 3 * verify, 0.0),
    }
    return Step(**(values | fields))


def served(index: int, accepted: Sequence[int], k: int, *, seconds: float = 1.0) -> Served:
    """A request in whose steps k tokens were drafted, and so many accepted."""
    steps, at = [], 1
    for number, right in enumerate(accepted):
        steps.append(Verified(number, at, tuple(range(k)), right))
        at += 1 + right
    return Served(
        index=index,
        arrived=1.0,
        first_at=1.5,
        ended=1.5 + seconds,
        token_ids=tuple(range(at)),
        steps=tuple(steps),
    )


def run_of(method: str, k: int, requests: Sequence[Served], **fields: Any) -> Run:
    """Its counters are vLLM's, as they should be."""
    values: dict[str, Any] = {
        "engine": "draft",
        "method": method,
        "k": k,
        "load": "batch 2",
        "temperature": 0.0,
        "repeat": 0,
        "started": "a",
        "seconds": 2.0,
        "steps": (),
        "requests": tuple(requests),
        "counters": counted(requests, 3),
    }
    return Run(**(values | fields))
