"""What a replica among many adds up before it sends it."""

from __future__ import annotations

import pytest

from osd.exchange.registry import FEED_LENGTH
from osd.records import Counters, SpecWindow
from serving.folding import MAX_SECONDS, Folding, seconds_to_fold


def window(at: float, version: int = 1, domain: str = "", tested: int = 10) -> SpecWindow:
    counters = Counters(
        seconds=1.0,
        num_steps=tested,
        num_output_tokens=3 * tested,
        num_accepted_tokens_per_pos=[tested // 2, 1],
        num_tested_per_pos=[tested, tested // 2],
    )
    return SpecWindow.of(counters, at=at, replica="replica-0", version=version, domain=domain, k=2)


def test_a_few_replicas_send_what_they_count_at_once() -> None:
    folding = Folding()
    for at in (100.0, 101.0):
        looks = [window(at), window(at, domain="sql")]
        folding.add(looks)
        assert folding.take_if_due(at, num_replicas=6) == looks
    assert folding.take_if_due(102.0, num_replicas=6) == []


def test_a_replica_among_many_sends_sums_by_version_and_class() -> None:
    folding = Folding()
    sent = []
    for at in range(100, 140):
        folding.add([window(at), window(at, domain="sql", tested=4)] if at % 2 else [window(at)])
        if found := folding.take_if_due(at, num_replicas=130):
            sent.append((at, found))
    # Two classes of 130 replicas: 20.8 s.
    (at, found), *_ = sent
    assert at == 120
    plain, sql = sorted(found, key=lambda w: w.domain)
    assert (plain.at, plain.seconds, plain.num_steps) == (120, 21.0, 210)
    assert (sql.at, sql.seconds, sql.num_steps) == (120, 21.0, 40)
    assert plain.num_accepted_tokens_per_pos == (105, 21)
    assert plain.num_tested_per_pos == (210, 105)
    assert (plain.replica, plain.k, plain.version) == ("replica-0", 2, 1)


def test_of_a_new_draft_less_is_held_back() -> None:
    folding = Folding()
    for at in range(100, 109):
        folding.add([window(at)])
        assert folding.take_if_due(at, num_replicas=256, most=10.0) == []
    folding.add([window(109.0)])
    assert [w.num_steps for w in folding.take_if_due(109.0, 256, most=10.0)] == [100]


def test_versions_are_not_mixed() -> None:
    folding = Folding()
    folding.add([window(100.0)])
    folding.add([window(101.0, version=2)])
    assert [(w.version, w.num_steps) for w in folding.take()] == [(1, 10), (2, 10)]
    assert folding.take() == []


def test_the_clock_that_is_set_back_holds_nothing_up() -> None:
    folding = Folding()
    folding.add([window(1000.0)])
    assert folding.take_if_due(1000.0, num_replicas=256) == []
    assert len(folding.take_if_due(500.0, num_replicas=256)) == 1


def test_a_window_without_a_look_is_none() -> None:
    folding = Folding()
    folding.add([])
    assert folding.take_if_due(1e9, num_replicas=256) == []


@pytest.mark.parametrize("num_replicas", [1, 12, 13, 64, 256])
def test_the_feed_holds_an_hour_of_all(num_replicas: int) -> None:
    seconds = max(1.0, seconds_to_fold(num_replicas, num_kinds=1))
    assert num_replicas * 3600 / seconds < FEED_LENGTH
    assert (seconds == 1.0) is (num_replicas <= 12)


def test_nothing_is_held_back_for_long() -> None:
    assert seconds_to_fold(5000, num_kinds=9) == MAX_SECONDS
