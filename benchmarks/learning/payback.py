"""`osd bench payback`: what training adds to a service that has a memory, free and charged.

Replays of the drift benchmark's recordings under the service's own control of speculation, with
measured step times, as in `benchmarks/drift/memory.py`; here the draft learns. *Charged*: all CPU
seconds of the trainer are added to the time of serving, as if the engine stood still while it
works. Then the service's own meter decides whether a round pays (`benchmarks/replays/charged.py`).
In hindsight, the best is what was fastest of no training, of so many rounds, and of all that the
service makes where training is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.drift import memory, names
from benchmarks.drift.contest import Contest, mean_with_interval
from benchmarks.parts import narrowed
from benchmarks.record import Goal, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import ModelledStepTimes
from benchmarks.result import Figure, Result

OFF = names.FROZEN_LOOP
"""The identical service with its trainer off."""
ARMS = (OFF, names.SERVED, names.CHARGED, *names.STOPPED)
FREE = "trainer on over trainer off, free"
CHARGED = "trainer on over trainer off, charged"
HINDSIGHT = "trainer on over the best stop in hindsight, charged"
ADDED = "training all the while over trainer off, charged"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    given = memory.protocol(options)
    return replace(
        given,
        bench="payback",
        question="What does training add to a service that has a memory?",
        arms=ARMS,
        sizes={**given.sizes, "left_out": {}},
        goals=(
            Goal(figure=FREE, at_least=1.0),
            Goal(figure=CHARGED, at_least=0.97),
            Goal(figure=HINDSIGHT, at_least=0.97),
        ),
    )


def run(options: Options) -> Result:
    """Time steps, record where the cache lacks it, then replay."""
    plan = narrowed(protocol(options), options)
    return summarise(plan, memory.replay(options, plan))


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    times = ModelledStepTimes.of([row for row in rows if "arm" in row])
    contests = memory.contests(plan, rows)
    figures = [figure for contest in contests for figure in _of_schedule(contest, times)]
    return Result(protocol=plan, figures=tuple(figures))


def _of_schedule(contest: Contest, times: ModelledStepTimes) -> Iterator[Figure]:
    curves, without = contest.curves, times.tokens_per_second_without()

    def speeds(arm: str, *, is_charged: bool) -> list[float]:
        return [_speed(curve, is_charged=is_charged) / without for curve in curves[arm]]

    for is_charged, said in ((False, "trainer free"), (True, "trainer charged")):
        group = f"{contest.name}: speed over no speculation, {said}"
        for arm in curves:
            yield mean_with_interval(group, arm, speeds(arm, is_charged=is_charged))
    group = f"{contest.name}: rounds"
    for arm in curves:
        yield mean_with_interval(group, arm, [float(curve.num_rounds) for curve in curves[arm]])
    if OFF not in curves:
        return
    off = speeds(OFF, is_charged=True)
    best = [max(each) for each in zip(*(speeds(a, is_charged=True) for a in curves), strict=True)]
    group = f"{contest.name}: compared"
    for figure, arm, is_charged, rival in (
        (FREE, names.SERVED, False, off),
        (CHARGED, names.CHARGED, True, off),
        *([(HINDSIGHT, names.CHARGED, True, best)] if curves.keys() >= set(ARMS) else []),
        (ADDED, names.SERVED, True, off),
    ):
        if arm in curves:
            ratios = [a / b for a, b in zip(speeds(arm, is_charged=is_charged), rival, strict=True)]
            yield mean_with_interval(group, figure, ratios)


def _speed(curve: Curve, *, is_charged: bool) -> float:
    assert curve.seconds is not None, "the closed loop keeps time"
    charged_s = float(curve.cpu_s[-1]) if is_charged else 0.0
    return float(curve.total("tokens") / (curve.seconds.sum() + charged_s))
