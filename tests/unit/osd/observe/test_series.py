"""Columns and lines worked out by hand: what each bucket holds, and which lines there are."""

from __future__ import annotations

from typing import Any

import pytest

from osd.observe.series import COLUMNS, columns, lines
from osd.observe.slots import SpeculationTimes
from osd.records import Counters

Key = tuple[float, str, int, int]


def key(at: float, replica: str = "a", version: int = 1, k: int = 4) -> Key:
    return at, replica, version, k


def rows(
    *counts: tuple[Key, Counters], steps: Any = (), bucket_s: float = 10.0
) -> list[dict[str, Any]]:
    """What is not None, row by row."""
    found = columns(counts, steps, bucket_s)
    assert tuple(found) == COLUMNS and len({len(values) for values in found.values()}) == 1
    return [
        {name: value for name, value in zip(found, row, strict=True) if value is not None}
        for row in zip(*found.values(), strict=True)
    ]


def test_speeds_by_hand() -> None:
    """Replica a: 300 tokens in 2 s and 60 in 1 s of work; b: 50 in 4 s; c finished a request and
    had no time."""
    (row,) = rows(
        (
            key(20.0),
            Counters(
                2.0,
                10,
                num_output_tokens=300,
                num_decode_tokens=150,
                decode_seconds=1.5,
                num_finished=1,
            ),
        ),
        (
            key(29.9),
            Counters(
                1.0,
                5,
                num_output_tokens=60,
                num_decode_tokens=50,
                decode_seconds=0.5,
                num_finished=2,
            ),
        ),
        (key(25.0, "b"), Counters(4.0, 1, num_output_tokens=50)),
        (key(25.0, "c"), Counters(0.0, num_finished=4)),
    )
    assert row["at"] == 20.0
    assert row["tokens_per_second"] == 360 / 3 + 50 / 4
    assert row["tpot_ms"] == 1000 * 2.0 / 200
    assert row["requests"] == 7


def test_acceptances_are_of_all_that_is_in_the_bucket_and_rounded() -> None:
    one = Counters(
        num_drafts=3,
        num_draft_tokens=6,
        num_accepted_tokens=2,
        num_accepted_tokens_per_pos=[2, 0],
        num_tested_per_pos=[3, 2],
    )
    two = Counters(
        num_drafts=4,
        num_draft_tokens=1,
        num_accepted_tokens=1,
        num_accepted_tokens_per_pos=[1],
        num_tested_per_pos=[1],
    )
    first, second = rows((key(0.0), one), (key(9.0, "b", 2), two), (key(10.0), two))
    assert (first["tested"], second["tested"]) == (6, 1)
    assert first["alpha"] == 0.5 and first["acceptance_rate"] == round(3 / 7, 6)
    assert first["acceptance_length"] == round(1 + 3 / 7, 6)
    assert (second["alpha"], second["acceptance_rate"], second["acceptance_length"]) == (
        1.0,
        1.0,
        1.25,
    )


def test_tokens_are_told_by_who_brought_them_and_add_up() -> None:
    """Of 80 accepted draft tokens 3 lay beyond the end of their requests, of the memory's 25
    one."""
    one = Counters(
        num_steps=100,
        num_drafts=70,
        num_draft_tokens=280,
        num_accepted_tokens=80,
        num_output_tokens=200,
        num_memory_tokens=60,
        num_accepted_memory_tokens=25,
        num_cut_draft_tokens=3,
        num_cut_memory_tokens=1,
    )
    without = Counters(num_steps=40, num_output_tokens=40)
    first, second = rows((key(0.0), one), (key(5.0, "b"), without), (key(10.0), without))
    tokens = "tokens_target", "tokens_draft", "tokens_memory"
    assert [first[name] for name in tokens] == [139, 77, 24]
    assert sum(first[name] for name in tokens) == 240, "every output token, once"
    assert (first["steps"], first["verified_draft"], first["verified_memory"]) == (140, 280, 60)
    assert [second[name] for name in tokens] == [40, 0, 0]


def test_a_bucket_without_anything_has_a_row_and_nothing_in_it() -> None:
    found = rows((key(5.0), Counters(num_finished=1)), (key(35.0), Counters(num_finished=1)))
    assert [row["at"] for row in found] == [0.0, 10.0, 20.0, 30.0]
    assert found[1] == {"at": 10.0} and found[2] == {"at": 20.0}
    assert rows() == []


