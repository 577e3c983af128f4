"""Arithmetic on cursors and dense ids, worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from buffers.base import holdout_capacity, in_domain
from buffers.cursor import (
    UNREADABLE_AT,
    Entry,
    Span,
    choose_seen,
    keep_newest,
    merge_by_time,
    num_unread,
    start_of,
    take_oldest,
)
from tests.support.builders import ids, make_trace

EMPTY = Span(8, 7)
"""Of a stream that was trimmed to nothing."""


def entry(at: float, seq: int) -> Entry:
    return Entry(at, seq, make_trace(index=seq, finished_at=at))


def bad(seq: int) -> Entry:
    return Entry(UNREADABLE_AT, seq, None)


def test_a_span_counts_both_ends() -> None:
    assert (Span(5, 9).num, Span(5, 5).num, EMPTY.num) == (5, 1, 0)


@pytest.mark.parametrize(
    ("cursor", "start", "unread"),
    [
        ({}, 4, 5),
        ({"a": 0}, 4, 5),
        ({"a": 3}, 4, 5),
        ({"a": 4}, 4, 5),
        ({"a": 5}, 5, 4),
        ({"a": 8}, 8, 1),
        ({"a": 9}, 9, 0),
        ({"a": 10}, 9, 0),
        ({"a": 99}, 9, 0),
        ({"gone": 7}, 4, 5),
    ],
)
def test_a_cursor_is_brought_past_what_was_trimmed_and_not_past_what_is_there(
    cursor: dict[str, int], start: int, unread: int
) -> None:
    spans = {"a": Span(5, 9), "empty": EMPTY}
    assert start_of(spans, cursor) == {"a": start, "empty": 7}
    assert num_unread(spans, cursor) == unread


def test_the_oldest_of_all_domains_come_first_and_the_cursor_stands_behind_them() -> None:
    entries = {"a": [entry(1.0, 11), entry(4.0, 12)], "b": [entry(2.0, 21), entry(3.0, 22)]}
    for limit, times, cursor in (
        (0, [], {"a": 10, "b": 20}),
        (-1, [], {"a": 10, "b": 20}),
        (1, [1.0], {"a": 11, "b": 20}),
        (3, [1.0, 2.0, 3.0], {"a": 11, "b": 22}),
        (9, [1.0, 2.0, 3.0, 4.0], {"a": 12, "b": 22}),
    ):
        start = {"a": 10, "b": 20}
        traces, moved = take_oldest(entries, start, limit)
        assert ([trace.finished_at for trace in traces], moved) == (times, cursor)
        assert start == {"a": 10, "b": 20}


def test_what_cannot_be_read_is_passed_over_also_behind_the_last_that_is_taken() -> None:
    entries = {
        "a": [bad(11), entry(5.0, 12), bad(13), bad(14), entry(6.0, 15)],
        "b": [entry(1.0, 21), bad(22)],
    }
    traces, cursor = take_oldest(entries, {"a": 10, "b": 20}, 2)
    assert ids(traces) == ids([make_trace(index=21), make_trace(index=12)])
    assert cursor == {"a": 14, "b": 22}


def test_entries_are_asked_for_no_further_than_needed() -> None:
    num_asked = Counter[str]()

    def stream(domain: str) -> Iterator[Entry]:
        for seq in range(1, 100):
            num_asked[domain] += 1
            yield entry(float(seq), seq)

    take_oldest({"a": stream("a"), "b": stream("b")}, {}, 4)
    assert max(num_asked.values()) <= 4


def test_a_domain_keeps_its_own_order_where_clocks_differ() -> None:
    """Entries of one time: the domain that sorts first goes first."""
    entries = {"b": [entry(2.0, 1), entry(1.0, 2)], "a": [entry(2.0, 1), entry(3.0, 2)]}
    merged = [(domain, found.seq) for domain, found in merge_by_time(entries)]
    assert merged == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]


@pytest.mark.parametrize(
    ("keep", "cursor"),
    [
        (0, {"a": 12, "b": 22}),
        (1, {"a": 12, "b": 21}),
        (2, {"a": 11, "b": 21}),
        (3, {"a": 10, "b": 21}),
        (4, {"a": 10, "b": 20}),
        (9, {"a": 10, "b": 20}),
    ],
)
def test_the_newest_are_kept(keep: int, cursor: dict[str, int]) -> None:
    newest_first = {"a": [(3.0, 12), (2.0, 11)], "b": [(4.0, 22), (1.0, 21)]}
    assert keep_newest(newest_first, {"a": Span(11, 12), "b": Span(21, 22)}, keep) == cursor


# -- samples --------------------------------------------------------------------------------------

SPANS = {"a": Span(11, 20), "b": Span(101, 103), "empty": EMPTY}


def chosen(
    n: int, cursor: dict[str, int], since: dict[str, int] | None = None, seed: int = 0
) -> dict[str, list[int]]:
    """domain -> the ids that were chosen, in order of size; no id twice."""
    found: dict[str, list[int]] = {}
    for domain, seq in choose_seen(SPANS, cursor, n, np.random.default_rng(seed), since):
        found.setdefault(domain, []).append(seq)
    assert all(len(set(seqs)) == len(seqs) for seqs in found.values())
    return {domain: sorted(seqs) for domain, seqs in found.items()}


@pytest.mark.parametrize(
    ("cursor", "since", "expected"),
    [
        ({"a": 20, "b": 103}, None, {"a": list(range(11, 21)), "b": [101, 102, 103]}),
        ({"a": 13, "b": 101}, None, {"a": [11, 12, 13], "b": [101]}),
        ({"a": 11}, None, {"a": [11]}),
        ({"a": 10, "b": 100}, None, {}),
        ({"a": 999, "b": 999, "gone": 3}, {"a": 18, "b": 103}, {"a": [19, 20]}),
        (
            {"a": 20, "b": 103},
            {"a": 5, "b": 102, "gone": 3},
            {"a": list(range(11, 21)), "b": [103]},
        ),
        ({"a": 15}, {"a": 15}, {}),
        ({"a": 15}, {"a": 14}, {"a": [15]}),
    ],
)
def test_only_what_lies_between_two_cursors_is_chosen(
    cursor: dict[str, int], since: dict[str, int] | None, expected: dict[str, list[int]]
) -> None:
    assert chosen(99, cursor, since) == expected
    assert chosen(0, cursor, since) == chosen(-1, cursor, since) == {}


@pytest.mark.parametrize(
    ("n", "shares"), [(2, [1, 1]), (6, [3, 3]), (7, [3, 4]), (9, [3, 6]), (13, [3, 10])]
)
def test_domains_take_turns_while_they_have_any(n: int, shares: list[int]) -> None:
    for seed in range(5):
        assert sorted(map(len, chosen(n, {"a": 20, "b": 103}, seed=seed).values())) == shares


def test_whose_turn_is_first_is_drawn() -> None:
    assert {next(iter(chosen(1, {"a": 20, "b": 103}, seed=seed))) for seed in range(12)} == {
        "a",
        "b",
    }


def test_every_id_is_drawn_sooner_or_later() -> None:
    drawn = {seq for seed in range(60) for seq in chosen(2, {"a": 20}, seed=seed)["a"]}
    assert drawn == set(range(11, 21))


# -- rules that every buffer shares ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_traces", "held_out"), [(16, 64), (512, 64), (519, 64), (520, 65), (20_000, 2500)]
)
def test_an_eighth_as_many_are_held_out_and_never_fewer_than_64(
    max_traces: int, held_out: int
) -> None:
    assert holdout_capacity(max_traces) == held_out


def test_a_trace_says_where_it_is_stored() -> None:
    trace = make_trace(domain="a b")
    assert in_domain(trace, "a_b").domain == "a_b" and in_domain(trace, "a b") is trace
