"""When to train, publish and roll back: pure functions from measurements to a decision with its
reason.

α is conditional acceptance (`osd/records/acceptance.py`). *Measured* is the candidate's α in the
gate's replay. *Live* is the α it serves with. *Replayed* is its α in a replay of the newest
held-out requests, which is made when the live α is low:

    live near measured                        fine
    live low, parent replays clearly better   the draft is bad: roll back
    live low, replay of the same draft high   the engine serves another draft: raise the alarm
    live low, both replay low                 the traffic changed: keep the draft, go on learning
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from osd.config.schema import GateConfig, TrainerConfig
from osd.records import (
    HOLDOUT_ONE_IN,
    DraftRelease,
    EarlierReport,
    EvalReport,
    RoundOutcome,
    SpecWindow,
)

CHANCE = 2.0
"""The live α must be below the measured one by the margin and this many standard errors."""

RECALL_MARGIN = 0.02
"""α by which an earlier draft must be better before it serves again: every swap costs what running
requests have in the draft's KV cache."""
MUCH_MORE = 0.05
"""α that sampled drafts must bring before it is worth telling."""
MANY_CONTRADICT = 0.05
"""Share of new rows that contradict the text above which the cause is worth telling. Requests with
penalties or biased logits have such rows."""


class Decision(NamedTuple):
    """Yes or no, and one sentence for the dashboard.

    Example:
        Decision(False, "too few held-out requests: 3, needed are 8")
    """

    ok: bool
    reason: str


def should_train(
    num_new_traces: int,
    waited_s: float,
    config: TrainerConfig,
    paused: bool,
    num_since_fall: int | None = None,
) -> bool:
    """Whether enough traces have arrived since the last round, or a batch of them has and the first
    one has waited long enough. Where α has just fallen half as many are enough, if as many requests
    have come since (`num_since_fall`): a round on fewer of the new traffic could not be judged."""
    if num_since_fall is None:
        is_enough = num_new_traces >= config.min_new_traces
    else:
        is_enough = min(num_new_traces, num_since_fall) >= config.min_new_traces / 2
    is_late = waited_s >= config.max_wait_seconds and num_new_traces >= config.batch_size
    return config.enabled and not paused and (is_enough or is_late)


def should_publish(
    outcome: RoundOutcome, current: DraftRelease, gate: GateConfig, pinned: bool
) -> Decision:
    """Whether the candidate of a round may serve in place of `current`."""
    report = outcome.eval
    if outcome.discarded:
        return Decision(False, f"round discarded: {outcome.discarded}")
    if report is None:
        return Decision(
            False,
            f"not judged: fewer than {gate.min_holdout_traces} held-out requests so far "
            "(gate.min_holdout_traces); what was learnt is kept",
        )
    if not _is_finite(outcome, report):
        return Decision(False, "not finite: the loss or the measured acceptance is NaN or infinite")
    if report.num_traces < gate.min_holdout_traces:
        return Decision(
            False,
            f"too few held-out requests: {report.num_traces}, needed are {gate.min_holdout_traces}",
        )
    if outcome.base_version != current.version:
        return Decision(
            False,
            f"base is no longer current: trained from v{outcome.base_version}, v{current.version} "
            "serves",
        )
    if outcome.target_id and outcome.target_id != current.target_id:
        return Decision(False, "trained for another target")
    if pinned:
        return Decision(False, f"v{current.version} is pinned")
    gained = (
        f"held-out α {report.alpha_base:.2f} -> {report.alpha_candidate:.2f} "
        f"on {report.num_traces} requests"
        + (" since the traffic changed" if report.num_before else "")
    )
    if report.diff_low <= gate.min_gain:
        return Decision(
            False,
            f"no gain: {gained}, lower bound {report.diff_low:+.3f} must exceed "
            f"{gate.min_gain:.3f}",
        )
    if lost := _lost_class(report, gate):
        return Decision(False, f"{gained}, but {lost}")
    return Decision(True, f"{gained}, at least {report.diff_low:+.3f}")


