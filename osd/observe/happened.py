"""What happened to a deployment, as lists: events, swaps, rounds, changes of plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from osd.observe.status import plan_changes, swap_event
from osd.records import Event, ReplicaPlanChange, ReplicaStatus, RoundOutcome, SwapReport

MAX_LISTED = 2000
"""Events, swaps and rounds kept."""
MAX_CHANGES = 200
"""Changes of plan kept."""
MOST_GONE = 256
"""Replicas that have ended, and may yet be heard of. Somebody may start engines anew every minute,
each under a name of its own."""


def keep_newest(table: dict[Any, Any], num: int) -> None:
    """Drop all entries but those that were set last."""
    for key in list(table)[: max(0, len(table) - num)]:
        del table[key]


class Happened:
    """The newest of each kind. Not thread-safe.

    Example:
        happened = Happened()
        happened.add(Event(at=1.7e9, kind="published", text="v4", version=4))
        happened.events(100)
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_LISTED)
        self.swaps: deque[SwapReport] = deque(maxlen=MAX_LISTED)
        self.rounds: deque[RoundOutcome] = deque(maxlen=MAX_LISTED)
        self._changes: deque[ReplicaPlanChange] = deque(maxlen=MAX_CHANGES)
        self._changed_at: dict[str, float] = {}
        """replica -> time of its newest change of plan; a heartbeat is seen more than once"""

    def add(self, record: Event | SwapReport) -> None:
        """A swap is among the events, too."""
        if isinstance(record, SwapReport):
            self.swaps.append(record)
            record = swap_event(record)
        self._events.append(record)

    def observe(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Take the changes of plan in the heartbeats of the living replicas."""
        for status in replicas:
            changed_at = self._changed_at.pop(status.replica, 0.0)
            new = [change for change in plan_changes(status) if change.at > changed_at]
            self._changes.extend(new)
            self._changed_at[status.replica] = max([changed_at, *(change.at for change in new)])
        keep_newest(self._changed_at, len(replicas) + MOST_GONE)

    def events(self, limit: int) -> list[Event]:
        """The newest, oldest first."""
        return sorted(self._events, key=lambda event: event.at)[-limit:]

    def changes(self, limit: int) -> list[ReplicaPlanChange]:
        """The newest, oldest first."""
        return sorted(self._changes, key=lambda change: change.at)[-limit:]

    def marks(self) -> list[dict[str, Any]]:
        """When the deployment went over to another version, oldest first:
        `{"at", "version", "previous", "pause_s", "proved"}`.

        The first replica to swap counts; those that follow, or are catching up, do not mark it
        again.
        """
        marks: list[dict[str, Any]] = []
        marked, newest = set[int](), 0
        for report in sorted(self.swaps, key=lambda report: report.at):
            is_new = report.version not in marked
            if report.ok and (is_new or report.previous == newest != report.version):
                mark = {"at": report.at, "version": report.version, "previous": report.previous}
                marks.append(mark | {"pause_s": report.pause_s, "proved": report.proved})
                newest = report.version
                marked.add(newest)
        return marks
