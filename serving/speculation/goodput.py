"""Which plan delivers most tokens per second: goodput(k) = E[tokens | k] / T(k) (TurboSpec,
arXiv 2406.14066).

    acceptance per request ──► E[tokens | passes, request] ──┐
    memory's newest look-ups ─► who proposes ────────────────┼─► argmax ──► Plan
    step times ───────────────► T(batch, width, passes) ─────┘

A plan says how often the draft model runs; that must be decided before the step. Whether the draft
or the memory proposes for a request is decided by what the memory finds then: it is whoever's
tokens are worth more beyond what verifying them takes. What it will find is assumed to be what it
found for the same request lately.

Legend: B requests, G positions in a draft (k_max), M of the memory, R newest look-ups of a request,
K positions that a plan proposes, P plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from serving.speculation.step_times import Shape, StepTimes

Proposer = Literal["draft", "memory", "off"]

HYSTERESIS = 0.02
"""Share by which another plan must beat the present one to replace it."""
PRICES = (0.15, 0.3, 0.45, 0.6, 0.68, 0.76, 0.84, 0.9, 0.94)
"""Prices that are tried beside the one that a plan's own goodput says."""
NEARLY = 0.85
"""A plan that promises this share of the best goodput may be the best one."""
MARGIN = 0.6
"""A token of the draft is verified when its survival is worth this share of the time it takes. It
is below 1 so that a slightly wrong estimate verifies too much rather than too little."""
LEAST_SURVIVAL = 0.05
"""What the memory finds less likely is never verified, nor looked for."""


class Plan(NamedTuple):
    """What the next steps propose."""

    proposer: Proposer
    k: int
    goodput: float = 0.0
    """Predicted tokens per second."""
    seconds: float = 0.0
    """Predicted time of a step."""
    price: float = 0.0
    """Tokens that the time of verifying one more draft token would bring."""
    width: float = 0.0
    """Draft tokens of all requests that are verified, predicted."""
    is_mixed: bool = False
    """Whether the memory proposes where it is worth more than the draft."""
    is_whole: bool = False
    """Whether all tokens of the draft are verified, whatever their price. The memory's never are:
    what it would have got accepted is known without."""

    @property
    def passes(self) -> int:
        """Passes of the draft model."""
        return self.k if self.proposer == "draft" else 0

    @property
    def draft_price(self) -> float:
        """The price by which the draft is cut."""
        return 0.0 if self.is_whole else self.price

    @property
    def may_memory_propose(self) -> bool:
        """Whether anything that the memory finds may be verified."""
        return self.is_mixed or self.proposer == "memory"

    @property
    def name(self) -> str:
        """`draft 3`, `memory 8`, `off`."""
        return self.proposer if self.proposer == "off" else f"{self.proposer} {self.k}"


OFF = Plan("off", 0)


class Load(NamedTuple):
    """The requests that decode now."""

    batch: int
    context: int
    draft_BG: np.ndarray | None
    """float: probability that the draft is accepted up to and including each position; None where
    it may not propose"""
    memory_BRM: np.ndarray | None
    """float: the same of what the memory found lately, 0 where it found nothing"""
    ratio_BR: np.ndarray | None
    """float: how many tokens of the draft are accepted where the memory finds this, over how many
    are in the mean (`memory/hybrid.py`)"""
    allowed_B: np.ndarray
    """int: draft tokens that the client of each request allows. Fewer requests than `batch` where
    some are not known."""
    is_bounded: bool = False
    """Whether the memory proposes no more tokens than the draft does, where that runs
    (`memory/elsewhere.py`)."""

    @property
    def has_found(self) -> bool:
        """Whether the memory found anything lately."""
        return self.memory_BRM is not None and bool(self.memory_BRM.any())


def candidates(load: Load, times: StepTimes) -> list[Plan]:
    """Every possible plan with its predicted goodput, `off` first. Drafts are verified in part
    where that delivers more."""
    off_s = float(times.predict((shape_of(load, OFF),), load.context)[0])
    off = OFF._replace(goodput=load.batch / off_s, seconds=off_s)
    plans = _predicted(load, _choices(load), times, off_s)
    return [off, *_in_part(load, plans, times, off_s)]


