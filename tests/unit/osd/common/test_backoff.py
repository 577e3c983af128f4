"""When something that failed is tried again, and what the log says about an outage."""

from __future__ import annotations

import logging

import pytest

from osd.common.backoff import Backoff, Outage


def test_pauses_double_from_a_tenth_of_a_second_to_five() -> None:
    now = 0.0
    backoff = Backoff(clock=lambda: now)
    pauses = []
    for _ in range(9):
        assert backoff.may_try()
        backoff.failed()
        begun = now
        while not backoff.may_try():
            now += 0.05
        pauses.append(now - begun)
        now += 5
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], abs=0.051)


def test_of_a_failing_server_one_caller_at_a_time_is_told_to_try() -> None:
    now = 0.0
    backoff = Backoff(1.0, 8.0, clock=lambda: now)
    assert backoff.may_try() and backoff.may_try(), "a healthy one is tried by all"
    assert backoff.failed() and not backoff.failed(), "the first of an outage"
    now += 2
    assert backoff.may_try() and not backoff.may_try()
    now += 2
    assert backoff.may_try(), "the one that tried never came back"
    assert backoff.succeeded() and not backoff.succeeded()
    assert backoff.may_try() and backoff.may_try()
    assert backoff.failed(), "of the next one"
    now += 1
    assert backoff.may_try(), "which begins with short pauses again"


def test_the_delay_can_be_read() -> None:
    backoff = Backoff(1.0, 3.0)
    assert backoff.delay_s == 0
    delays = []
    for _ in range(3):
        backoff.failed()
        delays.append(backoff.delay_s)
    assert delays == [1.0, 2.0, 3.0]
    backoff.succeeded()
    assert backoff.delay_s == 0


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("outage")
    outage = Outage(0.0)
    assert not outage.over(log), "there was none"
    await outage.pause("disk: full", log)
    await outage.pause("disk: still full", log)
    assert outage.num_failures == 2
    assert outage.over(log) and not outage.over(log)
    assert outage.num_failures == 0
    assert [record.getMessage() for record in caplog.records] == [
        "disk: full; trying again until it works",
        "works again: disk: still full",
    ]
