"""Which speculation delivers most tokens per second: goodput(k) = E[tokens | k] / T(k) (TurboSpec, arXiv 2406.14066).

    acceptance per request and place ──► E[tokens | proposer, k] ─┐
                                                                  ├─► argmax ──► Plan(proposer, k, a cap per request)
    step times of this engine ─────────► T(batch, width, passes) ─┘

Nothing here knows vLLM; `serving/scheduler.py` asks before its steps and tells what they brought.

Legend: B requests, G places in a draft (k_max).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from serving.step_times import Shape, StepTimes

Proposer = Literal["draft", "ngram", "off"]

HYSTERESIS = 0.02
"""What another choice must promise above the present one."""
NEARLY = 0.85
"""A choice that promises this part of the best one may be the best."""
ENOUGH_STEPS = 6
"""Steps of a shape that make its time known."""
MARGIN = 0.6
"""A draft token is verified when its survival is worth this part of the time it takes: a guess that is a little wrong
should verify too much rather than too little."""


class Plan(NamedTuple):
    """What the next steps propose."""

    proposer: Proposer
    k: int
    goodput: float = 0.0
    """Predicted tokens per second."""
    seconds: float = 0.0
    """Predicted time of a step."""
    min_survival: float = 0.0
    """Draft tokens less likely to be reached and accepted are not verified."""

    @property
    def name(self) -> str:
        """`draft 3`, `ngram 5`, `off`."""
        return self.proposer if self.proposer == "off" else f"{self.proposer} {self.k}"


OFF = Plan("off", 0)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that decode now."""

    batch: int
    context: int
    survival: dict[Proposer, np.ndarray]
    """float [B, G] of each proposer that may be used; for n-grams, a proposal being found included."""


def candidates(load: Load, times: StepTimes) -> list[Plan]:
    """Every choice with its predicted goodput, `off` first."""
    choices: list[tuple[Proposer, int, float]] = [("off", 0, 0.0)]
    for proposer, survival_BG in load.survival.items():
        gains = survival_BG.sum(0).cumsum().tolist()
        choices += [(proposer, k, gain) for k, gain in enumerate(gains, start=1)]
    seconds = times.predict([shape_of(load, proposer, k) for proposer, k, _ in choices]).tolist()
    return [
        Plan(proposer, k, (load.batch + gain) / took, took)
        for (proposer, k, gain), took in zip(choices, seconds, strict=True)
    ]


def shape_of(load: Load, proposer: Proposer, k: int) -> Shape:
    """A decode step of all requests under a choice."""
    return Shape(load.batch, load.batch * (1 + k), load.context, k if proposer == "draft" else 0)


def choose(plans: Sequence[Plan], present: Plan) -> Plan:
    """The best of `candidates`, or the present one if no other is clearly better."""
    best = max(plans, key=_goodput)
    if best.goodput <= plans[0].goodput * (1 + HYSTERESIS):
        best = plans[0]  # what gains next to nothing is left out
    for plan in plans:
        if plan.k == present.k and plan.proposer == present.proposer:
            return plan if best.goodput <= plan.goodput * (1 + HYSTERESIS) else best
    return best


def unmeasured(plans: Sequence[Plan], load: Load, times: StepTimes) -> Plan | None:
    """A choice that may well be the best, but whose step has hardly been seen with this batch: worth a few steps."""
    least = NEARLY * max(plan.goodput for plan in plans)
    near = [plan for plan in plans if plan.goodput >= least]
    unseen = [p for p in near if times.num_steps(shape_of(load, p.proposer, p.k)) < ENOUGH_STEPS]
    return max(unseen, key=_goodput, default=None)


def with_threshold(plan: Plan, load: Load, times: StepTimes) -> Plan:
    """The plan with the survival below which a draft token is not worth its verification."""
    if plan.proposer != "draft":
        return plan
    per_token = times.seconds_per_token(shape_of(load, plan.proposer, plan.k))
    return Plan(plan.proposer, plan.k, plan.goodput, plan.seconds, MARGIN * plan.goodput * per_token)


def caps(survival_BG: np.ndarray, plan: Plan) -> np.ndarray:
    """int [B]: draft tokens worth verifying for each request under `plan`."""
    return np.minimum((survival_BG[:, : plan.k] >= plan.min_survival).sum(1), plan.k)


def _goodput(plan: Plan) -> float:
    return plan.goodput
