"""Counters per draft version and domain, and the acceptance figures made of them."""

from __future__ import annotations

import time

import pytest

from osd.records import merge_windows
from serving.windows import MAX_DOMAINS, WindowCounter


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


def test_what_lies_beyond_the_end_of_a_request_counts_for_vllm_but_not_per_position() -> None:
    counter = WindowCounter(4)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=3, num_served=2)
    (window,) = counter.take("replica-0", "default")
    assert window.num_accepted_tokens == 3
    assert window.num_tested_per_pos == (1, 1, 0, 0)
    assert window.num_accepted_tokens_per_pos == (1, 1, 0, 0)


def test_versions_and_domains_are_apart_and_domains_bounded() -> None:
    counter = WindowCounter(2)
    for i in range(MAX_DOMAINS + 50):
        counter.add_step(version=1, domain=f"d{i}", num_drafts=2, num_accepted=1, num_served=2)
    counter.add_step(version=2, domain="d1", num_drafts=2, num_accepted=1, num_served=2)
    windows = counter.take("r", "default")
    assert len({w.domain for w in windows}) <= MAX_DOMAINS + 1
    assert {w.version for w in windows} == {1, 2}
    total = merge_windows(windows)
    assert total is not None
    assert total.num_drafts == total.num_steps == MAX_DOMAINS + 51
    assert total.num_tested_per_pos == (MAX_DOMAINS + 51, MAX_DOMAINS + 51)


def test_what_is_not_judged_counts_in_the_totals_alone() -> None:
    counter = WindowCounter(4)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=3, num_served=4, is_judged=False)
    (window,) = counter.take("r", "default")
    assert (window.num_drafts, window.num_accepted_tokens, window.num_output_tokens) == (1, 3, 4)
    assert sum(window.num_tested_per_pos) == 0
    assert window.alpha is None


def test_idle_time_is_no_part_of_a_window() -> None:
    counter = WindowCounter(4)
    counter._since -= 300
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=1, num_served=2)
    (window,) = counter.take("r", "default")
    assert window.seconds < 1


@pytest.mark.parametrize("by", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_window(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    counter, clock = WindowCounter(4), time.time
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=1, num_served=2)
    monkeypatch.setattr(time, "time", lambda: clock() + by)
    counter.add_step(version=1, domain="", num_drafts=4, num_accepted=1, num_served=2)
    (window,) = counter.take("r", "default")
    assert 0 <= window.seconds < 1 and window.num_output_tokens == 4
    assert window.at == pytest.approx(clock() + by, abs=1)
