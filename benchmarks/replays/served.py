"""How a replay serves recorded requests: the fate of each token, and the requests in the order in
which they end.

    EveryStep       k draft tokens in every step, one request after the other
    ClosedLoop      the service's own control of speculation decides (`closed_loop.py`)

Both are told when another draft serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.replays.curve import StepCounts
from benchmarks.replays.drawn import drawn_matches
from benchmarks.replays.recording import Recorded, kinds
from trainer.draft import Draft, load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.evaluate import count_steps, is_match
from trainer.sampling.teacher import Teacher

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

    def __init__(
        self,
        requests: Sequence[Recorded],
        k: int,
        features: TargetFeatures | None = None,
        *,
        is_sampled: bool = False,
    ) -> None:
        """`features`: of the target, which a head reads. `is_sampled`: the draft's tokens are drawn
        from its distribution."""
        self._requests, self._k, self._features = requests, k, features
        self._is_sampled = is_sampled
        self.model: Draft | None = None
        """The draft that serves."""

    def swap(self, draft: str | Path, predicted: float | None) -> None:
        self.model = load_draft(draft, self._features)

    def serve(self) -> Iterator[Served]:
        for index, request in enumerate(self._requests):
            assert self.model is not None, "swap() comes first"
            matches = matches_of(self.model, request, is_sampled=self._is_sampled)
            counts = counts_of(matches, self._k)
            kind_T = kinds(matches, self._k, len(request.output_ids))
            yield Served(index=index, counts=counts, of_the_draft=counts, kind_T=kind_T)


def features_of(target: Path | None, k: int, cache_bytes: int = 0) -> TargetFeatures | None:
    """What heads of a target read, for k draft tokens in a step. Nothing is loaded for a model."""
    return None if target is None else TargetFeatures(Teacher(target, top_k=1), k, cache_bytes)


def matches_of(model: Draft, request: Recorded, *, is_sampled: bool = False) -> np.ndarray:
    """bool [G, T - 1]: where what the draft proposes at depth g of a step is accepted, from the
    second output token on. G = 1 where all depths propose alike. `is_sampled`: what it proposes is
    drawn from its distribution, where the request is above temperature 0."""
    if is_sampled and request.temperature > 0:
        return drawn_matches(model, request, UNLIMITED)
    return is_match(model, request.bare_trace(TARGET_ID), max_length=UNLIMITED)


def right_from(matches_GT: np.ndarray, start: int, num: int) -> np.ndarray:
    """bool [num], fewer at the end: which of the draft's tokens are right in a step whose first is
    the one at `start`."""
    num_depths, num_tokens = matches_GT.shape
    depth = np.arange(max(0, min(num, num_tokens - start)))
    right: np.ndarray = matches_GT[np.minimum(depth, num_depths - 1), start + depth]
    return right


def counts_of(matches: np.ndarray, k: int) -> StepCounts:
    """One request with a draft: every step has k tokens of it. `matches`: as `matches_of` says."""
    tested, accepted = count_steps(matches, k)
    num_steps = int(tested[0])
    return StepCounts(
        tokens=matches.shape[-1],
        steps=num_steps,
        drafts=num_steps,
        drafted=k * num_steps,
        tested=int(tested.sum()),
        accepted=int(accepted.sum()),
    )