def test_the_version_and_k_shown_are_those_most_tokens_came_from_and_of_equals_the_newest() -> None:
    def shown(*tokens: tuple[int, int, int]) -> tuple[int, float]:
        (row,) = rows(*((key(0.0, "a", v, k), Counters(num_output_tokens=n)) for v, k, n in tokens))
        return row["version"], row["k"]

    assert shown((1, 4, 60), (2, 5, 50)) == (1, 4)
    assert shown((1, 4, 60), (2, 5, 61)) == (2, 5)
    assert shown((3, 4, 60), (2, 5, 60)) == shown((2, 5, 60), (3, 4, 60)) == (3, 4)
    assert shown((2, 4, 30), (3, 5, 50), (2, 4, 30)) == (2, 4), "sums are compared"


def test_what_a_control_measured_is_the_mean_of_the_replicas_newest() -> None:
    steps = [
        ((1.0, "a"), SpeculationTimes((1.9, 1.8, 2.0), {"draft": 1.0, "verify": 3.0})),
        ((2.0, "a"), SpeculationTimes((1.5, 1.25, None), {"sample": 4.0})),
        ((2.0, "b"), SpeculationTimes((1.0, 0.75, 1.5), {"other": 8.0})),
        ((3.0, "b"), SpeculationTimes(None, {})),
        ((11.0, "b"), SpeculationTimes(None, {})),
    ]
    first, second, third = rows(
        *((key(at), Counters(num_finished=1)) for at in (0.0, 10.0, 20.0)), steps=steps
    )
    assert (first["net_ratio"], first["net_low"], first["net_high"]) == (1.25, 1.0, 1.5)
    parts = ("draft", "verify", "sample", "other")
    assert [first[f"share_{part}"] for part in parts] == [1 / 16, 3 / 16, 4 / 16, 8 / 16]
    nothing = dict.fromkeys((name for name in COLUMNS if name.startswith("tokens_")), 0)
    del nothing["tokens_per_second"]
    nothing |= dict.fromkeys(("tested", "steps", "verified_draft", "verified_memory"), 0)
    assert second == {"at": 10.0, "requests": 1, "version": 1} | nothing
    assert third == second | {"at": 20.0}


# -- lines ----------------------------------------------------------------------------------------


def judged(num: int, accepted: int) -> Counters:
    return Counters(num_tested_per_pos=[num], num_accepted_tokens_per_pos=[accepted])


def alphas(found: dict[str, dict[str, list[float | None]]]) -> dict[str, list[float | None]]:
    return {name: line["alpha"] for name, line in found.items()}


def test_a_line_has_a_value_for_each_row_of_the_columns() -> None:
    counts = [
        (key(0.0, "b"), judged(10, 5)),
        (key(9.0, "b"), judged(30, 30)),
        (key(20.0, "a"), judged(8, 2)),
    ]
    assert alphas(lines(counts, 10.0, [0.0, 10.0, 20.0], 1)) == {
        "a": [None, None, 0.25],
        "b": [0.875, None, None],
    }
    assert list(lines(counts, 10.0, [0.0], 1)["a"]) == [
        "alpha",
        "acceptance_rate",
        "acceptance_length",
    ]


def test_places_are_counted_from_one_and_stand_in_their_order() -> None:
    counts = [
        (
            key(0.0),
            Counters(
                num_tested_per_pos=[100 - i for i in range(11)],
                num_accepted_tokens_per_pos=[50 - i for i in range(11)],
            ),
        )
    ]
    found = alphas(lines(counts, 10.0, [0.0], None))
    assert list(found) == [str(place) for place in range(1, 12)]
    assert found["1"] == [0.5] and found["11"] == [round(40 / 90, 6)]


def test_where_there_are_too_many_lines_those_with_most_tested_tokens_stay() -> None:
    counts = [(key(0.0, f"r{number:02}"), judged(1 + number, 1)) for number in range(20)]
    counts += [(key(10.0, "r00"), judged(500, 1))]
    kept = lines(counts, 10.0, [0.0, 10.0], 1)
    assert list(kept) == ["r00", *(f"r{number:02}" for number in range(20 - 12 + 1, 20))]


@pytest.mark.parametrize("bucket_s", [2.0, 7.0, 180.0])
def test_lines_and_columns_have_the_same_buckets(bucket_s: float) -> None:
    counts = [(key(1.7e9 + at), judged(10, int(at) % 10)) for at in range(0, 400, 3)]
    found = columns(counts, (), bucket_s)
    assert lines(counts, bucket_s, found["at"], 1)["a"]["alpha"] == found["alpha"]