def _in_part(load: Load, plans: list[Plan], times: StepTimes, off_s: float) -> list[Plan]:
    """The plans, verifying only what is worth its time where that delivers more.

    The price is what a token's time brings in a step that verifies all. Where that is far more than
    is good, a token is far cheaper in a step that is narrower; other prices are tried as well where
    the memory, which has one plan alone, finds anything."""
    priced = [
        plan._replace(price=plan.goodput * times.seconds_per_token(shape_of(load, plan)))
        for plan in plans
    ]
    wholes, in_part = plans, _predicted(load, priced, times, off_s)
    if load.memory_BRM is not None:
        wholes = [plan._replace(is_whole=True) for plan in priced]
        wholes = _predicted(load, wholes, times, off_s) if load.has_found else wholes
    best = [max(pair, key=_goodput) for pair in zip(in_part, wholes, strict=True)]
    if not load.has_found or not any(plan.price for plan in priced):
        return best
    num = len(PRICES)
    foreseen = _foresee(load, plans * num, np.repeat(PRICES, len(plans)), times, off_s)
    rate_QP = foreseen.rate_P.reshape(num, len(plans))
    for p, q in enumerate(rate_QP.argmax(0).tolist()):
        if rate_QP[q, p] > best[p].goodput * (1 + HYSTERESIS):
            best[p] = foreseen.plan(plans[p], q * len(plans) + p)
    return best


def _choices(load: Load) -> list[Plan]:
    draft, memory = load.draft_BG, load.memory_BRM
    plans = [] if memory is None else [Plan("memory", memory.shape[2])]
    longest = 0 if draft is None else draft.shape[1]
    return plans + [Plan("draft", k, is_mixed=memory is not None) for k in range(1, longest + 1)]


def _predicted(load: Load, plans: Sequence[Plan], times: StepTimes, off_s: float) -> list[Plan]:
    """The plans at their prices, with what they promise."""
    if not plans:
        return []
    foreseen = _foresee(load, plans, np.array([plan.price for plan in plans]), times, off_s)
    return [foreseen.plan(plan, p) for p, plan in enumerate(plans)]


class _Foreseen(NamedTuple):
    price_P: np.ndarray
    width_P: np.ndarray
    seconds_P: np.ndarray
    rate_P: np.ndarray

    def plan(self, plan: Plan, p: int) -> Plan:
        return plan._replace(
            price=float(self.price_P[p]),
            width=float(self.width_P[p]),
            seconds=float(self.seconds_P[p]),
            goodput=float(self.rate_P[p]),
        )


def _foresee(
    load: Load, plans: Sequence[Plan], price_P: np.ndarray, times: StepTimes, off_s: float
) -> _Foreseen:
    gain_P, width_P = expected(load, plans, price_P)
    passes = [plan.passes for plan in plans]
    shapes = [
        Shape(load.batch, load.batch + width, 0, k)
        for width, k in zip(np.rint(width_P).astype(int).tolist(), passes, strict=True)
    ]
    # Proposing is never free: no step is assumed shorter than one without speculation.
    seconds_P = np.maximum(times.predict(shapes, load.context), off_s)
    return _Foreseen(price_P, width_P, seconds_P, (load.batch + gain_P) / seconds_P)


