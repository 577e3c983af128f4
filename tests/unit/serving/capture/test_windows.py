"""Counters per draft version and domain, and the acceptance figures made of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from osd.records import Counters, SpecWindow
from serving.capture.windows import DOMAIN_SECONDS, LONGEST_GAP, MAX_DOMAINS, WindowCounter
from tests.support.captures import Clock


def windows_of(counter: WindowCounter) -> dict[tuple[int, str], SpecWindow]:
    """What has been counted, by version and domain."""
    return {
        (window.version, window.domain): window for window in counter.take("replica-0", "default")
    }


def add(
    counter: WindowCounter,
    version: int = 1,
    domain: str = "",
    drafts: int = 4,
    accepted: int = 1,
    **more: Any,
) -> None:
    """A step of one request in which all that was emitted was served."""
    counter.add_step(version, domain, drafts, accepted, accepted + 1, **more)


def test_counts_per_position_are_of_tested_tokens_only() -> None:
    counter = WindowCounter(4)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=2, num_served=3)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=0, num_served=1)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=4, num_served=5)
    counter.add_step(version=1, domain="", num_drafts=0, num_accepted=0, num_served=1)
    (window,) = counter.take("replica-0", "default")
    assert window.num_tested_per_pos == (3, 2, 2, 1)
    assert window.num_accepted_tokens_per_pos == (2, 2, 1, 1)
    assert (window.num_drafts, window.num_draft_tokens, window.num_accepted_tokens) == (3, 12, 6)
    assert window.num_output_tokens == 10
    assert window.num_steps == 4, "the one without a draft is among them"
    assert window.alpha == pytest.approx(6 / 8)
    assert counter.take("replica-0", "default") == []


def test_a_short_draft_is_tested_as_far_as_it_goes() -> None:
    counter = WindowCounter(4)
    add(counter, drafts=2, accepted=2)
    add(counter, drafts=1, accepted=0)
    (window,) = counter.take("r", "default")
    assert (window.num_tested_per_pos, window.num_accepted_tokens_per_pos) == (
        (2, 1, 0, 0),
        (1, 1, 0, 0),
    )
    assert (window.num_drafts, window.num_draft_tokens) == (2, 3)


def test_what_lies_beyond_the_end_of_a_request_counts_for_vllm_but_not_per_position() -> None:
    counter = WindowCounter(4)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=3, num_served=2)
    (window,) = counter.take("replica-0", "default")
    assert window.num_accepted_tokens == 3
    assert window.num_tested_per_pos == (1, 1, 0, 0)
    assert window.num_accepted_tokens_per_pos == (1, 1, 0, 0)


def test_tokens_of_the_memory_are_counted_apart_and_judge_no_draft() -> None:
    counter = WindowCounter(8)
    counter.add_step(1, "", num_drafts=4, num_accepted=2, num_served=3)
    counter.add_step(1, "", num_drafts=8, num_accepted=5, num_served=6, is_memory=True)
    counter.add_step(1, "", num_drafts=0, num_accepted=0, num_served=1)
    (window,) = counter.take("r", "default")
    assert (window.num_drafts, window.num_draft_tokens, window.num_accepted_tokens) == (1, 4, 2)
    assert (window.num_memory_tokens, window.num_accepted_memory_tokens) == (8, 5)
    assert sum(window.num_tested_per_pos) == 3
    assert window.counters.by_source() == {"target": 3, "draft": 2, "memory": 5}
    assert (window.num_steps, window.num_output_tokens) == (3, 10)


@pytest.mark.parametrize("is_memory", [False, True])
@pytest.mark.parametrize(
    ("num_served", "own", "others"), [(5, 1, 4), (4, 0, 4), (2, 0, 2), (1, 0, 1), (0, 0, 0)]
)
def test_an_accepted_token_beyond_the_end_was_brought_by_nobody(
    is_memory: bool, num_served: int, own: int, others: int
) -> None:
    counter = WindowCounter(4)
    counter.add_step(1, "", 4, 4, num_served, is_memory=is_memory)
    (window,) = counter.take("r", "default")
    assert window.num_accepted_tokens + window.num_accepted_memory_tokens == 4, "as vLLM counts"
    proposed = {"draft": 0, "memory": others} if is_memory else {"draft": others, "memory": 0}
    assert window.counters.by_source() == {"target": own, **proposed}


def test_a_window_says_of_whom_and_when_it_is() -> None:
    clock = Clock()
    counter = WindowCounter(3, clock)
    add(counter, version=7, domain="sql")
    clock.now += 1.5
    (window,) = counter.take("replica-3", "tiny")
    assert (window.replica, window.draft, window.version, window.domain) == (
        "replica-3",
        "tiny",
        7,
        "sql",
    )
    assert (window.k, window.seconds) == (3, 1.5)
    assert window.at == pytest.approx(time.time(), abs=60)


def test_versions_and_domains_are_apart() -> None:
    counter = WindowCounter(4)
    for version, domain, times in ((1, "", 1), (1, "sql", 2), (2, "", 3), (2, "sql", 4)):
        for _ in range(times):
            add(counter, version, domain)
    found = windows_of(counter)
    assert {key: window.num_steps for key, window in found.items()} == {
        (1, ""): 1, (1, "sql"): 2, (2, ""): 3, (2, "sql"): 4,
    }  # fmt: skip


def test_so_many_labels_are_counted_apart_and_further_ones_as_unlabelled() -> None:
    counter = WindowCounter(2)
    for i in range(MAX_DOMAINS + 50):
        add(counter, 1, f"d{i}", drafts=2)
        counter.add_finished(f"d{i}", 1.0, 2)
    add(counter, 2, "d1", drafts=2)
    add(counter, 2, f"d{MAX_DOMAINS}", drafts=2)
    found = windows_of(counter)
    assert MAX_DOMAINS == 64
    assert found.keys() == {
        *((1, f"d{i}") for i in range(MAX_DOMAINS)),
        (1, ""),
        (2, "d1"),
        (2, ""),
    }
    assert (found[1, ""].num_drafts, found[1, ""].num_finished) == (50, 50)
    assert (found[1, "d63"].num_drafts, found[1, "d63"].num_finished) == (1, 1)
    total = Counters()
    for window in found.values():
        total.add(window.counters)
    assert total.num_drafts == total.num_steps == MAX_DOMAINS + 52, "none is lost"
    add(counter, 3, "d0")
    add(counter, 3, "newer")
    assert windows_of(counter).keys() == {(3, "d0"), (3, "")}, "labels that were taken stay so"


def test_a_label_that_does_not_come_again_makes_room_for_another() -> None:
    counter = WindowCounter(4, clock=(clock := Clock()))
    for i in range(MAX_DOMAINS):
        add(counter, 1, f"d{i}")
    clock.now = DOMAIN_SECONDS - 1
    add(counter, 1, "d0")
    counter.take("r", "default")
    for at, shown in ((DOMAIN_SECONDS - 1, ""), (DOMAIN_SECONDS, "new")):
        clock.now = at
        add(counter, 1, "new")
        add(counter, 1, "d0")
        assert windows_of(counter).keys() == {(1, "d0"), (1, shown)}
    for i in range(MAX_DOMAINS + 50):
        add(counter, 2, f"other {i}")
    labels = {domain for _, domain in windows_of(counter)}
    assert len(labels - {""}) == MAX_DOMAINS - 2, "as many as before, with those two"


def test_what_is_not_judged_counts_in_the_totals_alone() -> None:
    counter = WindowCounter(4)
    counter.add_step(
        version=1, domain="", num_drafts=4, num_accepted=3, num_served=4, is_judged=False
    )
    (window,) = counter.take("r", "default")
    assert (window.num_drafts, window.num_accepted_tokens, window.num_output_tokens) == (1, 3, 4)
    assert sum(window.num_tested_per_pos) == 0
    assert window.alpha is None


def test_finished_requests_count_under_the_draft_that_served_last() -> None:
    counter = WindowCounter(4)
    counter.add_finished("", 1.0, 1)
    assert windows_of(counter).keys() == {(0, "")}, "none has served yet"
    add(counter, version=4, domain="sql")
    add(counter, version=5, domain="")
    counter.add_finished("sql", 1.5, 30)
    counter.add_finished("sql", 0.25, 4, is_captured=False)
    found = windows_of(counter)
    assert (found[5, "sql"].num_finished, found[5, "sql"].num_captured) == (2, 1)
    assert (found[5, "sql"].decode_seconds, found[5, "sql"].num_decode_tokens) == (1.75, 34)
    assert found[5, "sql"].num_steps == 0
    assert found[4, "sql"].num_finished == found[5, ""].num_finished == 0
    counter.add_finished("", 1.0, 1)
    assert windows_of(counter).keys() == {(5, "")}, (
        "which draft that was is not forgotten with the counts"
    )


def test_each_window_begins_where_the_last_one_ended_and_counts_anew() -> None:
    clock = Clock()
    counter = WindowCounter(4, clock)
    for tokens, seconds in ((1, 1.0), (3, 2.5)):
        add(counter, accepted=tokens)
        clock.now += seconds
        (window,) = counter.take("r", "default")
        assert (window.num_accepted_tokens, window.num_drafts, window.seconds) == (
            tokens,
            1,
            seconds,
        )


@pytest.mark.parametrize(
    ("idle", "is_counted"), [(LONGEST_GAP, True), (LONGEST_GAP + 0.1, False), (300, False)]
)
def test_idle_time_is_no_part_of_a_window(idle: float, is_counted: bool) -> None:
    clock = Clock()
    counter = WindowCounter(4, clock)
    assert LONGEST_GAP == 2.0
    clock.now += idle
    add(counter)
    clock.now += 300  # but what lies between its steps is
    add(counter)
    (window,) = counter.take("r", "default")
    assert window.seconds == pytest.approx(300 + idle * is_counted)


@pytest.mark.parametrize("by", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_window(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    counter, clock = WindowCounter(4), time.time
    add(counter)
    monkeypatch.setattr(time, "time", lambda: clock() + by)
    add(counter)
    (window,) = counter.take("r", "default")
    assert 0 <= window.seconds < 60 and window.num_output_tokens == 4
    assert window.at == pytest.approx(clock() + by, abs=60)


class Watched:
    """A lock that counts how often it was taken."""

    def __init__(self) -> None:
        self.times, self.is_held = 0, False

    def __enter__(self) -> None:
        assert not self.is_held
        self.times, self.is_held = self.times + 1, True

    def __exit__(self, *_: object) -> None:
        self.is_held = False


def test_the_thread_that_counts_and_the_one_that_reports_keep_out_of_each_others_way() -> None:
    lock = Watched()
    counter = WindowCounter(4, lambda: float(lock.is_held), _lock=lock)  # type: ignore[arg-type]
    add(counter)
    counter.add_finished("", 1.0, 1)
    assert lock.times == 2
    (window,) = counter.take("r", "default")
    assert lock.times == 3
    assert window.seconds == 1.0, "the clock is read under the lock"


def test_drafts_that_nobody_verified_count_per_position_alone() -> None:
    """As they would have, had they been verified."""
    verified, unverified = WindowCounter(4), WindowCounter(4)
    for drafted, accepted in ((4, 2), (4, 4), (3, 0), (1, 1)):
        add(verified, drafts=drafted, accepted=accepted)
        unverified.add_unverified(1, "", drafted, accepted)
    (expected,), (window,) = (of.take("replica-0", "default") for of in (verified, unverified))
    assert window.num_tested_per_pos == expected.num_tested_per_pos == (4, 2, 2, 1)
    assert window.num_accepted_tokens_per_pos == expected.num_accepted_tokens_per_pos
    assert window.alpha == expected.alpha
    assert (window.num_steps, window.num_draft_tokens, window.num_output_tokens) == (0, 0, 0)
