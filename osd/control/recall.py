"""Lets an earlier draft serve again when the traffic it was best at returns.

    traces that no draft has learnt, α ──► LookTimes: may the traffic have changed?
    the first draft, those that served most ─┐
    the serving draft ───────────────────────┴► replay on the newest of these traces (trainer)
                                                  │
                  the earlier one serves ◄────────┘ earlier_to_recall?

A draft that learns new traffic unlearns some of the old. Its predecessor is still on disk, and
serves at once what a round would have to learn again. Every release was made before the traces that
wait for the next round came, so that all are measured on requests that none of them has learnt. A
look takes a fraction of a round: a few forward passes over a few requests.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.drift import SURE, FadingAlpha
from osd.control.release_manager import ReleaseManager
from osd.records import DraftRelease, EarlierReport

MOST_EARLIER = 3
"""Earlier releases that are replayed."""
MOST_DOUBLINGS = 3
"""Of the traces until the next look, after looks in vain."""


class Compare(Protocol):
    """Replays earlier releases beside the serving one on the newest traces. [] or None when that is
    not possible now."""

    def __call__(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> Awaitable[list[EarlierReport] | None]: ...


def choose_earlier(
    releases: Sequence[DraftRelease], current: DraftRelease, num_tested: Callable[[int], int]
) -> list[DraftRelease]:
    """The first release, and those that served most. `num_tested(version)`: draft tokens that were
    tested while it served. What served long was the best there was for its traffic."""
    others = sorted(
        (release for release in releases if release.version != current.version),
        key=lambda release: release.version,
    )
    most = sorted(others[1:], key=lambda release: -num_tested(release.version))
    served = [release for release in most if num_tested(release.version)]
    return [*others[:1], *served[: MOST_EARLIER - 1]]


@dataclass(slots=True)
class LookTimes:
    """When to look: as soon as so many traces have come since the last look, if α has moved since,
    to either side; else after more and more of them.

    Example:
        times = LookTimes(16)
        if times.is_due(num_unread, detector.recent):
            ...
            times.note(detector.recent)
    """

    num_traces: int
    _num_unread: int = 0
    """When this was asked last."""
    _num_since: int = 0
    """Traces since the last look."""
    _num_vain: int = 0
    """Looks in a row after which nothing had moved."""
    _seen: tuple[float, float] | None = None
    """α at the last look, and its standard error."""

    def is_due(self, num_unread: int, recent: FadingAlpha) -> bool:
        """`num_unread`: traces that no draft has learnt; fewer than before after a round."""
        is_fewer = num_unread < self._num_unread
        self._num_since += num_unread - (0 if is_fewer else self._num_unread)
        self._num_unread = num_unread
        if min(num_unread, self._num_since) < self.num_traces:
            return False
        is_late = self._num_since >= self.num_traces << min(self._num_vain, MOST_DOUBLINGS)
        return is_late or self._has_moved(recent)

    def note(self, recent: FadingAlpha) -> None:
        """There was a look."""
        self._num_vain = 0 if self._has_moved(recent) else self._num_vain + 1
        self._num_since = 0
        self._seen = None if recent.alpha is None else (recent.alpha, recent.error)

    def note_round(self) -> None:
        """A round has read all there was."""
        self._num_unread = 0

    def _has_moved(self, recent: FadingAlpha) -> bool:
        if self._seen is None or recent.alpha is None:
            return False
        alpha, error = self._seen
        return abs(recent.alpha - alpha) > SURE * math.hypot(error, recent.error)


class Recall:
    """Looks between rounds, in the train loop."""

    def __init__(
        self,
        gate: GateConfig,
        releases: ReleaseManager,
        recent: Callable[[], FadingAlpha],
        num_tested: Callable[[int], int],
        compare: Compare,
    ) -> None:
        """`recent`: the α of now. `num_tested`: as of `choose_earlier`."""
        self._gate, self._releases, self._compare = gate, releases, compare
        self._recent, self._num_tested = recent, num_tested
        self._times = LookTimes(gate.recall_traces)
        self.versions: frozenset[int] = frozenset()
        """The earlier releases that were compared last, which are worth their place on disk."""

    async def look(self, num_unread: int) -> bool:
        """Compare if there is reason to. Returns whether an earlier draft serves again. Raises
        `ReleaseError` when the disk does not take the change."""
        if not self._gate.recall_traces or not self._times.is_due(num_unread, self._recent()):
            return False
        current, earlier = await self._releases.serving_and_others()
        if current is None:
            return False
        earlier = choose_earlier(earlier, current, self._num_tested)
        self.versions = frozenset(release.version for release in earlier)
        if not earlier:
            return False
        self._times.note(self._recent())
        reports = await self._compare(current, earlier, self._gate.recall_traces)
        best = policy.earlier_to_recall(reports or [], self._gate)
        return best is not None and await self._releases.recall(current, best)

    def note_round(self) -> None:
        """A round has ended."""
        self._times.note_round()
