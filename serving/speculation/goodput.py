"""Which plan delivers most tokens per second: goodput(k) = E[tokens | k] / T(k) (TurboSpec,
arXiv 2406.14066).

    acceptance per request ──► E[tokens | proposer, k] ─┐
    and position                                        ├─► argmax ──► Plan(proposer, k, threshold)
    step times ──────────────► T(batch, width, passes) ─┘

Legend: B requests, G positions in a draft (k_max).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
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
    a proposal is found."""


def candidates(load: Load, times: StepTimes) -> list[Plan]:
    """Every possible plan with its predicted goodput, `off` first."""
    choices, shapes = _choices(
        tuple((name, found.shape[1]) for name, found in load.survival.items()), load.batch
    )
    gains = [0.0]
    for survival_BG in load.survival.values():
        gains += survival_BG.sum(0).cumsum().tolist()
    seconds = times.predict(shapes, load.context).tolist()
    # Proposing is never free: no step is assumed shorter than one without speculation.
    seconds = [max(took, seconds[0]) for took in seconds]
    return [
        Plan(proposer, k, (load.batch + gain) / took, took)
        for (proposer, k), gain, took in zip(choices, gains, seconds, strict=True)
    ]


@lru_cache
def _choices(
    proposers: tuple[tuple[Proposer, int], ...], batch: int
) -> tuple[list[tuple[Proposer, int]], tuple[Shape, ...]]:
    """(proposer, k) of all plans, and the shapes of their steps with context 0. `proposers` gives
    each proposer's largest k."""
    choices = [
        (OFF.proposer, 0),
        *((proposer, k) for proposer, k_max in proposers for k in range(1, k_max + 1)),
    ]
    load = Load(batch, 0, {})
    return choices, tuple(shape_of(load, proposer, k) for proposer, k in choices)


def shape_of(load: Load, proposer: Proposer, k: int) -> Shape:
    """The shape of a decode step of all requests."""
    return Shape(load.batch, load.batch * (1 + k), load.context, k if proposer == "draft" else 0)


def choose(plans: Sequence[Plan], present: Plan) -> Plan:
    """The best of `candidates`, or the present plan if no other is clearly better."""
    best = max(plans, key=_goodput)
    if best.goodput <= plans[0].goodput * (1 + HYSTERESIS):
        best = plans[0]  # a plan that gains next to nothing is not worth it
    for plan in plans:
        if (plan.proposer, plan.k) == (present.proposer, present.k):
            return plan if best.goodput <= plan.goodput * (1 + HYSTERESIS) else best
    return best


def unmeasured(
    plans: Sequence[Plan], load: Load, times: StepTimes, is_due: Callable[[Plan, int], bool]
) -> Plan | None:
    """The best of the plans that may beat the others and are due for a trial; None without any.
    `is_due` gets a plan and the number of its steps that are known."""
    least = NEARLY * max(plan.goodput for plan in plans)
    near = [plan for plan in plans if plan.goodput >= least]
    due = [p for p in near if is_due(p, times.num_steps(shape_of(load, p.proposer, p.k)))]
    return max(due, key=_goodput, default=None)


def with_threshold(plan: Plan, load: Load, times: StepTimes) -> Plan:
    """The plan with the survival below which verifying a draft token does not pay."""
    if plan.proposer != "draft":
        return plan
    per_token = times.seconds_per_token(shape_of(load, plan.proposer, plan.k))
    return Plan(
        plan.proposer, plan.k, plan.goodput, plan.seconds, MARGIN * plan.goodput * per_token
    )


def caps(survival_BG: np.ndarray, plan: Plan) -> np.ndarray:
    """int [B]: draft tokens worth verifying for each request under `plan`."""
    return (survival_BG[:, : plan.k] >= plan.min_survival).sum(1)


def _goodput(plan: Plan) -> float:
    return plan.goodput
