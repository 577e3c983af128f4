"""`osd bench memory`: what the memory of served text gains, alone and beside a draft.

Replays of the drift benchmark's recordings (`drift.py`) under the service's own control of
speculation, with measured step times; proposing takes no time. Suffix decoding stands in the
memory's place with the same calibration, price, length and bytes
(`benchmarks/replays/suffix_memory.py`). The draft does not learn: this is the service with its
trainer off. On one schedule there are two more arms, whose draft learns: what memory and draft are
worth together then. Training takes no time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from benchmarks.drift import jobs, names
from benchmarks.drift.contest import Contest, mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES, SUFFIX_MODULE, SUFFIX_PACKAGE
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import CYCLES, STREAMS, ModelledStepTimes
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED
from benchmarks.traffic.schedule import Schedule, arrivals, read_all, shifts

ARMS = (*names.SOURCES, names.FROZEN_LOOP)
LEARNING, LEARNING_SCHEDULE = (names.SERVED, names.LEARNING_DRAFT_LOOP), "sharp"
QUICK_SCHEDULE, QUICK_PHASES = "sharp", (96, 144)
NATURAL = "natural"
FIRST = 24
"""Requests right after a shift."""
OVER_SUFFIX = "memory over suffix decoding"
FIRST_OVER_SUFFIX = f"memory over suffix decoding, first {FIRST} of a shift"
NATURAL_OVER_NONE = "memory over no speculation, natural text"
OVER_SINGLE = "memory and draft over the better one alone, each third of a phase"
LATE = "memory and learning draft over the better one alone, last third of a shift"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    schedules = read_all()
    chosen = (
        {QUICK_SCHEDULE: schedules[QUICK_SCHEDULE].shortened(QUICK_PHASES)}
        if options.quick
        else schedules
    )
    without = () if importlib.util.find_spec(SUFFIX_MODULE) else (names.SUFFIX_LOOP,)
    given = jobs.base_config().speculation
    return Protocol(
        bench="memory",
        question="What does a memory of served text gain, alone and beside a draft?",
        arms=tuple(arm for arm in (*ARMS, *LEARNING) if arm not in without),
        order="Every contender on the same recorded requests, two at a time.",
        sizes={
            "schedules": {name: schedule.model_dump() for name, schedule in chosen.items()},
            "seeds": [0] if options.quick else [0, 1, 2],
            "left_out": dict.fromkeys(without, f"{SUFFIX_PACKAGE} is not installed"),
            "k_max": given.k_max,
            "memory_k_max": given.memory_k_max,
            "memory_bytes": given.memory_bytes,
            "streams": STREAMS,
            "cycles": 2 if options.quick else CYCLES,
        },
        goals=(
            Goal(figure=OVER_SUFFIX, at_least=1.05),
            Goal(figure=FIRST_OVER_SUFFIX, at_least=1.05),
            Goal(figure=NATURAL_OVER_NONE, at_least=0.99),
            Goal(figure=OVER_SINGLE, at_least=0.98),
            Goal(figure=LATE, at_least=1.02),
        ),
    )


def run(options: Options) -> Result:
    """Time steps, record where the cache lacks it, then replay."""
    plan = narrowed(protocol(options), options)
    return summarise(plan, replay(options, plan, _plays))


def _plays(name: str, arm: str) -> bool:
    return arm not in LEARNING or name == LEARNING_SCHEDULE


def replay(
    options: Options, plan: Protocol, plays: Callable[[str, str], bool] = lambda name, arm: True
) -> Sequence[Row]:
    """The raw rows: step times, and each contender on each schedule that it `plays`."""
    notebook = Notebook(options, plan)
    for arm, reason in plan.sizes["left_out"].items():
        options.say(f"left out: {arm}: {reason}")
    schedules = schedules_of(plan)
    for family in dict.fromkeys(schedule.family for schedule in schedules.values()):
        FAMILIES[family].models()
    timed = jobs.step_times(notebook, plan.sizes["cycles"], options.say)
    times = ModelledStepTimes.of(timed)
    runs = [(name, seed) for name in schedules for seed in plan.sizes["seeds"]]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=jobs.prepare) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        recorded = [pool.submit(jobs.record_stream, *one) for one in streams_of(schedules, runs)]
        for stream in recorded:
            stream.result()
        asked = [
            Asked(
                {"schedule": name, "seed": seed, "contender": arm},
                partial(jobs.run_one, name, schedules[name], seed, arm, 0, times),
            )
            for arm in plan.arms
            for name, seed in runs
            if plays(name, arm)
        ]
        return [*timed, *measured(pool, notebook, asked, options.say, at_once=NUM_PROCESSES)]


def contests(plan: Protocol, rows: Sequence[Row]) -> Iterator[Contest]:
    """The curves of the raw rows, by schedule."""
    for name, schedule in schedules_of(plan).items():
        curves = {
            arm: [
                Curve.from_row(row)
                for row in rows
                if (row.get("schedule"), row.get("contender")) == (name, arm)
            ]
            for arm in plan.arms
        }
        curves = {arm: found for arm, found in curves.items() if found}
        yield Contest(name=name, schedule=schedule, curves=curves)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    times = ModelledStepTimes.of([row for row in rows if "arm" in row])
    figures = [figure for one in contests(plan, rows) for figure in _of_schedule(one, times)]
    return Result(protocol=plan, figures=tuple(figures))


def _of_schedule(contest: Contest, times: ModelledStepTimes) -> Iterator[Figure]:
    name, schedule, curves = contest.name, contest.schedule, contest.curves
    without = times.tokens_per_second_without()

    def speeds(arm: str, start: int = 0, stop: int | None = None) -> list[float]:
        return [_speed(curve, start, stop) / without for curve in curves[arm]]

    def over(arm: str, others: Sequence[str], start: int, stop: int) -> list[float]:
        best = zip(*(speeds(other, start, stop) for other in others), strict=True)
        return [a / max(b) for a, b in zip(speeds(arm, start, stop), best, strict=True)]

    bounds = list(zip(schedule.bounds, schedule.bounds[1:], strict=False))
    group = f"{name}: speed over no speculation"
    for arm in curves:
        yield mean_with_interval(group, arm, speeds(arm))
    for phase, (start, stop) in zip(schedule.phases, bounds, strict=True):
        for first, last in ((start, min(start + FIRST, stop)), (max(start, stop - 96), stop)):
            where = f"{name}: speed over no speculation, {phase.name}, {first} to {last}"
            for arm in curves:
                yield mean_with_interval(where, arm, speeds(arm, first, last))
    group = f"{name}: compared"
    if name == NATURAL and names.MEMORY in curves:
        yield mean_with_interval(group, NATURAL_OVER_NONE, speeds(names.MEMORY))
    end = schedule.num_requests
    changes = set(shifts(schedule, FAMILIES[schedule.family]))
    if {names.MEMORY, names.SUFFIX_LOOP} <= curves.keys():
        suffix = [names.SUFFIX_LOOP]
        figure = OVER_SUFFIX if name != NATURAL else f"{OVER_SUFFIX}, natural text"
        yield mean_with_interval(group, figure, over(names.MEMORY, suffix, 0, end))
        for number in sorted(changes):
            phase, (start, stop) = schedule.phases[number], bounds[number]
            if name == NATURAL or phase.mix_at_end or number == 0:
                continue
            ratios = over(names.MEMORY, suffix, start, min(start + FIRST, stop))
            yield mean_with_interval(f"{group}, {phase.name}", FIRST_OVER_SUFFIX, ratios)
    single = [names.MEMORY, names.DRAFT_LOOP]
    learning = [names.MEMORY, names.LEARNING_DRAFT_LOOP]
    for number, (phase, (start, stop)) in enumerate(zip(schedule.phases, bounds, strict=True)):
        thirds = [start + (stop - start) * i // 3 for i in range(4)]
        for i, (first, last) in enumerate(zip(thirds, thirds[1:], strict=False), 1):
            where = f"{group}, {phase.name}, third {i}"
            if {names.FROZEN_LOOP, *single} <= curves.keys():
                ratios = over(names.FROZEN_LOOP, single, first, last)
                yield mean_with_interval(where, OVER_SINGLE, ratios)
            if i == 3 and number in changes and {names.SERVED, *learning} <= curves.keys():
                learnt = over(names.SERVED, learning, first, last)
                yield mean_with_interval(where, LATE, learnt)


def _speed(curve: Curve, start: int, stop: int | None) -> float:
    assert curve.seconds is not None, "the closed loop keeps time"
    return float(curve.total("tokens", start, stop) / curve.seconds[start:stop].sum())


def schedules_of(plan: Protocol) -> dict[str, Schedule]:
    return {n: Schedule.model_validate(tree) for n, tree in plan.sizes["schedules"].items()}


def streams_of(
    schedules: dict[str, Schedule], runs: Sequence[tuple[str, int]]
) -> list[tuple[str, str, int, int]]:
    """(family, domain, block, requests) of all that must be recorded."""
    needed: dict[tuple[str, str, int], Any] = {}
    for name, seed in runs:
        for arrival in arrivals(schedules[name], name, seed):
            key = schedules[name].family, arrival.domain, FIRST_SERVED + seed
            needed[key] = max(needed.get(key, 0), arrival.index + 1)
    return [(*key, num) for key, num in needed.items()]
