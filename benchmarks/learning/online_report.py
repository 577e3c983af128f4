"""What the benchmark of online learning says: its figures from raw rows, with intervals over models
and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.drift import names
from benchmarks.drift.contest import mean_with_interval
from benchmarks.record import Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.result import Figure, Result
from benchmarks.stats import CONFIDENCE, hierarchical
from benchmarks.traffic.family import FAMILIES, PROSE
from benchmarks.traffic.schedule import Schedule

OFF = names.FROZEN_LOOP
"""The identical service with its trainer off."""
TIMELESS = (
    *(names.FROZEN, names.OURS, names.CEILING),
    *(names.DRAWN_FROZEN, names.DRAWN_OURS, names.DRAWN_CEILING),
)
"""Four tokens of the draft in every step: what it would be accepted, whoever else proposes."""
MEASURED, PUBLISHED = "as measured", "published (H100)"

LAST_THIRD = "as served over trainer off, last third"
WHOLE = "as served over trainer off, whole run, charged"
HOME_AGAIN = "as served over trainer off, home again"
OF_OFFLINE = "α of the draft over that trained offline, last third"
WITHOUT_MEMORY = "without a memory: learning over frozen, last third"
DRAWN = "sampled drafts, learning, over trainer off with a memory, last third"
DRAWN_LEARNT = "sampled drafts: learning over frozen, last third"
DRAWN_AGAIN = "sampled drafts, learning, over trainer off with a memory, home again"
DRAWN_WHOLE = "sampled drafts, learning, over trainer off with a memory, whole run, charged"
DRAWN_OF_OFFLINE = "sampled drafts: α learnt over that trained offline, last third"
MIXED = "sampled drafts and memory: learning over trainer off, last third"
MIXED_OFF = "sampled drafts and memory, learning, over greedy ones with trainer off, last third"
MIXED_AGAIN = "sampled drafts and memory: learning over trainer off, home again"
MIXED_AGAIN_NEVER_BACK = "the same, where no earlier draft is recalled, home again"
MIXED_WHOLE = "sampled drafts and memory: learning over trainer off, whole run, charged"
MIXED_OVER = {
    rival: f"sampled drafts and memory: learning over {rival.removesuffix(', closed loop')}"
    for rival in names.MIXED_RIVALS
} | {names.MIXED_LEAST: "sampled drafts and memory: replaying as time allows over the least"}
ALIKE = "trainer off over trainer off, last third"
BURNT = "burning as much and learning nothing over trainer off, whole run, charged"

Values = list[list[float]]
"""[model][traffic]"""
Measure = Callable[[Curve, int, int], float]


@dataclass(frozen=True, slots=True)
class Contest:
    """All runs of a schedule at one price."""

    name: str
    schedule: Schedule
    curves: dict[str, list[list[Curve]]]
    """arm -> [model][traffic]"""

    def values(self, arm: str, measure: Measure, start: int, stop: int) -> Values:
        return [[measure(curve, start, stop) for curve in model] for model in self.curves[arm]]

    def ratios(self, arm: str, rival: str, measure: Measure, start: int, stop: int) -> Values:
        ours = self.values(arm, measure, start, stop)
        theirs = self.values(rival, measure, start, stop)
        return [
            [a / b for a, b in zip(*both, strict=True)] for both in zip(ours, theirs, strict=True)
        ]


def speed(curve: Curve, start: int, stop: int, charged_s: float = 0.0) -> float:
    """Tokens per second of decoding."""
    assert curve.seconds is not None, "the closed loop keeps time"
    seconds = float(curve.seconds[start:stop].sum()) + charged_s
    return curve.total("tokens", start, stop) / seconds


def charged(curve: Curve, start: int, stop: int) -> float:
    """As `speed`, with the trainer's CPU seconds."""
    before = float(curve.cpu_s[start - 1]) if start else 0.0
    return speed(curve, start, stop, float(curve.cpu_s[stop - 1]) - before)


_Ratio = tuple[str, str, str, Measure]
"""(figure, arm, rival, what is measured of both)"""
_IN_A_NEW_PHASE: tuple[_Ratio, ...] = (
    (LAST_THIRD, names.SERVED, OFF, speed),
    (ALIKE, names.AGAIN, OFF, speed),
    (WITHOUT_MEMORY, names.LEARNING_DRAFT_LOOP, names.DRAFT_LOOP, speed),
    (OF_OFFLINE, names.OURS, names.CEILING, Curve.alpha),
    (DRAWN, names.DRAWN_SERVED, OFF, speed),
    (DRAWN_LEARNT, names.DRAWN_SERVED, names.DRAWN_DRAFT_LOOP, speed),
    (MIXED, names.MIXED_SERVED, names.MIXED_FROZEN_LOOP, speed),
    (MIXED_OFF, names.MIXED_SERVED, OFF, speed),
    (DRAWN_OF_OFFLINE, names.DRAWN_OURS, names.DRAWN_CEILING, Curve.alpha),
)
"""Compared in the last third of each phase of other traffic than at first."""
_OVER_RIVALS: tuple[_Ratio, ...] = tuple(
    (over, names.MIXED_SERVED, rival, speed) for rival, over in MIXED_OVER.items()
)
"""Compared there, too, and over the whole run."""


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    figures: list[Figure] = []
    for price in plan.sizes["prices"]:
        found = [_contest(plan, rows, name, price) for name in plan.sizes["schedules"]]
        contests = [contest for contest in found if contest.curves]
        confidence = 1 - (1 - CONFIDENCE) / (len(plan.goals) * max(len(contests), 1))
        for contest in contests:
            is_free = price == PUBLISHED
            figures += _tables(contest, is_free=is_free)
            figures += _compared(contest, confidence, is_free=is_free)
    return Result(protocol=plan, figures=tuple(figures))


