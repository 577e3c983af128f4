"""Windows of several looks as one, so that the feed of a large deployment holds an hour.

    windows of a look, once a second ──► sums by version, class and k ──► the feed, when due

A few replicas send each look's windows at once. The more replicas and classes of traffic there are,
the longer each adds its windows up.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from osd.exchange.registry import FEED_LENGTH
from osd.records import Counters, SpecWindow

SECONDS_KEPT = 3600
"""So long the feed is to hold the windows of all replicas."""
SHARE_OF_WINDOWS = 0.9
"""Of the feed's records; the others are events, swaps and rounds."""
MAX_SECONDS = 30.0
"""However many replicas there are, a window is sent after so long."""

Kind = tuple[str, int, str, int]
"""draft, version, class of traffic, k"""


class Folding:
    """The windows of one replica. Times are by its own clock."""

    def __init__(self) -> None:
        self._windows: list[SpecWindow] = []

    def add(self, windows: Sequence[SpecWindow]) -> None:
        """Add what was counted since the last look."""
        self._windows.extend(windows)

    def take_if_due(
        self, now: float, num_replicas: int, most: float = MAX_SECONDS
    ) -> list[SpecWindow]:
        """What is to be sent now, by when nothing is held back for longer than `most` seconds.
        `num_replicas`: of the deployment."""
        if not self._windows:
            return []
        seconds = seconds_to_fold(num_replicas, len({_kind(w) for w in self._windows}))
        if not seconds:
            found, self._windows = self._windows, []
            return found
        seconds = min(seconds, most)
        since = self._windows[0].at - self._windows[0].seconds
        # A clock that was set back must not hold windows up.
        return self.take() if now - since >= seconds or now < since else []

    def take(self) -> list[SpecWindow]:
        """All that was added, as the windows of one look."""
        sums: dict[Kind, Counters] = {}
        for window in self._windows:
            sums.setdefault(_kind(window), Counters()).add(window.counters)
        # Windows of one look share their seconds.
        seconds = sum({window.at: window.seconds for window in self._windows}.values())
        found = [
            SpecWindow.of(
                replace(counters, seconds=seconds),
                at=self._windows[-1].at,
                replica=self._windows[-1].replica,
                draft=draft,
                version=version,
                domain=domain,
                k=k,
            )
            for (draft, version, domain, k), counters in sums.items()
        ]
        self._windows = []
        return found


def seconds_to_fold(num_replicas: int, num_kinds: int) -> float:
    """How long windows are added up, so that those of all replicas fit into the feed. Where a
    second does, nothing is held back."""
    seconds = num_replicas * num_kinds * SECONDS_KEPT / (SHARE_OF_WINDOWS * FEED_LENGTH)
    return min(seconds, MAX_SECONDS) if seconds > 1 else 0.0


def _kind(window: SpecWindow) -> Kind:
    return window.draft, window.version, window.domain, window.k
