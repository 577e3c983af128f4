"""Counters over time: in short slots for the last two hours, in minutes before that.

windows of the feed ─► Counters ┐
heartbeats ─► SpeculationTimes  ┴─► SlotTable

narrow slots ─ after 2 h ─► minutes ─ after `history_seconds` ─► gone
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

MINUTE_S, LONG_S = 60.0, 600.0
NARROW_FOR_S = 7200.0
"""Seconds for which slots stay narrow."""
DISORDER_S = 120.0
"""Seconds by which the clocks of replicas may differ."""

Key = tuple[Any, ...]
"""Start of the slot in Unix time, then its labels."""


class Summable(Protocol):
    """What a slot holds."""

    def add(self, other: Self) -> None: ...


Value = TypeVar("Value", bound=Summable)


class SpeculationTimes(msgspec.Struct, array_like=True):
    """What a replica's control of speculation measured in a short time.

    Example:
        SpeculationTimes(net=(1.31, 1.22, 1.41), seconds_per_part={"draft": 0.4, "verify": 1.2})
    """

    net: tuple[float, float | None, float | None] | None = None
    """Measured speed with speculation over without so far, and the ends of its interval."""
    seconds_per_part: dict[str, float] = {}
    """part of a step -> seconds spent in it"""

    def add(self, other: SpeculationTimes) -> None:
        """`other` is the later one."""
        self.net = other.net or self.net
        self.seconds_per_part = dict(
            Counter(self.seconds_per_part) + Counter(other.seconds_per_part)
        )


class SlotTable(Generic[Value]):
    """(start, labels ...) -> sum. Not thread-safe.

    All of it is kept a second time in long slots, so that a week is drawn from a thousand sums and
    not from ten thousand.

    Example:
        table = SlotTable(Counters, narrow_s=1.0)
        table.add(window.at, (window.replica, window.version), Counters(num_drafts=100))
        table.forget(now=window.at, oldest=window.at - 7 * 86400)
    """

    def __init__(self, make: Callable[[], Value], narrow_s: float) -> None:
        self._make, self._narrow_s = make, narrow_s
        self._narrow: dict[Key, Value] = {}
        self._minutes: dict[Key, Value] = {}
        self._long: dict[Key, Value] = {}

    def add(self, at: float, labels: tuple[Any, ...], value: Value) -> None:
        """Add to the slot of this moment."""
        self._add(self._narrow, self._narrow_s, (at, *labels), value)
        self._add(self._long, LONG_S, (at, *labels), value)

    def put_minute(self, key: Key, value: Value) -> None:
        """Put back a whole minute, as the file has it."""
        self._minutes[key] = value
        self._add(self._long, LONG_S, key, value)

    def drop_minutes(self, after: float) -> None:
        """Drop the minutes that begin after this time. To be called before anything else is
        added."""
        kept = {key: value for key, value in self._minutes.items() if key[0] <= after}
        self._minutes, self._long = {}, {}
        for key, value in kept.items():
            self.put_minute(key, value)

    def forget(self, now: float, oldest: float) -> None:
        """Merge narrow slots older than `NARROW_FOR_S` into minutes; drop what is older than
        `oldest`."""
        while self._narrow and (key := next(iter(self._narrow)))[0] < now - NARROW_FOR_S:
            self._add(self._minutes, MINUTE_S, key, self._narrow.pop(key))
        for slots in (self._long, self._minutes, self._narrow):
            while slots and (key := next(iter(slots)))[0] < oldest:
                del slots[key]

    def since(self, since: float, bucket_s: float = 0.0) -> Iterator[tuple[Key, Value]]:
        """The slots that begin at `since` or later (or in its minute, where only minutes are left);
        minutes first. Long slots are used where buckets of `bucket_s` consist of them."""
        if bucket_s and bucket_s % LONG_S == 0:
            yield from _newest(self._long, floor(since, LONG_S))
            return
        yield from _newest(self._minutes, floor(since, MINUTE_S))
        yield from _newest(self._narrow, since)

    def minutes(self, start: float, end: float) -> dict[Key, Value]:
        """Whole minutes of [start, end), which begin on a minute, as copies."""
        found: dict[Key, Value] = {}
        for key, value in self.since(start):
            if key[0] < end:
                self._add(found, MINUTE_S, key, value)
        return found

    def _add(self, slots: dict[Key, Value], width: float, key: Key, value: Value) -> None:
        key = (floor(key[0], width), *key[1:])
        found = slots.get(key)
        if found is None:
            found = slots[key] = self._make()
        found.add(value)


def _newest(slots: dict[Key, Value], since: float) -> list[tuple[Key, Value]]:
    """The slots that begin at `since` or later. Slots were added nearly in order, so the search
    ends at the first that is clearly older."""
    found = []
    for key, value in reversed(slots.items()):
        if key[0] >= since:
            found.append((key, value))
        elif key[0] < since - DISORDER_S:
            break
    return found[::-1]


def floor(at: float, width: float) -> float:
    return math.floor(at / width) * width