def contradictions(outcome: RoundOutcome) -> str:
    """A clause about rows that contradict the text, when they are many; else ""."""
    num, num_all = outcome.num_contradicting, outcome.num_contradicting + outcome.num_new_rows
    if num <= MANY_CONTRADICT * num_all:
        return ""
    return (
        f"; {100 * num / num_all:.0f} % of the new rows contradict the text and were left out: "
        "requests with penalties or forced tokens have such rows; if there are none, see who else "
        "writes to the buffer's Redis"
    )


def if_sampled(outcome: RoundOutcome, num_ranks: int = 1) -> str:
    """A clause about what sampled drafts would bring, where that is much; else "". `num_ranks`: of
    an engine."""
    if outcome.eval is None or outcome.eval.sampled is None:
        return ""
    alpha, drawn = outcome.eval.sampled
    if not drawn > alpha + MUCH_MORE:
        return ""
    return (
        f"; above temperature 0 its α is {alpha:.2f}, and would be {drawn:.2f} with "
        "speculation.draft_sample_method=probabilistic"
        + (" (a draft model; not an EAGLE-3 head over several ranks)" if num_ranks > 1 else "")
    )


def _lost_class(report: EvalReport, gate: GateConfig) -> str:
    """Tells of the traffic class that loses most; "" when none loses more than chance and
    `gate.max_class_loss` explain."""
    losing = [
        (c.alpha_base - c.alpha_candidate, name)
        for name, c in report.classes.items()
        if c.num_traces >= gate.min_class_traces and c.diff_high < 0
    ]
    loss, name = max(losing, default=(0.0, ""))
    if loss <= gate.max_class_loss:
        return ""
    c = report.classes[name]
    return (
        f"{name} loses: {c.alpha_base:.2f} -> {c.alpha_candidate:.2f} on {c.num_traces} requests, "
        f"more than gate.max_class_loss={gate.max_class_loss:g}"
    )


def earlier_to_recall(reports: Sequence[EarlierReport]) -> EarlierReport | None:
    """The earlier release that is to serve again: of those that are better than the serving one
    beyond chance, and not by a trifle, the best; None where there is none."""
    better = [
        report
        for report in reports
        if report.diff_low > 0 and report.alpha - report.alpha_base >= RECALL_MARGIN
    ]
    return max(better, key=lambda report: report.alpha, default=None)


def why_recalled(report: EarlierReport, current: DraftRelease) -> str:
    """One sentence for the dashboard."""
    return (
        f"v{report.version} serves again: on the newest {report.num_traces} requests its α is "
        f"{report.alpha:.2f}, that of v{current.version} {report.alpha_base:.2f}"
    )


def should_replay(live: SpecWindow | None, release: DraftRelease, gate: GateConfig) -> Decision:
    """Whether the live α of a draft is so low that a replay is needed to find the cause."""
    measured = release.predicted_alpha
    if measured is None:
        return Decision(False, f"v{release.version} was never measured by the gate")
    if (
        live is None
        or live.alpha is None
        or sum(live.num_tested_per_pos) < gate.rollback_min_tested
    ):
        return Decision(False, f"v{release.version} has not served long enough")
    if num_to_replay(live, gate) < gate.min_holdout_traces:
        return Decision(False, f"too few requests ended on v{release.version} to replay some")
    if measured - live.alpha <= gate.rollback_margin + CHANCE * _standard_error(live):
        return Decision(
            False, f"v{release.version} serves with α {live.alpha:.2f}, measured {measured:.2f}"
        )
    return Decision(
        True, f"v{release.version} serves with α {live.alpha:.2f}, {measured:.2f} was measured"
    )


def _standard_error(live: SpecWindow) -> float:
    """Standard error of the live α, for independent tokens."""
    tested = sum(live.num_tested_per_pos)
    # The added half token keeps the estimate away from 0 and 1, where the error would be 0.
    alpha = (sum(live.num_accepted_tokens_per_pos) + 0.5) / (tested + 1)
    return math.sqrt(alpha * (1 - alpha) / (tested + 1))


