"""Lets an earlier draft serve again when the traffic it was best at returns.

    requests served, their α ──► LookTimes: may the traffic have changed?
    the first draft, the last of other lines, the one that served most ─┐
    the serving draft ──────────────────────────────────────────────────┴► replay (trainer)
                                                                              │
                          the earlier one serves ◄── earlier_to_recall? ◄─────┘

A draft that learns new traffic unlearns some of the old. Its predecessors are still on disk, and
serve at once what rounds would have to learn again. Every release was made before the traces that
wait for the next round came, so that all are measured on requests that none of them has learnt.

After a recall the traffic is known to have changed: candidates are judged on requests since then
(`DraftRelease.judged_since`). Else the next one would be published for what it is worth on the
traffic of before, and be left again.

A look takes a fraction of a round, a few forward passes over a few requests, and all looks together
at most `MOST_SHARE` of the time, in a rest `AT_REST` of it. While rounds go on there is one after
every few requests: right after a return α need not be lower than it was on the traffic that was
learnt last. While training rests, and when nothing moves, looks become rarer.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from osd.common.clock import Clock
from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.drift import SURE, DriftDetector, FadingAlpha
from osd.control.release_manager import ReleaseManager
from osd.records import DraftRelease, EarlierReport

MOST_DOUBLINGS = 3
"""Of the requests until the next look, after looks in vain."""
MOST_SHARE, AT_REST = 0.05, 0.01
"""Of the time that looks take where requests come fast, while rounds go on and while they rest."""


class Traffic(Protocol):
    """What a `DriftDetector` tells."""

    @property
    def num_captured(self) -> int: ...
    @property
    def recent(self) -> FadingAlpha: ...
    @property
    def num_since_fall(self) -> int | None: ...


class Compare(Protocol):
    """Replays earlier releases beside the serving one on the newest traces: [] when there are too
    few, None when it is not possible now."""

    def __call__(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> Awaitable[list[EarlierReport] | None]: ...


def choose_earlier(
    releases: Sequence[DraftRelease], current: DraftRelease, num_tested: Callable[[int], int]
) -> list[DraftRelease]:
    """The first release; the newest two that none was made of, which are the last of the lines that
    were left; and the one that served most of all others. `num_tested(version)`: draft tokens that
    were tested while it served."""
    others = sorted((r for r in releases if r.version != current.version), key=lambda r: r.version)
    parents = {release.parent for release in (*releases, current)}
    last = [release for release in others[1:] if release.version not in parents][-2:]
    rest = [release for release in others[1:] if release not in last]
    most = max(rest, key=lambda release: num_tested(release.version), default=None)
    served = [most] if most is not None and num_tested(most.version) else []
    return [*others[:1], *last, *served]


def pause_after(took_s: float, *, is_resting: bool) -> float:
    """Seconds without a look after one that took so long."""
    return took_s * (1 / (AT_REST if is_resting else MOST_SHARE) - 1)


@dataclass(slots=True)
class LookTimes:
    """When to look: as soon as so many requests have been served since the last look; half as many,
    if α has just fallen. While training rests, after more and more of them, as long as α does not
    move, to either side.

    Example:
        times = LookTimes(16)
        if times.is_due(detector, is_resting=False):
            ...
            times.note(detector, is_resting=False)
    """

    num_traces: int
    _looked_at: int = 0
    """Requests captured when there was a look last."""
    _num_vain: int = 0
    """Looks in a row, in a rest, at which nothing had moved."""
    _seen: tuple[float, float] | None = None
    """α at the last look, and its standard error."""

    def is_due(self, traffic: Traffic, *, is_resting: bool) -> bool:
        """`is_resting`: whether training rests."""
        num_since = traffic.num_captured - self._looked_at
        if num_since < self.num_traces:
            return num_since >= self.num_traces / 2 and traffic.num_since_fall is not None
        is_late = num_since >= self.num_traces << min(self._num_vain, MOST_DOUBLINGS)
        return is_late or not is_resting or self._has_moved(traffic.recent)

    def note(self, traffic: Traffic, *, is_resting: bool) -> None:
        """There was a look."""
        recent = traffic.recent
        is_vain = is_resting and not self._has_moved(recent)
        self._num_vain = self._num_vain + 1 if is_vain else 0
        self._looked_at = traffic.num_captured
        self._seen = None if recent.alpha is None else (recent.alpha, recent.error)

    def _has_moved(self, recent: FadingAlpha) -> bool:
        if self._seen is None or recent.alpha is None:
            return False
        alpha, error = self._seen
        return abs(recent.alpha - alpha) > SURE * math.hypot(error, recent.error)


class Recall:
    """Looks on behalf of the train loop."""

    def __init__(
        self,
        gate: GateConfig,
        releases: ReleaseManager,
        detector: DriftDetector,
        num_tested: Callable[[int], int],
        compare: Compare,
        clock: Clock,
    ) -> None:
        """`num_tested`: as of `choose_earlier`."""
        self._gate, self._releases, self._detector = gate, releases, detector
        self._num_tested, self._compare, self._clock = num_tested, compare, clock
        self._times = LookTimes(gate.recall_traces)
        self._ended_at, self._took_s = -math.inf, 0.0
        """Monotonic time at which the last look ended, and what it took."""

    def is_due(self, num_new: int, *, is_resting: bool) -> bool:
        """`num_new`: traces that no draft has learnt. `is_resting`: whether training rests."""
        least = min(self._gate.recall_traces, self._gate.min_holdout_traces)
        pause_s = pause_after(self._took_s, is_resting=is_resting)
        if not least or num_new < least or self._clock.monotonic() < self._ended_at + pause_s:
            return False
        return self._times.is_due(self._detector, is_resting=is_resting)

    async def look(self, *, is_resting: bool) -> bool:
        """Compare. Returns whether an earlier draft serves again. Raises `ReleaseError` when the
        disk does not take the change."""
        current, earlier = await self._choose()
        # Also where it fails: it would be tried, and told, before every round.
        self._times.note(self._detector, is_resting=is_resting)
        if current is None or not earlier or not await self._releases.is_settled(current):
            return False
        began_at = self._clock.monotonic()
        reports = await self._compare(current, earlier, self._gate.recall_traces)
        if reports is not None:  # else the trainer was away, not busy
            self._ended_at = self._clock.monotonic()
            self._took_s = self._ended_at - began_at
        best = policy.earlier_to_recall(reports or [])
        return best is not None and await self._releases.recall(current, best)

    async def worth_keeping(self) -> set[int]:
        """Versions that the next look compares, and that are to stay on disk until then."""
        return {release.version for release in (await self._choose())[1]}

    async def _choose(self) -> tuple[DraftRelease | None, list[DraftRelease]]:
        """What serves, and what is compared with it."""
        current, releases = await self._releases.recallable()
        if current is None:
            return None, []
        return current, choose_earlier(releases, current, self._num_tested)
