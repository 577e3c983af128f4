"""Counters over time: in short slots for the last two hours, in minutes before that.

windows of the feed ─► Counters ┐
heartbeats ─► SpeculationTimes  ┴─► SlotTable

narrow slots ─ after 2 h ─► minutes ─ after `history_seconds` ─► gone
     └─ summed as well ─► slots of 10 s, of a minute, of 10 minutes (while they are narrow)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from osd.records import Counters

MINUTE_S, LONG_S = 60.0, 600.0
NARROW_FOR_S = 7200.0
"""Seconds for which slots stay narrow."""
SUMMED_S = (LONG_S, MINUTE_S, 10.0)
"""Widths in which narrow slots are summed as well, so that an hour of many replicas is soon added
up."""
MOST_PARTS = 60
"""Of a window of many seconds."""

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


def spread(at: float, seconds: float, counts: Counters) -> Iterator[tuple[float, Counters]]:
    """What was counted in the `seconds` until `at`, second by second: a replica among many adds up
    its windows before it sends one."""
    seconds = seconds if math.isfinite(seconds) else 0.0
    num = min(max(1, round(seconds)), MOST_PARTS)
    return ((at - i * seconds / num, part) for i, part in enumerate(counts.parts(num)))


class Slots(Generic[Value]):
    """Sums in slots of one width, oldest first, whenever each came up: clocks are set, and what a
    replica could not send comes late. Not thread-safe."""

    def __init__(self, make: Callable[[], Value], width: float) -> None:
        self._make, self.width = make, width
        self._by_start: dict[float, dict[Key, Value]] = {}
        self._starts: list[float] = []
        """Ascending."""

    def add(self, at: float, labels: Key, value: Value) -> None:
        """Add to the slot of this moment."""
        start = floor(at, self.width)
        sums = self._by_start.get(start)
        if sums is None:
            sums = self._by_start[start] = {}
            insort(self._starts, start)
        found = sums.get(labels)
        if found is None:
            found = sums[labels] = self._make()
        found.add(value)

    def within(self, start: float, end: float = math.inf) -> Iterator[tuple[Key, Value]]:
        """The slots that begin in [start, end)."""
        for at in self._starts[bisect_left(self._starts, start) : bisect_left(self._starts, end)]:
            yield from (((at, *labels), value) for labels, value in self._by_start[at].items())

    def take_before(self, start: float) -> list[tuple[Key, Value]]:
        """Take out the slots that begin before."""
        taken = list(self.within(-math.inf, start))
        self.drop_before(start)
        return taken

    def drop_before(self, start: float) -> None:
        """As `take_before`."""
        num = bisect_left(self._starts, start)
        for at in self._starts[:num]:
            del self._by_start[at]
        del self._starts[:num]


class SlotTable(Generic[Value]):
    """(start, labels ...) -> sum. Not thread-safe.

    All of it is kept a second time in long slots, so that a week is drawn from a thousand sums and
    not from ten thousand. With `is_summed`, narrow slots are kept in wider ones too: see `between`.

    Example:
        table = SlotTable(Counters, narrow_s=1.0)
        table.add(window.at, (window.replica, window.version), Counters(num_drafts=100))
        table.forget(now=window.at, oldest=window.at - 7 * 86400)
    """

    def __init__(
        self, make: Callable[[], Value], narrow_s: float, *, is_summed: bool = False
    ) -> None:
        self._make = make
        self._narrow = Slots(make, narrow_s)
        self._minutes, self._long = Slots(make, MINUTE_S), Slots(make, LONG_S)
        self._summed = [Slots(make, width) for width in SUMMED_S if is_summed]
        self._changed: set[float] = set()
        """Starts of the minutes that were added to since they were saved."""
        self._whole_from = -math.inf
        """Start of the first of the widest sums of which no part is gone."""

    def add(self, at: float, labels: tuple[Any, ...], value: Value) -> None:
        """Add to the slot of this moment."""
        self._changed.add(floor(at, MINUTE_S))
        for slots in (self._narrow, self._long, *self._summed):
            slots.add(at, labels, value)

    def put_minute(self, key: Key, value: Value) -> None:
        """Put back a whole minute, as the file has it."""
        for slots in (self._minutes, self._long):
            slots.add(key[0], key[1:], value)

    def drop_minutes(self, after: float) -> None:
        """Drop the minutes that begin after this time. To be called before anything else is
        added."""
        kept = [(key, value) for key, value in self._minutes.within(-math.inf) if key[0] <= after]
        self._minutes, self._long = Slots(self._make, MINUTE_S), Slots(self._make, LONG_S)
        for key, value in kept:
            self.put_minute(key, value)

    def forget(self, now: float, oldest: float) -> None:
        """Merge narrow slots older than `NARROW_FOR_S` into minutes; drop what is older than
        `oldest`."""
        for key, value in self._narrow.take_before(now - NARROW_FOR_S):
            self._minutes.add(key[0], key[1:], value)
        for slots in (self._long, self._minutes, self._narrow):
            slots.drop_before(oldest)
        gone = -floor(-max(now - NARROW_FOR_S, oldest), LONG_S)
        self._whole_from = max(self._whole_from, gone)
        for slots in self._summed:
            slots.drop_before(self._whole_from)

    def since(self, since: float, bucket_s: float = 0.0) -> Iterator[tuple[Key, Value]]:
        """The slots that begin at `since` or later (or in its minute, where only minutes are left);
        minutes first. Long slots are used where buckets of `bucket_s` consist of them."""
        if bucket_s and bucket_s % LONG_S == 0:
            yield from self._long.within(floor(since, LONG_S))
            return
        yield from self._minutes.within(floor(since, MINUTE_S))
        yield from self._narrow.within(since)

    def labels(self) -> set[Key]:
        """Of all that is kept."""
        return {key[1:] for key, _ in self._long.within(-math.inf)}

    def between(self, since: float, until: float) -> Iterator[tuple[Key, Value]]:
        """What adds up to the slots that `since` gives and that begin at `until` at the latest: of
        many narrow slots, wider ones that consist of them."""
        if not self._summed or since < self._whole_from:
            found = self.since(since)
        else:
            end = floor(until, self._narrow.width) + self._narrow.width
            yield from self._cover(since, end, [*self._summed, self._narrow])
            found = self._minutes.within(floor(since, MINUTE_S))
        yield from ((key, value) for key, value in found if key[0] <= until)

    def _cover(
        self, start: float, end: float, slots: list[Slots[Value]]
    ) -> Iterator[tuple[Key, Value]]:
        """[start, end) in the widest slots that fit; `slots`: widest first."""
        widest, *others = slots
        if not others:
            yield from widest.within(start, end)
            return
        first, last = -floor(-start, widest.width), floor(end, widest.width)
        if first >= last:
            yield from self._cover(start, end, others)
            return
        yield from widest.within(first, last)
        for a, b in ((start, first), (last, end)):
            if a < b:
                yield from self._cover(a, b, others)

    def changed(self, until: float) -> dict[Key, Value]:
        """Whole minutes before `until`, which begins one, that were added to since they were saved
        last, as copies."""
        starts = {start for start in self._changed if start < until}
        found = Slots(self._make, MINUTE_S)
        for slots in (self._minutes, self._narrow) if starts else ():
            for key, value in slots.within(min(starts), until):  # all: a clock may be set back
                if floor(key[0], MINUTE_S) in starts:
                    found.add(key[0], key[1:], value)
        return dict(found.within(-math.inf))

    def note_saved(self, until: float) -> set[float]:
        """What `changed` found is kept elsewhere now. Returns the starts of these minutes."""
        saved = {start for start in self._changed if start < until}
        self._changed -= saved
        return saved

    def note_unsaved(self, starts: set[float]) -> None:
        """It could not be kept."""
        self._changed |= starts


def floor(at: float, width: float) -> float:
    return at if math.isinf(at) else math.floor(at / width) * width


def added(found: Iterable[tuple[Key, Value]], total: Value) -> tuple[Key, Value]:
    """The newest key, and `total` with all values added."""
    newest: Key = ()
    for key, value in found:
        newest = max(newest, key)
        total.add(value)
    return newest, total
