"""Decisions as tables: what was measured, and what follows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from osd.config import GateConfig, TrainerConfig
from osd.policy import contradictions, num_to_replay, should_judge, should_publish, should_rollback, should_train
from osd.records import ClassReport, DraftRelease, EvalReport, RoundOutcome, SpecWindow

NAN = math.nan
GATE = GateConfig(min_holdout_traces=8, min_gain=0.0, rollback_margin=0.1, rollback_min_tested=400)
REPORT = EvalReport(
    num_traces=40,
    num_tokens=1600,
    k=2,
    alpha_base=0.41,
    alpha_candidate=0.72,
    alpha_base_per_pos=(0.5, 0.3),
    alpha_candidate_per_pos=(0.8, 0.6),
    diff=0.31,
    diff_low=0.27,
    diff_high=0.35,
    classes={"sql": ClassReport(num_traces=20, alpha_base=0.41, alpha_candidate=0.72, diff_high=0.4)},
)
OUTCOME = RoundOutcome(
    base_version=3,
    target_id="9f2c",
    path="/candidate",
    num_steps=24,
    num_tokens=3100,
    loss_first=2.1,
    loss_last=0.6,
    seconds=2.4,
    trace_age_mean_s=4.0,
    trace_age_max_s=9.5,
    eval=REPORT,
)


def losing(num_traces: int = 12, to: float = 0.7, diff_high: float = -0.01) -> RoundOutcome:
    """The whole gains, chat falls from 0.8."""
    chat = ClassReport(num_traces=num_traces, alpha_base=0.8, alpha_candidate=to, diff_high=diff_high)
    return replace(OUTCOME, eval=replace(REPORT, classes={**REPORT.classes, "chat": chat}))


CURRENT = DraftRelease(version=3, parent=2, path="/v3", sha256="ab", target_id="9f2c", created_at=1.0)
NEW = DraftRelease(version=4, parent=3, path="/v4", sha256="ab", target_id="9f2c", created_at=1.0, outcome=OUTCOME)


def live(alpha: float, tested: int = 1000, finished: int = 160) -> SpecWindow:
    return SpecWindow(
        at=9.0,
        replica="r",
        version=4,
        seconds=9.0,
        k=2,
        num_drafts=tested,
        num_draft_tokens=tested,
        num_accepted_tokens=round(alpha * tested),
        num_accepted_tokens_per_pos=(round(alpha * tested), 0),
        num_tested_per_pos=(tested, 0),
        num_finished=finished,
        num_captured=finished,
    )


@pytest.mark.parametrize(
    ("num_new_traces", "waited_s", "enabled", "paused", "expected"),
    [
        (32, 0, True, False, True),
        (500, 0, True, False, True),
        (31, 59.9, True, False, False),
        (32, 0, True, True, False),
        (32, 0, False, False, False),
        (8, 60, True, False, True),
        (7, 1e9, True, False, False),
        (8, 60, True, True, False),
        (8, 60, False, False, False),
    ],
)
def test_should_train(num_new_traces: int, waited_s: float, enabled: bool, paused: bool, expected: bool) -> None:
    config = TrainerConfig(min_new_traces=32, max_wait_seconds=60, batch_size=8, enabled=enabled)
    assert should_train(num_new_traces, waited_s, config, paused) is expected


@pytest.mark.parametrize(
    ("outcome", "gate", "pinned", "ok", "reason"),
    [
        (OUTCOME, GATE, False, True, "held-out α 0.41 -> 0.72 on 40 requests, at least +0.270"),
        (
            replace(OUTCOME, discarded="non-finite loss", path=""),
            GATE,
            False,
            False,
            "round discarded: non-finite loss",
        ),
        (
            replace(OUTCOME, eval=None),
            GATE,
            False,
            False,
            "not judged: fewer than 8 held-out requests so far (gate.min_holdout_traces); what was learnt is kept",
        ),
        (
            replace(OUTCOME, eval=replace(REPORT, num_traces=7)),
            GATE,
            False,
            False,
            "too few held-out requests: 7, needed are 8",
        ),
        (
            replace(OUTCOME, base_version=2),
            GATE,
            False,
            False,
            "base is no longer current: trained from v2, v3 serves",
        ),
        (replace(OUTCOME, target_id="other"), GATE, False, False, "trained for another target"),
        (OUTCOME, GATE, True, False, "v3 is pinned"),
        (
            replace(OUTCOME, eval=replace(REPORT, diff_low=0.0)),
            GATE,
            False,
            False,
            "no gain: held-out α 0.41 -> 0.72 on 40 requests, lower bound +0.000 must exceed 0.000",
        ),
        (replace(OUTCOME, eval=replace(REPORT, diff_low=-0.1)), GATE, False, False, "no gain"),
        (OUTCOME, GATE.model_copy(update={"min_gain": 0.3}), False, False, "must exceed 0.300"),
        (OUTCOME, GATE.model_copy(update={"min_gain": 0.26}), False, True, "at least +0.270"),
        (
            losing(),
            GATE,
            False,
            False,
            "held-out α 0.41 -> 0.72 on 40 requests, but chat loses: 0.80 -> 0.70 on 12 requests, "
            "more than gate.max_class_loss=0.05",
        ),
        (losing(to=0.76), GATE, False, True, ""),  # a loss, but a small one
        (losing(diff_high=0.01), GATE, False, True, ""),  # perhaps chance
        (losing(num_traces=7), GATE, False, True, ""),  # too few to judge
        (losing(to=NAN), GATE, False, False, "not finite"),
        (losing(), GATE.model_copy(update={"max_class_loss": 0.2}), False, True, ""),
        (replace(OUTCOME, loss_last=NAN), GATE, False, False, "not finite"),
        (replace(OUTCOME, loss_first=math.inf), GATE, False, False, "not finite"),
        (replace(OUTCOME, eval=replace(REPORT, diff_low=math.inf)), GATE, False, False, "not finite"),
        (replace(OUTCOME, eval=replace(REPORT, alpha_candidate=NAN)), GATE, False, False, "not finite"),
        (
            replace(OUTCOME, eval=replace(REPORT, alpha_candidate_per_pos=(0.8, NAN))),
            GATE,
            False,
            False,
            "not finite",
        ),
    ],
)
def test_should_publish(outcome: RoundOutcome, gate: GateConfig, pinned: bool, ok: bool, reason: str) -> None:
    decision = should_publish(outcome, CURRENT, gate, pinned)
    assert decision.ok is ok
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("window", "release", "ok", "reason"),
    [
        (live(0.50), NEW, True, "v4 serves with α 0.50, 0.72 was measured"),
        (live(0.63), NEW, False, "v4 serves with α 0.63, measured 0.72"),
        (live(0.90), NEW, False, "v4 serves with α 0.90"),
        (live(0.10, tested=399), NEW, False, "not served long enough"),
        (live(0.10, tested=400), NEW, True, "α 0.10"),
        (live(0.10, finished=63), NEW, False, "too few requests ended"),
        (live(0.10, finished=64), NEW, True, "α 0.10"),
        (live(0.00, tested=0), NEW, False, "not served long enough"),
        (None, NEW, False, "not served long enough"),
        (live(0.10), CURRENT, False, "never measured"),
    ],
)
def test_should_judge(window: SpecWindow | None, release: DraftRelease, ok: bool, reason: str) -> None:
    decision = should_judge(window, release, GATE)
    assert decision.ok is ok
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("window", "alphas", "ok", "reason"),
    [
        (live(0.50), {4: 0.50, 3: 0.60}, True, "on the newest requests v3 reaches 0.60, v4 0.50"),
        (live(0.50), {4: 0.50, 3: 0.31}, False, "the traffic changed"),
        (live(0.50), {4: 0.50, 3: 0.50}, False, "the traffic changed"),
        (live(0.50), {4: 0.71, 3: 0.40}, False, "the engine is not running what we think"),
        (live(0.50), {4: 0.59, 3: 0.40}, False, "the traffic changed"),
        (live(0.50), {4: 0.71, 3: 0.77}, True, "v3 reaches 0.77"),
        (live(0.50), {4: 0.300, 3: 0.301}, False, "the traffic changed"),
        (live(0.70), {4: 0.10, 3: 0.90}, False, "v4 serves with α 0.70, measured 0.72"),
        (live(0.50, tested=10), {4: 0.10, 3: 0.90}, False, "not served long enough"),
        (live(0.50), {}, False, "a replay was not possible"),
        (live(0.50), {4: 0.50}, False, "a replay was not possible"),
        (live(0.50), {4: NAN, 3: 0.9}, False, "a replay was not possible"),
        (None, {4: 0.1, 3: 0.9}, False, "not served long enough"),
    ],
)
def test_should_rollback(window: SpecWindow | None, alphas: dict[int, float], ok: bool, reason: str) -> None:
    decision = should_rollback(window, NEW, 3, alphas, GATE)
    assert decision.ok is ok
    assert reason in decision.reason


@pytest.mark.parametrize(("finished", "expected"), [(0, 0), (7, 0), (80, 10), (10_000, GATE.max_holdout_traces)])
def test_num_to_replay(finished: int, expected: int) -> None:
    assert num_to_replay(live(0.5, finished=finished), GATE) == expected


@pytest.mark.parametrize(("alpha", "tested", "expected"), [(0.0, 24, True), (0.5, 24, False), (0.5, 400, True)])
def test_few_tests_must_show_a_great_fall(alpha: float, tested: int, expected: bool) -> None:
    """0.72 was measured, the margin is 0.1: of 24 tests a half may be chance, none is not."""
    gate = GateConfig(min_holdout_traces=8, rollback_margin=0.1)
    assert should_judge(live(alpha, tested=tested), NEW, gate).ok is expected


def test_contradictions_are_said_once_they_are_too_many_for_chance() -> None:
    assert contradictions(OUTCOME) == ""
    assert contradictions(replace(OUTCOME, num_new_rows=960, num_contradicting=40)) == ""
    text = contradictions(replace(OUTCOME, num_new_rows=500, num_contradicting=500))
    assert text.startswith("; 50 % of the new rows contradict the text and were left out: ")
    assert contradictions(replace(OUTCOME, num_new_rows=0, num_contradicting=9)).startswith("; 100 %")
