"""Which plan delivers most tokens per second: goodput(k) = E[tokens | k] / T(k) (TurboSpec,
arXiv 2406.14066).

    acceptance per request ──► E[tokens | proposer, k] ─┐
    and position                                        ├─► argmax ──► Plan(proposer, k, threshold)
    step times ──────────────► T(batch, width, passes) ─┘

Legend: B requests, G positions in a draft (k_max), K positions that a plan proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from serving.speculation.step_times import Shape, StepTimes

Proposer = Literal["draft", "ngram", "off"]

HYSTERESIS = 0.02
"""Share by which another plan must beat the present one to replace it."""
NEARLY = 0.85
"""A plan that promises this share of the best goodput may be the best one."""
MARGIN = 0.6
"""A draft token is verified when its survival is worth this share of the time it takes. It is below
1 so that a slightly wrong estimate verifies too much rather than too little."""


class Plan(NamedTuple):
    """What the next steps propose."""

    proposer: Proposer
    k: int
    goodput: float = 0.0
    """Predicted tokens per second."""
    seconds: float = 0.0
    """Predicted time of a step."""
    min_survival: float = 0.0
    """Draft tokens with a lower survival are not verified."""

    @property
    def passes(self) -> int:
        """Passes of the draft model."""
        return self.k if self.proposer == "draft" else 0

    @property
    def name(self) -> str:
        """`draft 3`, `ngram 5`, `off`."""
        return self.proposer if self.proposer == "off" else f"{self.proposer} {self.k}"


OFF = Plan("off", 0)


class Load(NamedTuple):
    """The requests that decode now."""

    batch: int
    context: int
    survival: dict[Proposer, np.ndarray]
    """float [B, G] of each proposer that may be used. For n-grams it includes the probability that
    a proposal is found. 0 beyond what clients allow."""
    allowed_B: np.ndarray
    """int: draft tokens that the client of each request allows"""


def candidates(load: Load, times: StepTimes) -> list[Plan]:
    """Every possible plan with its predicted goodput, `off` first. Drafts are verified in part
    where that delivers more."""
    off = shape_of(load, OFF)
    choices = [
        Plan(proposer, k)
        for proposer, survival_BG in load.survival.items()
        for k in range(1, survival_BG.shape[1] + 1)
    ]
    gains = [gain for each in load.survival.values() for gain in each.sum(0).cumsum().tolist()]
    shapes = [shape_of(load, plan) for plan in choices]
    seconds = times.predict((off, *shapes), load.context).tolist()
    off_s = seconds.pop(0)
    plans = [
        _predicted(load.batch, plan, gain, took, off_s)
        for plan, gain, took in zip(choices, gains, seconds, strict=True)
    ]
    for i, plan in enumerate(plans):
        in_part = _in_part(plan, load, times, off_s)
        if in_part is not None and in_part.goodput > plan.goodput:
            plans[i] = in_part
    return [_predicted(load.batch, OFF, 0.0, off_s, off_s), *plans]


def _predicted(
    batch: int, plan: Plan, gain: float, seconds: float, off_s: float, min_survival: float = 0.0
) -> Plan:
    # Proposing is never free: no step is assumed shorter than one without speculation.
    seconds = max(seconds, off_s)
    return Plan(plan.proposer, plan.k, (batch + gain) / seconds, seconds, min_survival)


def _in_part(plan: Plan, load: Load, times: StepTimes, off_s: float) -> Plan | None:
    """The plan when it verifies only what is worth its time; None where that is everything."""
    if not plan.passes:
        return None
    shape = shape_of(load, plan)
    least = MARGIN * plan.goodput * times.seconds_per_token(shape)
    survival_BK = load.survival["draft"][:, : plan.k]
    is_worth_it_BK = survival_BK >= least
    num_left_out = shape.tokens - load.batch - int(is_worth_it_BK.sum())
    if least <= 0 or num_left_out <= 0:
        return None
    shape = shape._replace(tokens=shape.tokens - num_left_out)
    seconds = float(times.predict((shape,), load.context)[0])
    return _predicted(
        load.batch, plan, float(survival_BK[is_worth_it_BK].sum()), seconds, off_s, least
    )


def shape_of(load: Load, plan: Plan) -> Shape:
    """The shape of a decode step that verifies all that clients allow, without its context."""
    tokens = load.batch + int(np.minimum(load.allowed_B, plan.k).sum())
    return Shape(load.batch, tokens, 0, plan.passes)


def choose(plans: Sequence[Plan], present: Plan) -> Plan:
    """The best of `candidates`, or the present plan if no other is clearly better."""
    best = max(plans, key=_goodput)
    if best.goodput <= plans[0].goodput * (1 + HYSTERESIS):
        best = plans[0]  # a plan that gains next to nothing is not worth it
    for plan in plans:
        if (plan.proposer, plan.k) == (present.proposer, present.k):
            return plan if best.goodput <= plan.goodput * (1 + HYSTERESIS) else best
    return best


def whole(plan: Plan, load: Load, times: StepTimes) -> Plan:
    """The plan, with all of its drafts verified, and what that promises."""
    if not plan.min_survival:
        return plan
    shapes = shape_of(load, OFF), shape_of(load, plan)
    off_s, seconds = times.predict(shapes, load.context).tolist()
    gain = float(load.survival["draft"][:, : plan.k].sum())
    return _predicted(load.batch, plan, gain, seconds, off_s)


def unmeasured(
    plans: Sequence[Plan], load: Load, times: StepTimes, is_due: Callable[[Plan, int], bool]
) -> Plan | None:
    """The best of the plans that may beat the others and are due for a trial, with all of their
    drafts verified; None without any. `is_due` gets a plan and the number of its steps that are
    known."""
    least = NEARLY * max(plan.goodput for plan in plans)
    # A trial of less than the whole would show no more of what its step takes.
    near = [p for p in plans if p.goodput >= least and whole(p, load, times).goodput >= least]
    due = [plan for plan in near if is_due(plan, times.num_steps(shape_of(load, plan)))]
    best = max(due, key=_goodput, default=None)
    return None if best is None else whole(best, load, times)


def caps(survival_BG: np.ndarray, plan: Plan) -> np.ndarray:
    """int [B]: draft tokens worth verifying for each request under `plan`."""
    return (survival_BG[:, : plan.k] >= plan.min_survival).sum(1)


def _goodput(plan: Plan) -> float:
    return plan.goodput
