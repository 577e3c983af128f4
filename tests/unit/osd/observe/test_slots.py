"""Slots find what was added at each moment: first in narrow slots, later by the minute."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import msgspec
import pytest

from osd.observe.slots import Key, SlotTable, SpeculationTimes, floor
from osd.records import Counters, SpecWindow, decode

DAY = 86400.0
"""A time on the edge of every slot."""
RECENT_S, LONG_S = 7200.0, 600.0


def drafts(num: int) -> Counters:
    return Counters(num_drafts=num)


def table(*added: tuple[float, int], narrow_s: float = 1.0) -> SlotTable[Counters]:
    """Drafts of the replica `r` at so many seconds after `DAY`."""
    made = SlotTable(Counters, narrow_s=narrow_s)
    for at, num in added:
        made.add(DAY + at, ("r",), drafts(num))
    return made


def since(slots: SlotTable[Counters], at: float, bucket_s: float = 0.0) -> list[tuple[float, int]]:
    return [(key[0] - DAY, counts.num_drafts) for key, counts in slots.since(DAY + at, bucket_s)]


EACH = Counters(1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10.5, [11, 12], [13, 14], 15, 16, 17, 18)
"""Another value in each field."""


def test_each_field_is_summed_by_itself() -> None:
    total = Counters()
    total.add(EACH)
    more = [1100, 1200, 1300, 1400]
    total.add(
        Counters(100.0, 200, 300, 400, 500, 600, 700, 800, 900, 1000.0, [1, 1, 5], [2, 2, 6], *more)
    )
    expected = Counters(
        101.5, 202, 303, 404, 505, 606, 707, 808, 909, 1010.5, [12, 13, 5], [15, 16, 6],
        1115, 1216, 1317, 1418,
    )  # fmt: skip
    assert total == expected
    assert EACH.num_accepted_tokens_per_pos == [11, 12], "what was added stays as it was"


def test_a_window_becomes_counts_field_by_field() -> None:
    window = SpecWindow(
        at=DAY,
        replica="r",
        version=1,
        seconds=1.5,
        k=2,
        num_steps=2,
        num_drafts=3,
        num_draft_tokens=4,
        num_accepted_tokens=5,
        num_output_tokens=6,
        num_finished=7,
        num_captured=8,
        num_decode_tokens=9,
        decode_seconds=10.5,
        num_accepted_tokens_per_pos=(11, 12),
        num_tested_per_pos=(13, 14),
        num_memory_tokens=15,
        num_accepted_memory_tokens=16,
        num_cut_draft_tokens=17,
        num_cut_memory_tokens=18,
    )
    assert window.counters == EACH
    assert SpecWindow.of(EACH, at=0.0, replica="r", version=1, k=2).counters == EACH


def test_counts_stand_in_files_as_they_always_did() -> None:
    """A file outlives the version that wrote it."""
    assert msgspec.json.encode(EACH) == b"[1.5,2,3,4,5,6,7,8,9,10.5,[11,12],[13,14],15,16,17,18]"
    assert msgspec.json.decode(b"[1.5,2,3]", type=Counters) == Counters(
        seconds=1.5, num_steps=2, num_drafts=3
    )
    newer = msgspec.json.encode(EACH)[:-1] + b",19]"
    assert msgspec.json.decode(newer, type=Counters) == EACH, "one that knows less reads it too"
    times = SpeculationTimes((1.3, None, 1.4), {"draft": 0.5})
    assert msgspec.json.encode(times) == b'[[1.3,null,1.4],{"draft":0.5}]'
    assert msgspec.json.decode(b'[[1.3,null,1.4],{"draft":0.5}]', type=SpeculationTimes) == times


def test_what_an_earlier_version_counted_has_the_draft_and_the_target_as_its_sources() -> None:
    """In the file, and in the feed while replicas of both versions serve."""
    kept = b"[1.0,100,100,400,250,350,2,2,320,4.0,[90,70,50,40],[100,90,70,50]]"
    counts = msgspec.json.decode(kept, type=Counters)
    assert counts.by_source() == {"target": 100, "draft": 250, "memory": 0}
    fields = {"at": 1.0, "replica": "r", "version": 4, "seconds": 1.0, "k": 4, "num_drafts": 100}
    fields |= {"num_draft_tokens": 400, "num_accepted_tokens": 250, "num_output_tokens": 350}
    fields |= {"num_accepted_tokens_per_pos": [250], "num_tested_per_pos": [310]}
    earlier = decode(msgspec.json.encode(fields), SpecWindow)
    later = decode(msgspec.json.encode(fields | {"num_of_tomorrow": 3}), SpecWindow)
    assert earlier.counters.by_source() == {"target": 100, "draft": 250, "memory": 0}
    assert later == earlier


def test_parts_of_a_window_have_all_of_its_sources_and_none_below_nothing() -> None:
    counts = Counters(
        num_output_tokens=7,
        num_accepted_tokens=5,
        num_memory_tokens=9,
        num_accepted_memory_tokens=4,
        num_cut_draft_tokens=2,
        num_cut_memory_tokens=3,
    )
    assert counts.by_source() == {"target": 3, "draft": 3, "memory": 1}
    parts, total = counts.parts(5), Counters()
    for part in parts:
        total.add(part)
    assert total == counts
    assert all(num >= 0 for part in parts for num in part.by_source().values())


def test_step_times_add_seconds_and_keep_what_was_measured_last() -> None:
    times = SpeculationTimes(net=(1.1, 1.0, 1.2), seconds_per_part={"draft": 1.0, "verify": 2.0})
    times.add(SpeculationTimes(seconds_per_part={"draft": 0.5, "sample": 0.25}))
    assert times == SpeculationTimes((1.1, 1.0, 1.2), {"draft": 1.5, "verify": 2.0, "sample": 0.25})
    times.add(SpeculationTimes(net=(1.5, None, None)))
    assert times.net == (1.5, None, None)


def test_what_shares_a_slot_and_its_labels_is_summed() -> None:
    slots = table((0.0, 1), (4.99, 2), (5.0, 4), narrow_s=5.0)
    slots.add(DAY + 1, ("other",), drafts(8))
    assert [(key[0] - DAY, key[1], counts.num_drafts) for key, counts in slots.since(DAY)] == [
        (0.0, "r", 3),
        (0.0, "other", 8),
        (5.0, "r", 4),
    ]


def test_what_is_given_stays_the_givers() -> None:
    slots, counts = table(), Counters(num_drafts=1, num_tested_per_pos=[1])
    slots.add(DAY, ("r",), counts)
    counts.add(drafts(100))
    counts.num_tested_per_pos[0] = 100
    (_, copy), *_ = slots.changed(DAY + 60).items()
    copy.add(drafts(1000))
    for bucket_s in (0.0, LONG_S):
        assert since(slots, 0.0, bucket_s) == [(0.0, 1)]
        assert [found.num_tested_per_pos for _, found in slots.since(DAY, bucket_s)] == [[1]]


def test_since_is_told_from_the_slot_that_begins_then() -> None:
    slots = table((9.0, 1), (10.0, 2), (11.0, 4))
    assert since(slots, 10.0) == [(10.0, 2), (11.0, 4)]
    assert since(slots, 10.1) == [(11.0, 4)]


def test_a_clock_that_is_a_little_behind_hides_nothing() -> None:
    """Windows of two replicas; the clock of one is two minutes behind."""
    late = 120.0
    slots = table((200.0, 1), (200.0 - late, 2), (201.0, 4), (201.0 - late, 8))
    assert since(slots, 200.0) == [(200.0, 1), (201.0, 4)]
    assert since(slots, 200.0 - late) == [
        (200.0 - late, 2),
        (201.0 - late, 8),
        (200.0, 1),
        (201.0, 4),
    ]


def test_windows_that_could_not_be_sent_for_minutes_hide_nothing() -> None:
    """One of two replicas worked first, and sends last what it counted while Redis was away."""
    slots = table((600.0, 1), (601.0, 2), (0.0, 4), (1.0, 8), (602.0, 16))
    assert since(slots, 500.0) == [(600.0, 1), (601.0, 2), (602.0, 16)]
    slots.forget(DAY + 601 + RECENT_S, 0.0)
    assert since(slots, 0.0) == [(0.0, 12), (600.0, 1), (601.0, 2), (602.0, 16)]


def test_a_clock_that_was_set_back_goes_on() -> None:
    slots = table((7200.0, 1), (0.0, 2), (1.0, 4))
    slots.forget(DAY + 1, 0.0)
    assert since(slots, 0.0) == [(0.0, 2), (1.0, 4), (7200.0, 1)]


def test_what_is_no_longer_recent_is_folded_into_minutes() -> None:
    slots = table((10.0, 1), (20.0, 2), (70.0, 4), (80.0, 8))
    slots.forget(DAY + 70 + RECENT_S, 0.0)
    assert since(slots, 0.0) == [(0.0, 3), (70.0, 4), (80.0, 8)], "minutes first"
    assert since(slots, 30.0) == [(0.0, 3), (70.0, 4), (80.0, 8)], (
        "the minute in which it begins is whole"
    )
    assert since(slots, 60.0) == [(70.0, 4), (80.0, 8)]
    slots.forget(DAY + 70.5 + RECENT_S, 0.0)
    assert since(slots, 0.0) == [(0.0, 3), (60.0, 4), (80.0, 8)]
    assert since(slots, 0.0, LONG_S) == [(0.0, 15)], "long slots have all of it, once"


def test_what_is_too_old_goes_from_everywhere() -> None:
    slots = table((0.0, 1), (600.0, 2), (660.0, 4), (661.0, 8), (1300.0, 16))
    slots.forget(DAY + 661 + RECENT_S, DAY + 600)
    assert since(slots, 0.0) == [(600.0, 2), (660.0, 4), (661.0, 8), (1300.0, 16)]
    assert since(slots, 0.0, LONG_S) == [(600.0, 14), (1200.0, 16)]
    slots.forget(DAY + 661 + RECENT_S, DAY + 660.5)
    assert since(slots, 0.0) == [(661.0, 8), (1300.0, 16)]
    slots.forget(DAY + 661, DAY + 1300)
    assert since(slots, 0.0) == [(1300.0, 16)]
    assert since(slots, 0.0, LONG_S) == [], "a long slot goes when its beginning is too old"


@pytest.mark.parametrize(
    ("bucket_s", "is_long"),
    [(0.0, False), (60.0, False), (900.0, False), (600.0, True), (1200.0, True)],
)
def test_long_slots_are_for_buckets_they_make_up(bucket_s: float, is_long: bool) -> None:
    slots = table((10.0, 1), (599.0, 2), (600.0, 4))
    fine = [(10.0, 1), (599.0, 2), (600.0, 4)]
    assert since(slots, 5.0, bucket_s) == ([(0.0, 3), (600.0, 4)] if is_long else fine)
    assert since(slots, 700.0, bucket_s) == ([(600.0, 4)] if is_long else [])


def total(found: Iterable[tuple[Key, Counters]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, counts in found:
        sums[key[1]] = sums.get(key[1], 0) + counts.num_drafts
    return sums


def busy(seconds: int, num_replicas: int = 3, *, turns: int = 1) -> SlotTable[Counters]:
    """Each replica in each second, some of them a little late; each adds another number. Of `turns`
    replicas, one has its turn in each second."""
    slots, late = SlotTable(Counters, narrow_s=1.0, is_summed=True), random.Random(1)
    for second in range(seconds):
        for replica in range(second % turns, num_replicas, turns):
            at = DAY + second - (late.randrange(100) if late.random() < 0.1 else 0)
            slots.add(at, (f"r{replica}",), drafts(1 + second % 7))
    return slots


@pytest.mark.parametrize("forgotten_at", [None, 7200.0, 9000.0, 10_800.5])
def test_what_lies_between_two_times_adds_up(forgotten_at: float | None) -> None:
    """Also of a time of which a part is minutes by now, those of a file among them."""
    slots, times = busy(10_000, turns=3), random.Random(2)
    slots.put_minute((DAY - 60, "r1"), drafts(1000))
    slots.put_minute((DAY + 9_900, "r1"), drafts(1000))
    if forgotten_at is not None:
        slots.forget(DAY + forgotten_at, DAY - 100)
    spans = [(times.uniform(-200, 10_100), times.uniform(0, 4000)) for _ in range(30)]
    spans += [(600.0, 600.0), (1200.0, 59.0), (3600.0, math.inf), (-math.inf, math.inf)]
    for start, seconds in spans:
        since, until = DAY + start, DAY + start + seconds if start > -math.inf else math.inf
        expected = total((k, c) for k, c in slots.since(since) if k[0] <= until)
        assert total(slots.between(since, until)) == expected, (start, seconds)


def test_an_hour_is_added_up_from_few_slots() -> None:
    slots = busy(7200)
    assert len(list(slots.since(DAY + 3333))) > 10_000
    assert len(list(slots.between(DAY + 3333, DAY + 7210))) < 3 * 60


def test_minutes_that_changed_are_whole_and_told_until_they_are_saved() -> None:
    slots = table((59.0, 1), (60.0, 2), (119.0, 4), (120.0, 8))
    slots.put_minute((DAY + 180, "r"), drafts(100))
    slots.add(DAY + 61, ("other",), drafts(16))

    def changed(until: float) -> dict[tuple[float, str], int]:
        found = slots.changed(DAY + until).items()
        return {(key[0] - DAY, key[1]): counts.num_drafts for key, counts in found}

    assert changed(0) == {}
    whole = {(0.0, "r"): 1, (60.0, "r"): 6, (60.0, "other"): 16}
    assert changed(120) == changed(120) == whole
    slots.forget(DAY + 65 + RECENT_S, 0.0)
    assert changed(120) == whole, "also where a part is a minute already"
    slots.note_saved(DAY + 120)
    assert changed(240) == {(120.0, "r"): 8}, "what a file had is there already"
    slots.add(DAY + 70, ("r",), drafts(32))
    assert changed(120) == {(60.0, "r"): 38, (60.0, "other"): 16}, "one that comes late"
    slots.note_saved(DAY + 240)
    assert changed(240) == {}


def test_minutes_of_a_file_are_told_like_those_that_were_folded() -> None:
    slots = table()
    for minute in (0.0, 60.0, 600.0):
        slots.put_minute((DAY + minute, "r"), drafts(1 + int(minute)))
    assert since(slots, 0.0) == [(0.0, 1), (60.0, 61), (600.0, 601)]
    assert since(slots, 0.0, LONG_S) == [(0.0, 62), (600.0, 601)]
    slots.drop_minutes(after=DAY + 60)
    assert since(slots, 0.0) == [(0.0, 1), (60.0, 61)]
    assert since(slots, 0.0, LONG_S) == [(0.0, 62)], "neither lost nor twice"
    assert floor(-0.5, 60.0) == -60.0


def test_acceptances_by_hand() -> None:
    counts = Counters(
        num_drafts=10,
        num_draft_tokens=40,
        num_accepted_tokens=20,
        num_accepted_tokens_per_pos=[8, 6],
        num_tested_per_pos=[10, 8],
    )
    assert counts.acceptance() == {
        "alpha": 14 / 18,
        "acceptance_rate": 0.5,
        "acceptance_length": 3.0,
    }
    assert Counters().acceptance() == {
        "alpha": None,
        "acceptance_rate": None,
        "acceptance_length": None,
    }
