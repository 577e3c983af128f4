"""How a replay serves recorded requests: the fate of each token, and the requests in the order in
which they end.

    EveryStep       k draft tokens in every step, one request after the other
    ClosedLoop      the service's own control of speculation decides (`benchmarks/closed_loop.py`)

Both are told when another draft serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.curve import StepCounts
from benchmarks.recording import Recorded, kinds
from trainer.draft import Draft, load_draft
from trainer.evaluate import count_steps, is_match

TARGET_ID = "recorded"
UNLIMITED = 10**6
"""Tokens of context a replayed draft sees: as many as it can, as in the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A request that has ended."""

    index: int
    """Among the requests, by arrival."""
    counts: StepCounts
    """Of all that was verified, whoever proposed it."""
    of_the_draft: StepCounts
    """Of what the draft model proposed."""
    kind_T: np.ndarray
    """int8 [T]: what became of each output token, as capture tells."""
    seconds: float | None = None
    """Its share of the decode time, where whoever serves keeps time."""


class Server(Protocol):
    """Serves requests, one draft at a time."""

    def swap(self, draft: str | Path, predicted: float | None) -> None:
        """From now on this draft serves, whose gate measured an α of `predicted`."""

    def serve(self) -> Iterator[Served]:
        """Every request once, as they end."""


class EveryStep:
    """k draft tokens in every step, one request after the other."""

    def __init__(self, requests: Sequence[Recorded], k: int) -> None:
        self._requests, self._k = requests, k
        self._model: Draft | None = None

    def swap(self, draft: str | Path, predicted: float | None) -> None:
        self._model = load_draft(draft)

    def serve(self) -> Iterator[Served]:
        for index, request in enumerate(self._requests):
            assert self._model is not None, "swap() comes first"
            matches = matches_of(self._model, request)
            counts = counts_of(matches, self._k)
            kind_T = kinds(matches, self._k, len(request.output_ids))
            yield Served(index=index, counts=counts, of_the_draft=counts, kind_T=kind_T)


def matches_of(model: Draft, request: Recorded) -> np.ndarray:
    """bool [T - 1]: where the draft's argmax is the served token, from the second output token
    on."""
    return is_match(model, request.bare_trace(TARGET_ID), max_length=UNLIMITED)


def counts_of(matches: np.ndarray, k: int) -> StepCounts:
    """One request with a draft model: every step has a draft of k tokens."""
    tested, accepted = count_steps(matches, k)
    num_steps = int(tested[0])
    return StepCounts(
        tokens=len(matches),
        steps=num_steps,
        drafts=num_steps,
        drafted=k * num_steps,
        tested=int(tested.sum()),
        accepted=int(accepted.sum()),
    )
