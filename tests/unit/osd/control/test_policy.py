"""Decisions as tables: from what was measured to what follows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from osd.config.schema import GateConfig, TrainerConfig
from osd.control.policy import (
    contradictions,
    if_sampled,
    is_as_predicted,
    is_unexplained,
    num_to_replay,
    should_publish,
    should_replay,
    should_rollback,
    should_train,
)
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
    classes={
        "sql": ClassReport(num_traces=20, alpha_base=0.41, alpha_candidate=0.72, diff_high=0.4)
    },
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


def falling(to: float, num_traces: int = 12, diff_high: float = -0.01) -> ClassReport:
    """From 0.8."""
    return ClassReport(
        num_traces=num_traces, alpha_base=0.8, alpha_candidate=to, diff_high=diff_high
    )


def with_classes(**classes: ClassReport) -> RoundOutcome:
    """The whole gains."""
    return replace(OUTCOME, eval=replace(REPORT, classes={**REPORT.classes, **classes}))


def losing(num_traces: int = 12, to: float = 0.7, diff_high: float = -0.01) -> RoundOutcome:
    """The whole gains, chat falls."""
    return with_classes(chat=falling(to, num_traces, diff_high))


CURRENT = DraftRelease(
    version=3, parent=2, path="/v3", sha256="ab", target_id="9f2c", created_at=1.0
)
NEW = DraftRelease(
    version=4, parent=3, path="/v4", sha256="ab", target_id="9f2c", created_at=1.0, outcome=OUTCOME
)


def measured(alpha: float) -> DraftRelease:
    """As `NEW`, but the gate measured this."""
    return replace(NEW, outcome=replace(OUTCOME, eval=replace(REPORT, alpha_candidate=alpha)))


def live(alpha: float, tested: int = 1000, captured: int = 160) -> SpecWindow:
    """Three quarters of what was tested stood at the first place; half of the draft tokens were
    never tested, and nine of ten requests were kept out of capture."""
    accepted = round(alpha * tested)
    return SpecWindow(
        at=9.0,
        replica="r",
        version=4,
        seconds=9.0,
        k=2,
        num_drafts=tested,
        num_draft_tokens=2 * tested,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=(accepted - accepted // 4, accepted // 4),
        num_tested_per_pos=(tested - tested // 4, tested // 4),
        num_finished=10 * captured,
        num_captured=captured,
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
def test_should_train(
    num_new_traces: int, waited_s: float, enabled: bool, paused: bool, expected: bool
) -> None:
    config = TrainerConfig(min_new_traces=32, max_wait_seconds=60, batch_size=8, enabled=enabled)
    assert should_train(num_new_traces, waited_s, config, paused) is expected


@pytest.mark.parametrize(
    ("num_new_traces", "num_since_fall", "paused", "expected"),
    [
        (16, 16, False, True),
        (15, 90, False, False),
        (90, 15, False, False),  # most of them are of before
        (32, None, False, True),
        (31, None, False, False),
        (16, 16, True, False),
    ],
)
def test_where_alpha_has_just_fallen_half_as_many_since_are_enough(
    num_new_traces: int, num_since_fall: int | None, paused: bool, expected: bool
) -> None:
    config = TrainerConfig(min_new_traces=32)
    assert should_train(num_new_traces, 0, config, paused, num_since_fall) is expected
    assert should_train(num_new_traces, 1e9, config, False, num_since_fall), "they waited long"


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
            "not judged: fewer than 8 held-out requests so far (gate.min_holdout_traces); what was "
            "learnt is kept",
        ),
        (
            replace(OUTCOME, eval=replace(REPORT, num_traces=7)),
            GATE,
            False,
            False,
            "too few held-out requests: 7, needed are 8",
        ),
        (replace(OUTCOME, eval=replace(REPORT, num_traces=8)), GATE, False, True, "on 8 requests"),
        (
            replace(OUTCOME, base_version=2),
            GATE,
            False,
            False,
            "base is no longer current: trained from v2, v3 serves",
        ),
        # Rolled back meanwhile.
        (replace(OUTCOME, base_version=4), GATE, False, False, "trained from v4, v3 serves"),
        (replace(OUTCOME, target_id="other"), GATE, False, False, "trained for another target"),
        (replace(OUTCOME, target_id="1"), GATE, False, False, "trained for another target"),
        (replace(OUTCOME, target_id=""), GATE, False, True, ""),  # recorded traces may not say
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
        (OUTCOME, GATE.model_copy(update={"min_gain": 0.27}), False, False, "must exceed 0.270"),
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
        (losing(diff_high=0.0), GATE, False, True, ""),
        (losing(num_traces=7), GATE, False, True, ""),  # too few to judge
        (losing(num_traces=8), GATE, False, False, "chat loses: 0.80 -> 0.70 on 8 requests"),
        (losing(), GATE.model_copy(update={"max_class_loss": 0.2}), False, True, ""),
        # A loss of exactly the limit.
        (losing(to=0.8 - 0.25), GATE.model_copy(update={"max_class_loss": 0.25}), False, True, ""),
        (losing(), GATE.model_copy(update={"min_class_traces": 13}), False, True, ""),
        # Of several, the one that loses most is named, and only what is no chance counts.
        (
            with_classes(a=falling(0.7), b=falling(0.5), c=falling(0.6)),
            GATE,
            False,
            False,
            "but b loses",
        ),
        (with_classes(b=falling(0.5), a=falling(0.79)), GATE, False, False, "but b loses"),
        (
            with_classes(a=falling(0.7), b=falling(0.5, diff_high=0.1)),
            GATE,
            False,
            False,
            "but a loses",
        ),
        (with_classes(a=falling(0.79), b=falling(0.2, num_traces=7)), GATE, False, True, ""),
    ],
)
def test_should_publish(
    outcome: RoundOutcome, gate: GateConfig, pinned: bool, ok: bool, reason: str
) -> None:
    decision = should_publish(outcome, CURRENT, gate, pinned)
    assert decision.ok is ok
    assert reason in decision.reason


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field",
    [
        *("loss_first", "loss_last", "seconds", "trace_age_mean_s", "trace_age_max_s"),
        *("sampling_cpu_s", "scoring_cpu_s", "features_cpu_s", "eval.sampled"),
        *(
            "eval.alpha_base",
            "eval.alpha_candidate",
            "eval.diff",
            "eval.diff_low",
            "eval.diff_high",
        ),
        *("eval.alpha_base_per_pos", "eval.alpha_candidate_per_pos"),
        *("eval.success_base", "eval.success_candidate", "class.success_candidate"),
        *("class.alpha_base", "class.alpha_candidate", "class.diff_high"),
    ],
)
def test_no_number_of_what_is_published_may_be_infinite_or_none(field: str, value: float) -> None:
    record, _, name = field.rpartition(".")
    has_many = name.endswith("per_pos") or name.startswith("success") or name == "sampled"
    change: dict[str, Any] = {name: (0.5, value) if has_many else value}
    if record == "class":
        outcome = with_classes(chat=replace(falling(0.8), **change))
    elif record == "eval":
        outcome = replace(OUTCOME, eval=replace(REPORT, **change))
    else:
        outcome = replace(OUTCOME, **change)
    assert should_publish(outcome, CURRENT, GATE, False) == (
        False,
        "not finite: the loss or the measured acceptance is NaN or infinite",
    )


@pytest.mark.parametrize(
    ("window", "release", "ok", "reason"),
    [
        (live(0.50), NEW, True, "v4 serves with α 0.50, 0.72 was measured"),
        (live(0.63), NEW, False, "v4 serves with α 0.63, measured 0.72"),
        (live(0.90), NEW, False, "v4 serves with α 0.90"),
        (live(0.10, tested=399), NEW, False, "not served long enough"),
        (live(0.10, tested=400), NEW, True, "α 0.10"),
        (live(0.10, captured=63), NEW, False, "too few requests ended"),
        (live(0.10, captured=64), NEW, True, "α 0.10"),
        (live(0.00, tested=0), NEW, False, "not served long enough"),
        (None, NEW, False, "not served long enough"),
        (live(0.10), CURRENT, False, "never measured"),
    ],
)
def test_should_replay(
    window: SpecWindow | None, release: DraftRelease, ok: bool, reason: str
) -> None:
    decision = should_replay(window, release, GATE)
    assert decision.ok is ok
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("window", "alphas", "ok", "reason"),
    [
        (live(0.50), {4: 0.50, 3: 0.60}, True, "on the newest requests v3 reaches 0.60, v4 0.50"),
        (live(0.50), {4: 0.50, 3: 0.31}, False, "the traffic changed"),
        (live(0.50), {4: 0.50, 3: 0.50}, False, "the traffic changed"),
        (live(0.50), {4: 0.71, 3: 0.40}, False, "the engine is not running what we think"),
        (live(0.50), {4: 0.71, 3: 0.70}, False, "the engine is not running what we think"),
        (live(0.50), {4: 0.59, 3: 0.40}, False, "the traffic changed"),
        (live(0.50), {4: 0.71, 3: 0.77}, True, "v3 reaches 0.77"),
        (live(0.50), {4: 0.50, 3: 0.551}, True, "v3 reaches 0.55"),  # more than half the margin
        (live(0.50), {4: 0.50, 3: 0.549}, False, "the traffic changed"),
        (live(0.50), {4: 0.300, 3: 0.301}, False, "the traffic changed"),
        (live(0.70), {4: 0.10, 3: 0.90}, False, "v4 serves with α 0.70, measured 0.72"),
        (live(0.50, tested=10), {4: 0.10, 3: 0.90}, False, "not served long enough"),
        (live(0.50), {}, False, "a replay was not possible"),
        (live(0.50), {4: 0.50}, False, "a replay was not possible"),
        (live(0.50), {4: NAN, 3: 0.9}, False, "a replay was not possible"),
        (None, {4: 0.1, 3: 0.9}, False, "not served long enough"),
    ],
)
def test_should_rollback(
    window: SpecWindow | None, alphas: dict[int, float], ok: bool, reason: str
) -> None:
    decision = should_rollback(window, NEW, 3, alphas, GATE)
    assert decision.ok is ok
    assert reason in decision.reason


def test_a_draft_goes_back_to_the_one_that_served_before_not_to_its_parent() -> None:
    decision = should_rollback(live(0.50), NEW, 2, {4: 0.50, 3: 0.90, 2: 0.40}, GATE)
    assert not decision.ok
    assert decision.reason.endswith("on the newest requests v4 0.50, v2 0.40")
    assert should_rollback(live(0.50), NEW, 2, {4: 0.50, 3: 0.40, 2: 0.90}, GATE).ok


def test_what_is_no_more_than_the_margin_is_no_reason() -> None:
    """In numbers that floats hold exactly: 0.125 is allowed, half of it to the parent."""
    gate = GATE.model_copy(update={"rollback_margin": 0.125})
    window = live(0.5)
    assert is_as_predicted(window, measured(0.625), gate)
    assert not is_as_predicted(window, measured(0.6251), gate)
    assert not should_rollback(window, measured(0.9), 3, {4: 0.5, 3: 0.5625}, gate).ok
    assert should_rollback(window, measured(0.9), 3, {4: 0.5, 3: 0.5626}, gate).ok


@pytest.mark.parametrize(
    ("captured", "expected"), [(0, 0), (7, 0), (80, 10), (511, 63), (512, 64), (10_000, 64)]
)
def test_num_to_replay(captured: int, expected: int) -> None:
    """One request in eight is held out; of those that were kept out of capture none can be
    replayed."""
    assert num_to_replay(live(0.5, captured=captured), GATE) == expected
    assert num_to_replay(
        live(0.5, captured=captured), GATE.model_copy(update={"max_holdout_traces": 9})
    ) == min(expected, 9)


@pytest.mark.parametrize(
    ("alpha", "tested", "expected"), [(0.0, 24, True), (0.5, 24, False), (0.5, 400, True)]
)
def test_few_tests_must_show_a_great_fall(alpha: float, tested: int, expected: bool) -> None:
    """0.72 was measured, the margin is 0.1: of 24 tests a half may be chance, none is not."""
    gate = GateConfig(min_holdout_traces=8, rollback_margin=0.1)
    assert should_replay(live(alpha, tested=tested), NEW, gate).ok is expected


@pytest.mark.parametrize(
    ("accepted", "tested", "most"),
    [
        # The margin and two standard errors, of (accepted + 0.5) / (tested + 1) in tested + 1
        # tests.
        (0, 24, 0.0 + 0.1 + 2 * 0.028),  # sqrt(0.02 * 0.98 / 25)
        (49, 99, 49 / 99 + 0.1 + 2 * 0.0499975),  # sqrt(0.495 * 0.505 / 100)
    ],
)
def test_how_far_a_draft_may_serve_from_what_was_measured_or_replayed(
    accepted: int, tested: int, most: float
) -> None:
    gate = GATE.model_copy(update={"rollback_min_tested": 24, "rollback_margin": 0.1})
    window = live(accepted / tested, tested)
    for alpha, is_more in ((most - 1e-5, False), (most + 1e-5, True)):
        assert should_replay(window, measured(alpha), gate).ok is is_more
        assert is_unexplained(window, NEW, {4: alpha, 3: 1.0}, gate) is is_more


def test_a_draft_nobody_replayed_is_not_unexplained() -> None:
    assert not is_unexplained(live(0.0), NEW, {3: 0.9}, GATE)
    assert not is_unexplained(live(0.0), NEW, {4: NAN}, GATE)
    assert not is_unexplained(live(0.0, tested=0), NEW, {4: 0.9}, GATE)


@pytest.mark.parametrize(
    ("window", "release", "expected"),
    [
        (live(0.70), NEW, True),
        (live(0.90), NEW, True),
        (live(0.63), NEW, True),
        (live(0.61), NEW, False),  # 0.72 less 0.1
        (live(0.70, tested=400), NEW, True),
        (live(0.70, tested=399), NEW, False),
        (live(0.00, tested=0), NEW, False),
        (live(0.70), CURRENT, False),
        (live(0.70), replace(NEW, outcome=replace(OUTCOME, eval=None)), False),
    ],
)
def test_is_as_predicted(window: SpecWindow, release: DraftRelease, expected: bool) -> None:
    assert is_as_predicted(window, release, GATE) is expected


def test_what_sampled_drafts_would_bring_is_said_where_it_is_much() -> None:
    def said(sampled: tuple[float, float] | None, num_ranks: int = 1) -> str:
        assert OUTCOME.eval is not None
        of_it = replace(OUTCOME, eval=replace(OUTCOME.eval, sampled=sampled))
        return if_sampled(of_it, num_ranks)

    assert said((0.34, 0.64)) == (
        "; above temperature 0 its α is 0.34, and would be 0.64 with "
        "speculation.draft_sample_method=probabilistic"
    )
    assert said((0.34, 0.64), 2) == said((0.34, 0.64)) + (
        " (a draft model; not an EAGLE-3 head over several ranks)"
    )
    assert said((0.34, 0.38)) == said((0.64, 0.34)) == said(None) == ""
    assert if_sampled(replace(OUTCOME, eval=None)) == ""


def test_contradictions_are_said_once_they_are_too_many_for_chance() -> None:
    assert contradictions(OUTCOME) == ""
    assert contradictions(replace(OUTCOME, num_new_rows=950, num_contradicting=50)) == "", (
        "5 % may be"
    )
    assert contradictions(replace(OUTCOME, num_new_rows=949, num_contradicting=51)).startswith(
        "; 5 % of the new rows"
    )
    assert contradictions(replace(OUTCOME, num_new_rows=100, num_contradicting=200)).startswith(
        "; 67 %"
    )
    text = contradictions(replace(OUTCOME, num_new_rows=500, num_contradicting=500))
    assert text.startswith("; 50 % of the new rows contradict the text and were left out: ")
    assert contradictions(replace(OUTCOME, num_new_rows=0, num_contradicting=9)).startswith(
        "; 100 %"
    )