def models_of(schedule: Schedule, models: Sequence[str]) -> list[str]:
    """Under which models a schedule is replayed: `models`, or its own beside the first of them."""
    if schedule.family == PROSE[0]:
        return list(models)
    return [schedule.family] if PROSE[0] in models else []


def _contest(plan: Protocol, rows: Sequence[Row], name: str, price: str) -> Contest:
    def curves(arm: str, model: str) -> list[Curve]:
        asked = PUBLISHED if arm in TIMELESS else price
        wanted = {"schedule": name, "contender": arm, "price": asked, "model": model}
        return [Curve.from_row(row) for row in rows if wanted.items() <= row.items()]

    schedule = Schedule.model_validate(plan.sizes["schedules"][name])
    models = models_of(schedule, plan.sizes["models"])
    by_arm = {
        arm: [found for model in models if (found := curves(arm, model))] for arm in plan.arms
    }
    ran = {arm: found for arm, found in by_arm.items() if found}
    return Contest(f"{name}, price {price}", schedule, ran)


def _tables(contest: Contest, *, is_free: bool) -> Iterator[Figure]:
    """`is_free`: the trainer's seconds are no seconds of this price."""
    end = contest.schedule.num_requests
    for number, phase in enumerate(contest.schedule.phases):
        start, stop = contest.schedule.last_third(number)
        for arm in contest.curves:
            measure: Measure = Curve.alpha if arm in TIMELESS else speed
            what = "α" if arm in TIMELESS else "tokens/s"
            group = f"{contest.name}: {what}, last third of {phase.name}"
            yield mean_over_models(group, arm, contest.values(arm, measure, start, stop))
    whole = {"whole run": speed} | ({} if is_free else {"whole run, charged": charged})
    for title, measure in whole.items():
        for arm in contest.curves:
            if arm not in TIMELESS:
                group = f"{contest.name}: tokens/s, {title}"
                yield mean_over_models(group, arm, contest.values(arm, measure, 0, end))
    for title, of in (("rounds", _num_rounds), ("CPU seconds of training", _cpu_s)):
        for arm in contest.curves:
            values = contest.values(arm, of, 0, end)
            if any(map(any, values)):
                yield mean_over_models(f"{contest.name}: {title}", arm, values)


def _compared(contest: Contest, confidence: float, *, is_free: bool) -> Iterator[Figure]:
    end = contest.schedule.num_requests
    home = FAMILIES[contest.schedule.family].home()
    mean = partial(mean_over_models, confidence=confidence)
    group = f"{contest.name}: compared"
    for number, phase in enumerate(contest.schedule.phases):
        start, stop = contest.schedule.last_third(number)
        if phase.mix.keys() == {home}:
            for figure, arm, rival in (
                (HOME_AGAIN, names.SERVED, OFF),
                (DRAWN_AGAIN, names.DRAWN_SERVED, OFF),
                (MIXED_AGAIN, names.MIXED_SERVED, names.MIXED_FROZEN_LOOP),
                (MIXED_AGAIN_NEVER_BACK, names.MIXED_NEVER_BACK, names.MIXED_FROZEN_LOOP),
            ):
                if number and {arm, rival} <= contest.curves.keys():
                    yield mean(group, figure, contest.ratios(arm, rival, speed, start, stop))
            continue
        where = f"{group}, {phase.name}"
        for figure, arm, rival, measure in (*_IN_A_NEW_PHASE, *_OVER_RIVALS):
            if {arm, rival} <= contest.curves.keys():
                yield mean(where, figure, contest.ratios(arm, rival, measure, start, stop))
    for over, arm, rival, measure in _OVER_RIVALS:
        if {arm, rival} <= contest.curves.keys():
            said = f"{over}, whole run, no training charged"
            yield mean(group, said, contest.ratios(arm, rival, measure, 0, end))
    if not is_free and {names.CHARGED, OFF} <= contest.curves.keys():
        yield mean(group, WHOLE, contest.ratios(names.CHARGED, OFF, charged, 0, end))
        yield mean(group, BURNT, _burnt(contest, end))
    for figure, arm, rival in (
        (DRAWN_WHOLE, names.DRAWN_CHARGED, OFF),
        (MIXED_WHOLE, names.MIXED_CHARGED, names.MIXED_FROZEN_LOOP),
    ):
        if not is_free and {arm, rival} <= contest.curves.keys():
            yield mean(group, figure, contest.ratios(arm, rival, charged, 0, end))


def _burnt(contest: Contest, end: int) -> Values:
    """A trainer that takes what ours takes, and publishes nothing."""
    return [
        [
            speed(off, 0, end, float(ours.cpu_s[-1])) / speed(off, 0, end)
            for off, ours in zip(*both, strict=True)
        ]
        for both in zip(contest.curves[OFF], contest.curves[names.CHARGED], strict=True)
    ]


def _num_rounds(curve: Curve, start: int, stop: int) -> float:
    return float(curve.num_rounds)


def _cpu_s(curve: Curve, start: int, stop: int) -> float:
    return float(curve.cpu_s[-1])


def mean_over_models(
    group: str, name: str, values: Values, confidence: float = CONFIDENCE
) -> Figure:
    """With an interval over models and traffic, or over the traffic of one model."""
    if len(values) == 1:
        return mean_with_interval(group, name, values[0])  # over traffic alone
    low = high = None
    if min(map(len, values)) > 1:
        low, high = hierarchical(values, confidence)
    num, mean = sum(map(len, values)), float(np.mean([np.mean(model) for model in values]))
    return Figure(group=group, name=name, value=mean, low=low, high=high, n=num)
