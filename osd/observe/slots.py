"""Counts over time, folded: short slots for the last two hours, minutes before.

windows of the feed ─► Counts ┐
heartbeats ─► StepTimes       ┴─► SlotTable: narrow slots ─ after 2 h ─► minutes ─ after `history_seconds` ─► gone
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from osd.records import SpecWindow, acceptance_length, acceptance_rate, conditional_acceptance

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


class Counts(msgspec.Struct, array_like=True):
    """Sum of windows that end in the same short time and share their labels. New fields come last: files hold arrays.

    Example:
        Counts(seconds=1.0, num_steps=100, num_drafts=100, num_draft_tokens=400, num_accepted_tokens=250,
               num_output_tokens=350, accepted_per_pos=[90, 70, 50, 40], tested_per_pos=[100, 90, 70, 50])
    """

    seconds: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_captured: int = 0
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0
    accepted_per_pos: list[int] = []
    tested_per_pos: list[int] = []

    def add(self, other: Counts) -> None:
        self.seconds += other.seconds
        self.num_steps += other.num_steps
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_output_tokens += other.num_output_tokens
        self.num_finished += other.num_finished
        self.num_captured += other.num_captured
        self.num_decode_tokens += other.num_decode_tokens
        self.decode_seconds += other.decode_seconds
        self.accepted_per_pos = _sum(self.accepted_per_pos, other.accepted_per_pos)
        self.tested_per_pos = _sum(self.tested_per_pos, other.tested_per_pos)

    @classmethod
    def of(cls, window: SpecWindow, seconds: float) -> Counts:
        """`seconds`: the window's time span, or 0 where another window of the same look has brought it."""
        return cls(
            seconds,
            window.num_steps,
            window.num_drafts,
            window.num_draft_tokens,
            window.num_accepted_tokens,
            window.num_output_tokens,
            window.num_finished,
            window.num_captured,
            window.num_decode_tokens,
            window.decode_seconds,
            list(window.num_accepted_tokens_per_pos),
            list(window.num_tested_per_pos),
        )


class StepTimes(msgspec.Struct, array_like=True):
    """What a replica's control of speculation measured in a short time.

    Example:
        StepTimes(net=(1.31, 1.22, 1.41), seconds_per_part={"draft": 0.4, "verify": 1.2})
    """

    net: tuple[float, float | None, float | None] | None = None
    """Measured speed with speculation over without so far, and the ends of its interval."""
    seconds_per_part: dict[str, float] = {}
    """part of a step -> seconds spent in it"""

    def add(self, other: StepTimes) -> None:
        """`other` is the later one."""
        self.net = other.net or self.net
        self.seconds_per_part = dict(Counter(self.seconds_per_part) + Counter(other.seconds_per_part))


class SlotTable(Generic[Value]):
    """(start, labels ...) -> sum. Not thread-safe.

    All of it is kept a second time in long slots, so that a week is drawn from a thousand sums and not from ten
    thousand.

    Example:
        table = SlotTable(Counts, narrow_s=1.0)
        table.add(window.at, (window.replica, window.version), Counts(num_drafts=100))
        table.forget(now=window.at, oldest=window.at - 7 * 86400)
    """

    def __init__(self, make: Callable[[], Value], narrow_s: float) -> None:
        self._make, self._narrow_s = make, narrow_s
        self._narrow: dict[Key, Value] = {}
        self._minutes: dict[Key, Value] = {}
        self._long: dict[Key, Value] = {}

    def add(self, at: float, labels: tuple[Any, ...], value: Value) -> None:
        """Take what was seen at this moment."""
        self._add(self._narrow, self._narrow_s, (at, *labels), value)
        self._add(self._long, LONG_S, (at, *labels), value)

    def put_minute(self, key: Key, value: Value) -> None:
        """Take a minute as it was kept."""
        self._minutes[key] = value
        self._add(self._long, LONG_S, key, value)

    def drop_minutes(self, after: float) -> None:
        """Forget the minutes that begin after this time. Only while there is nothing but minutes."""
        kept = {key: value for key, value in self._minutes.items() if key[0] <= after}
        self._minutes, self._long = {}, {}
        for key, value in kept.items():
            self.put_minute(key, value)

    def forget(self, now: float, oldest: float) -> None:
        """Fold what is no longer recent into minutes, and drop what is older than `oldest`."""
        while self._narrow and (key := next(iter(self._narrow)))[0] < now - NARROW_FOR_S:
            self._add(self._minutes, MINUTE_S, key, self._narrow.pop(key))
        for slots in (self._long, self._minutes, self._narrow):
            while slots and (key := next(iter(slots)))[0] < oldest:
                del slots[key]

    def since(self, since: float, bucket_s: float = 0.0) -> Iterator[tuple[Key, Value]]:
        """What begins at `since` or later, or in the minute of it where only minutes are left; minutes first. Long
        slots where these make up buckets of `bucket_s`."""
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
    """Those that begin at `since` or later. They were put in nearly in order, so the others are not looked at."""
    found = []
    for key, value in reversed(slots.items()):
        if key[0] >= since:
            found.append((key, value))
        elif key[0] < since - DISORDER_S:
            break
    return found[::-1]


def floor(at: float, width: float) -> float:
    return math.floor(at / width) * width


def acceptance(counts: Counts) -> dict[str, float | None]:
    """The three acceptances by their names; None where nothing was tested or drafted."""
    return {
        "alpha": conditional_acceptance(sum(counts.accepted_per_pos), sum(counts.tested_per_pos)),
        "acceptance_rate": acceptance_rate(counts.num_accepted_tokens, counts.num_draft_tokens),
        "acceptance_length": acceptance_length(counts.num_accepted_tokens, counts.num_drafts),
    }


def _sum(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