def expected(
    load: Load, plans: Sequence[Plan], price_P: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(float [P], float [P]): draft tokens of a step that are accepted, and that are verified,
    under each of P plans, at its own price or at that given."""
    if price_P is None:
        price_P = np.array([plan.price for plan in plans])
    passes_P = np.array([plan.passes for plan in plans])
    is_whole_P = np.array([plan.is_whole for plan in plans], np.bool_)
    num_PB, gain_PB = _of_draft(load, passes_P, np.where(is_whole_P, 0.0, price_P))
    if load.memory_BRM is None or not load.has_found:
        return gain_PB.sum(1), num_PB.sum(1)
    price_P111, price_P11 = price_P[:, None, None, None], price_P[:, None, None]
    place_M = np.arange(load.memory_BRM.shape[2])
    may_propose_P = np.array([plan.may_memory_propose for plan in plans])
    kept_PBRM = load.memory_BRM >= np.maximum(price_P111, LEAST_SURVIVAL)
    kept_PBRM &= place_M < load.allowed_B[:, None, None]
    if load.is_bounded:
        most_P = np.where(passes_P > 0, passes_P, len(place_M))
        kept_PBRM &= place_M < most_P[:, None, None, None]
    found_PBR, width_PBR = (load.memory_BRM * kept_PBRM).sum(3), kept_PBRM.sum(3)
    drafted_PBR = gain_PB[:, :, None] * load.ratio_BR
    is_better_PBR = found_PBR - price_P11 * width_PBR > drafted_PBR - price_P11 * num_PB[:, :, None]
    is_better_PBR &= (width_PBR > 0) & may_propose_P[:, None, None]
    gain_PBR = np.where(is_better_PBR, found_PBR, drafted_PBR)
    width_PBR = np.where(is_better_PBR, width_PBR, num_PB[:, :, None])
    return gain_PBR.mean(2).sum(1), width_PBR.mean(2).sum(1)


def draft_of(load: Load, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(int [B]: tokens of each request's draft that are verified under the plan, float [B]: how
    many of them are accepted)."""
    num_PB, gain_PB = _of_draft(load, np.array([plan.passes]), np.array([plan.draft_price]))
    return num_PB[0], gain_PB[0]


def _of_draft(
    load: Load, passes_P: np.ndarray, price_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    if load.draft_BG is None:
        nothing_PB = np.zeros((len(passes_P), len(load.allowed_B)))
        return nothing_PB.astype(np.int64), nothing_PB
    place_G = np.arange(load.draft_BG.shape[1])
    allowed_PB = np.minimum(passes_P[:, None], load.allowed_B)
    kept_PBG = place_G < allowed_PB[:, :, None]
    kept_PBG &= load.draft_BG >= MARGIN * price_P[:, None, None]
    return kept_PBG.sum(2), (load.draft_BG * kept_PBG).sum(2)


def shape_of(load: Load, plan: Plan) -> Shape:
    """The shape of a decode step that verifies as much as the plan predicts, without its
    context."""
    return Shape(load.batch, load.batch + round(plan.width), 0, plan.passes)


def choose(plans: Sequence[Plan], present: Plan) -> Plan:
    """The best of `candidates`, or the present plan if no other is clearly better, and `off` is not
    better at all."""
    off, best = plans[0], max(plans, key=_goodput)
    if best.goodput <= off.goodput * (1 + HYSTERESIS):
        best = off  # a plan that gains next to nothing is not worth it
    for plan in plans:
        if (plan.proposer, plan.k) == (present.proposer, present.k):
            is_near = best.goodput <= plan.goodput * (1 + HYSTERESIS)
            return plan if is_near and plan.goodput >= off.goodput else best
    return best


def whole(plan: Plan, load: Load, times: StepTimes, *, is_alone: bool = False) -> Plan:
    """The plan, with all of the draft's tokens verified, and what that promises. `is_alone`: the
    memory proposes none in their place."""
    if not plan.passes or not (plan.draft_price or (is_alone and plan.is_mixed)):
        return plan
    if is_alone:
        plan = plan._replace(is_mixed=False)
    off_s = float(times.predict((shape_of(load, OFF),), load.context)[0])
    return _predicted(load, [plan._replace(is_whole=True)], times, off_s)[0]


def unmeasured(
    plans: Sequence[Plan], load: Load, times: StepTimes, is_due: Callable[[Plan, int], bool]
) -> Plan | None:
    """The best of the plans that may beat the others and are due for a trial, with all of their
    drafts verified; None without any. `is_due` gets a plan and the number of its steps that are
    known."""
    off, *others = plans
    without = shape_of(load, off)
    # What verifies nothing makes the step that is made without it.
    plans = [off, *(plan for plan in others if shape_of(load, plan) != without)]
    least = NEARLY * max(plan.goodput for plan in plans)
    # A trial of less than the whole would show no more of what its step takes.
    near = [p for p in plans if p.goodput >= least and whole(p, load, times).goodput >= least]
    due = [plan for plan in near if is_due(plan, _num_known(plan, load, times))]
    best = max(due, key=_goodput, default=None)
    return None if best is None else whole(best, load, times)


def _num_known(plan: Plan, load: Load, times: StepTimes) -> int:
    """Steps of the plan's kind. Where the memory proposes too, hardly two are equally wide."""
    if plan.is_mixed:
        return times.num_steps_of(load.batch, plan.passes)
    return times.num_steps(shape_of(load, plan))


def _goodput(plan: Plan) -> float:
    return plan.goodput
