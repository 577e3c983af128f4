"""The accounts of the control: what it is told, and what it reports."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from osd.records import PlanChange, PlanTotals, encode
from serving.speculation.accounts import MAX_CHANGES, MAX_LOG, Accounts
from serving.speculation.goodput import OFF, Plan
from serving.speculation.step_seen import DraftWork, Stamp, StepSeen

TWO = Plan("draft", 2, seconds=0.25)


def test_steps_are_added_up_by_plan() -> None:
    accounts = Accounts()
    accounts.add_step(TWO, 0.5, 3)
    accounts.add_step(OFF, 0.125, 1)
    accounts.add_step(TWO, 0.25, 2)
    assert accounts.report()["plans"] == {
        "draft 2": PlanTotals(steps=2, seconds=0.75, tokens=5, predicted_seconds=0.5),
        "off": PlanTotals(steps=1, seconds=0.125, tokens=1, predicted_seconds=0.0),
    }


def test_a_decision_takes_the_mean_of_all_in_microseconds() -> None:
    accounts = Accounts()
    assert accounts.report()["decision_us"] == 0.0
    accounts.add_decision(0.25)
    accounts.add_decision(0.5)
    assert accounts.report()["decision_us"] == 375_000.0


def test_the_newest_changes_are_kept() -> None:
    accounts = Accounts()
    before = time.time()
    for batch in range(MAX_CHANGES + 2):
        accounts.add_change(TWO, OFF, batch, "goodput")
    changes = accounts.report()["changes"]
    assert before <= changes[0].at <= time.time()
    assert changes[0] == PlanChange(
        at=changes[0].at, old="draft 2", new="off", batch=2, reason="goodput"
    )
    assert [change.batch for change in changes] == list(range(2, MAX_CHANGES + 2))
    assert json.loads(encode(changes[0])) == {
        "at": changes[0].at, "from": "draft 2", "to": "off", "batch": 2, "reason": "goodput",
    }  # fmt: skip


def a_step(drafted: list[int], accepted: list[int], from_memory: set[str]) -> StepSeen:
    """Of "a", "b" and "c"."""
    seen = StepSeen(
        ["a", "b", "c"],
        drafted,
        accepted,
        Stamp(TWO, ""),
        Stamp(TWO, ""),
        DraftWork(2),
        30,
        True,
        0.5,
        [10, 20, 30],
    )
    seen.from_memory = from_memory
    return seen


def test_tokens_are_counted_by_who_proposed_them() -> None:
    accounts = Accounts()
    assert accounts.report()["sources"] == {"draft": (0, 0), "memory": (0, 0)}
    accounts.add_sources(a_step([2, 8, 0], [1, 5, 0], {"b", "c", "gone"}), lambda _: True)
    accounts.add_sources(a_step([2, 0, 2], [2, 0, 0], set()), lambda _: True)
    accounts.add_sources(a_step([2, 8, 2], [2, 5, 2], {"b"}), lambda req_id: False)
    assert accounts.report()["sources"] == {"draft": (6, 3), "memory": (8, 5)}


def test_a_log_says_for_how_many_requests_the_memory_proposed() -> None:
    accounts = Accounts()
    accounts.keep_log(True)
    accounts.write(a_step([2, 8, 8], [1, 5, 0], {"b", "c", "gone"}))
    assert accounts.keep_log(False)[0]["from_memory"] == 2


def test_a_log_is_bounded_and_ends_where_nobody_wants_it() -> None:
    accounts = Accounts()
    step = StepSeen(
        ["a", "b"],
        [2, 1],
        [2, 0],
        Stamp(TWO, "trial"),
        Stamp(OFF, ""),
        DraftWork(2),
        30,
        True,
        0.5,
        [10, 20],
    )
    accounts.write(step)
    assert accounts.keep_log(True) == [], "nobody had asked for it"
    for i in range(MAX_LOG + 1):
        accounts.write(replace(step, context=i))
    log = accounts.keep_log(True)
    assert len(log) == MAX_LOG
    assert log[0] == {
        "plan": "draft 2",
        "reason": "trial",
        "predicted_seconds": 0.25,
        "batch": 2,
        "drafted": 3,
        "accepted": 2,
        "from_memory": 0,
        "tokens": 4,
        "passes": 2,
        "context": 1,
        "is_pure": True,
        "seconds": 0.5,
    }
    assert accounts.keep_log(False) == [], "it was begun anew"
    accounts.write(step)
    assert accounts.keep_log(False) == []