def num_to_replay(live: SpecWindow, gate: GateConfig) -> int:
    """Held-out requests that belong to the live window. Older ones may be of other traffic."""
    return min(live.num_captured // HOLDOUT_ONE_IN, gate.max_holdout_traces)


def should_rollback(
    live: SpecWindow | None,
    release: DraftRelease,
    parent_version: int,
    alphas: Mapping[int, float],
    gate: GateConfig,
) -> Decision:
    """Whether to go back from `release` to its parent.

    alphas: version -> α replayed on the same requests
    """
    suspicion = should_replay(live, release, gate)
    if not suspicion.ok or live is None:
        return suspicion
    own, parent = alphas.get(release.version, math.nan), alphas.get(parent_version, math.nan)
    if not (math.isfinite(own) and math.isfinite(parent)):
        return Decision(False, f"{suspicion.reason}; a replay was not possible")
    if parent - own > gate.rollback_margin / 2:
        return Decision(
            True,
            f"{suspicion.reason}; on the newest requests v{parent_version} reaches {parent:.2f}, "
            f"v{release.version} {own:.2f}",
        )
    if is_unexplained(live, release, alphas, gate):
        return Decision(
            False,
            f"{suspicion.reason}, but replayed on the newest held-out requests it reaches "
            f"{own:.2f}: the engine is not running what we think",
        )
    replay = f"v{release.version} {own:.2f}, v{parent_version} {parent:.2f}"
    return Decision(
        False, f"the traffic changed: {suspicion.reason}; on the newest requests {replay}"
    )


def is_as_predicted(live: SpecWindow, release: DraftRelease, gate: GateConfig) -> bool:
    """Whether enough was served to confirm that a draft serves as the gate measured."""
    measured, tested = release.predicted_alpha, sum(live.num_tested_per_pos)
    if measured is None or live.alpha is None or tested < gate.rollback_min_tested:
        return False
    return measured - live.alpha <= gate.rollback_margin


def is_proved(live: SpecWindow, release: DraftRelease, gate: GateConfig) -> bool:
    """Whether a draft serves as the gate measured beyond chance, so that others may serve it."""
    measured = release.predicted_alpha
    if measured is None or live.alpha is None or not is_as_predicted(live, release, gate):
        return False
    return measured - live.alpha + CHANCE * _standard_error(live) <= gate.rollback_margin


def is_plainly_low(live: SpecWindow | None, release: DraftRelease, gate: GateConfig) -> bool:
    """Whether a draft serves worse than the gate measured, beyond chance, whatever the cause."""
    measured = release.predicted_alpha
    if measured is None or live is None or live.alpha is None:
        return False
    return measured - live.alpha > gate.rollback_margin + CHANCE * _standard_error(live)


def is_unexplained(
    live: SpecWindow, release: DraftRelease, alphas: Mapping[int, float], gate: GateConfig
) -> bool:
    """Whether a draft serves far worse than it replays on the same traffic. The fault is then in
    the engine, not in the draft or the traffic."""
    own = alphas.get(release.version, math.nan)
    return (
        live.alpha is not None
        and own - live.alpha > gate.rollback_margin + CHANCE * _standard_error(live)
    )


def _is_finite(outcome: RoundOutcome, report: EvalReport) -> bool:
    numbers = (
        outcome.loss_first,
        outcome.loss_last,
        outcome.seconds,
        outcome.sampling_cpu_s,
        outcome.scoring_cpu_s,
        outcome.features_cpu_s,
        outcome.trace_age_mean_s,
        outcome.trace_age_max_s,
        report.alpha_base,
        report.alpha_candidate,
        report.diff,
        report.diff_low,
        report.diff_high,
        *report.alpha_base_per_pos,
        *report.alpha_candidate_per_pos,
        *report.success_base,
        *report.success_candidate,
        *(report.sampled or ()),
        *(
            x
            for c in report.classes.values()
            for x in (c.alpha_base, c.alpha_candidate, c.diff_high, *c.success_candidate)
        ),
    )
    return all(math.isfinite(number) for number in numbers)
