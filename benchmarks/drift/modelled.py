"""Modelled speed of the drift benchmark's contenders: each step of a run gets the measured time of
such a step.

The reference is no speculation, one token per step. It need not be run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.drift import names
from benchmarks.drift.contest import LAST, Contest, mean_with_interval
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import STREAMS, WIDTHS, ModelledStepTimes
from benchmarks.result import Figure
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import shifts

BEST_RATIO, FROZEN_RATIO = "over the best that never learns", "over the frozen draft served alike"
"""Goals are held to these, for ours with a fixed k and as served. No speculation counts among those
that never learn. What the closed loop gains without learning is no merit of learning: alike is with
a fixed k, or under the loop."""
FROZEN_ALIKE = {names.OURS: names.FROZEN, names.SERVED: names.FROZEN_LOOP}
GOALS = {
    f"{who} {ratio}": least
    for who in names.HELD
    for ratio, least in ((BEST_RATIO, 0.97), (FROZEN_RATIO, 1.2))
}
"""Figure -> what it should be at least."""
PERCENTILES = (50, 99)


def step_times(times: ModelledStepTimes) -> list[Figure]:
    """What the models rest on."""
    group = f"a step of {STREAMS} requests of the cost-shaped target"
    found = [
        (f"verifying {w} draft tokens each", seconds)
        for w, seconds in zip(WIDTHS, times.verify_s, strict=True)
    ]
    found.append(("what the draft model adds", times.draft_s))
    return [
        Figure(group=group, name=name, value=1e3 * seconds, unit="ms") for name, seconds in found
    ]


def figures_of(contest: Contest, times: ModelledStepTimes) -> list[Figure]:
    """Modelled decode speed, TPOT and latency, over those without speculation."""
    model = _Model(contest, times)
    found = model.compared("speed over no speculation, all requests", model.speed)
    title = "speed over no speculation, all requests, the trainer's CPU seconds added"
    found += model.compared(title, partial(model.speed, counts_trainer=True))
    for phase, stop in zip(contest.schedule.phases, contest.schedule.bounds[1:], strict=True):
        window = partial(model.speed, start=stop - LAST, stop=stop)
        found += model.compared(f"speed over no speculation, last {LAST} of {phase.name}", window)
    for percent in PERCENTILES:
        for title, measure in (
            ("TPOT", model.tpot),
            ("decode latency of a request", model.latency),
        ):
            at = partial(measure, percent=percent)
            found += model.compared(f"{title} over no speculation, p{percent} of the requests", at)
    return [*found, *_ratios(contest, model)]


def seconds_of(curve: Curve, name: str, times: ModelledStepTimes) -> np.ndarray:
    """float [requests]: each one's share of the decode time of a contender's run."""
    return times.seconds(curve, has_draft_model=name not in names.NO_DRAFT_MODEL)


class _Model:
    """Measures of (curve, contender's name)."""

    def __init__(self, contest: Contest, times: ModelledStepTimes) -> None:
        self._contest, self._times = contest, times

    def compared(self, title: str, measure: Callable[[Curve, str], float]) -> list[Figure]:
        return [
            mean_with_interval(
                f"{self._contest.name}: modelled {title}", name, [measure(c, name) for c in curves]
            )
            for name, curves in self._contest.curves.items()
        ]

    def speed(
        self,
        curve: Curve,
        name: str,
        start: int = 0,
        stop: int | None = None,
        counts_trainer: bool = False,
    ) -> float:
        seconds = seconds_of(curve, name, self._times)[start:stop].sum()
        training = float(curve.cpu_s[-1]) if counts_trainer else 0.0
        tokens = curve.total("tokens", start, stop)
        return float(tokens / (seconds + training) / self._times.tokens_per_second_without())

    def tpot(self, curve: Curve, name: str, percent: int) -> float:
        tokens = np.maximum(curve.counts["tokens"], 1)
        return (
            float(np.percentile(self._waits(curve, name) / tokens, percent))
            / self._times.verify_s[0]
        )

    def latency(self, curve: Curve, name: str, percent: int) -> float:
        without = np.percentile(curve.counts["tokens"] * self._times.verify_s[0], percent)
        return float(np.percentile(self._waits(curve, name), percent) / max(without, 1e-9))

    def _waits(self, curve: Curve, name: str) -> np.ndarray:
        """float [requests]: seconds from a request's first token to its last; it waits for all that
        share its steps."""
        return STREAMS * seconds_of(curve, name, self._times)


def _ratios(contest: Contest, model: _Model) -> list[Figure]:
    """What the goals are held to."""
    group = f"{contest.name}: modelled speed"
    by_name = {
        name: [model.speed(curve, name) for curve in curves]
        for name, curves in contest.curves.items()
    }
    rivals = [by_name[name] for name in names.UNTRAINED if name in by_name]
    best = [max(1.0, *speeds) for speeds in zip(*rivals, strict=True)]  # 1 is no speculation
    found = []
    for who in names.HELD:
        if who not in by_name:
            continue
        ratios = [own / other for own, other in zip(by_name[who], best, strict=True)]
        found.append(mean_with_interval(group, f"{who} {BEST_RATIO}", ratios))
        frozen = by_name.get(FROZEN_ALIKE[who])
        if frozen and shifts(contest.schedule, FAMILIES[contest.schedule.family]):
            ratios = [own / other for own, other in zip(by_name[who], frozen, strict=True)]
            found.append(mean_with_interval(group, f"{who} {FROZEN_RATIO}", ratios))
    return found
