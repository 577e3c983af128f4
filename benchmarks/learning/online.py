"""`osd bench online`: whether learning online pays where nothing can be looked up.

Replays of natural prose in five languages (`benchmarks/prose`), sampled at temperature 0.7, under
the service's own control of speculation, `STREAMS` requests at a time, at two prices of a step: as
measured here, and as published of an 8 B target on an H100. Nobody is told the language of a
request. Rivals have the same memory and control (`benchmarks/drift/rivals.py`).

The statistics are fixed in `protocol`, before any run: the primary figure, the goals, and their
intervals over model and traffic seeds, corrected for the number of goals.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from benchmarks.drift import jobs, names
from benchmarks.drift.drift import NUM_PROCESSES, SUFFIX_MODULE, SUFFIX_PACKAGE
from benchmarks.learning import online_report
from benchmarks.learning.online_report import (
    DRAWN,
    DRAWN_AGAIN,
    DRAWN_LEARNT,
    DRAWN_OF_OFFLINE,
    DRAWN_WHOLE,
    HOME_AGAIN,
    LAST_THIRD,
    MEASURED,
    MIXED,
    MIXED_AGAIN,
    MIXED_WHOLE,
    OF_OFFLINE,
    PUBLISHED,
    TIMELESS,
    WHOLE,
)
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.step_times import CYCLES, STREAMS, ModelledStepTimes, published
from benchmarks.result import Result
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, PROSE, TRAINING
from benchmarks.traffic.schedule import DIRECTORY, Schedule, arrivals, read_all

SCHEDULES = DIRECTORY / "prose"
ARMS = (
    *(names.FROZEN_LOOP, names.AGAIN, names.SERVED, names.CHARGED, names.NIGHTLY, names.STATIC),
    *(*names.OSD_LOOP, names.SUFFIX_LOOP, names.MEMORY),
    *(names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP),
    *(names.DRAWN_DRAFT_LOOP, names.DRAWN_SERVED, names.DRAWN_CHARGED, names.DRAWN_STATIC),
    *(names.MIXED_FROZEN_LOOP, names.MIXED_SERVED, names.MIXED_CHARGED, names.MIXED_NEVER_BACK),
    *(names.MIXED_LEAST, *names.MIXED_RIVALS),
    *TIMELESS,
)
QUICK_SCHEDULE = "home-and-de"
QUICK_ARMS = (names.FROZEN_LOOP, names.AGAIN, names.SERVED, names.STATIC, *TIMELESS)
STATIC_REQUESTS = 192
"""Of each language, that the one draft for all is trained on."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    schedules = read_all(SCHEDULES)
    suffix = (names.SUFFIX_LOOP, names.MIXED_SUFFIX_LOOP)
    without = () if importlib.util.find_spec(SUFFIX_MODULE) else suffix
    chosen = {QUICK_SCHEDULE: schedules[QUICK_SCHEDULE]} if options.quick else schedules
    return Protocol(
        bench="online",
        question="Does learning online pay where nothing can be looked up?",
        arms=QUICK_ARMS if options.quick else tuple(arm for arm in ARMS if arm not in without),
        order="Every arm on the same recorded requests, two at a time.",
        sizes={
            "schedules": {name: schedule.model_dump() for name, schedule in chosen.items()},
            "models": list(PROSE[:1] if options.quick else PROSE),
            "seeds": [0] if options.quick else [0, 1, 2],
            "prices": [PUBLISHED] if options.quick else [PUBLISHED, MEASURED],
            "left_out": dict.fromkeys(without, f"{SUFFIX_PACKAGE} is not installed"),
            "streams": STREAMS,
            "night": "every 192 requests",
            "static_requests": STATIC_REQUESTS,
            "cycles": 2 if options.quick else CYCLES,
            "primary": f"{LAST_THIRD}, at the price {PUBLISHED}",
            "interval": "hierarchical bootstrap, 0.95 for all goals of a price together; of one "
            "model, Student's t over traffic alone",
        },
        goals=(
            Goal(figure=LAST_THIRD, at_least=1.10),
            Goal(figure=LAST_THIRD, bound="low", at_least=1.0),
            Goal(figure=WHOLE, at_least=1.0),
            Goal(figure=HOME_AGAIN, at_least=0.9),
            Goal(figure=OF_OFFLINE, at_least=0.9),
            Goal(figure=DRAWN, at_least=1.10),
            Goal(figure=DRAWN, bound="low", at_least=1.0),
            Goal(figure=DRAWN_LEARNT, at_least=1.10),
            Goal(figure=DRAWN_WHOLE, at_least=1.0),
            Goal(figure=DRAWN_AGAIN, at_least=0.9),
            Goal(figure=DRAWN_OF_OFFLINE, at_least=0.9),
            Goal(figure=MIXED, at_least=1.10),
            Goal(figure=MIXED, bound="low", at_least=1.0),
            Goal(figure=MIXED_WHOLE, at_least=1.0),
            Goal(figure=MIXED_AGAIN, at_least=0.9),
        ),
    )


def run(options: Options) -> Result:
    """Time steps, record where the cache lacks it, then replay."""
    plan = narrowed(protocol(options), options)
    notebook = Notebook(options, plan)
    for arm, reason in plan.sizes["left_out"].items():
        options.say(f"left out: {arm}: {reason}")
    times = {PUBLISHED: published()}
    if MEASURED in plan.sizes["prices"]:
        timed = jobs.step_times(notebook, plan.sizes["cycles"], options.say)
        times[MEASURED] = ModelledStepTimes.of(timed)
    runs = list(_runs(plan))
    for family in dict.fromkeys(one.schedule.family for one in runs):
        FAMILIES[family].models()
    spawn = get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=jobs.prepare) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        for stream in [pool.submit(jobs.record_stream, *one) for one in _streams(runs)]:
            stream.result()
        asked = [
            _asked(one, arm, price, times[price])
            for arm in plan.arms
            for one in runs
            for price in (plan.sizes["prices"] if arm not in TIMELESS else [PUBLISHED])
        ]
        return summarise(plan, measured(pool, notebook, asked, options.say, at_once=NUM_PROCESSES))


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    return online_report.summarise(plan, rows)


@dataclass(frozen=True, slots=True)
class _Run:
    """A schedule under a model and a traffic seed."""

    name: str
    schedule: Schedule
    seed: int


def _runs(plan: Protocol) -> Iterator[_Run]:
    for name, tree in plan.sizes["schedules"].items():
        schedule = Schedule.model_validate(tree)
        for model in online_report.models_of(schedule, plan.sizes["models"]):
            replayed = schedule.model_copy(update={"family": model})
            yield from (_Run(name, replayed, seed) for seed in plan.sizes["seeds"])


def _asked(one: _Run, arm: str, price: str, times: ModelledStepTimes) -> Asked:
    key = {"schedule": one.name, "model": one.schedule.family, "seed": one.seed}
    of = partial(jobs.run_one, one.name, one.schedule, one.seed, arm, STATIC_REQUESTS, times)
    return Asked({**key, "contender": arm, "price": price}, of)


def _streams(runs: Sequence[_Run]) -> list[tuple[str, str, int, int]]:
    """(family, domain, block, requests) of all that must be recorded."""
    needed: dict[tuple[str, str, int], int] = {}
    for one in runs:
        family = one.schedule.family
        for arrival in arrivals(one.schedule, one.name, one.seed):
            key = family, arrival.domain, FIRST_SERVED + one.seed
            needed[key] = max(needed.get(key, 0), arrival.index + 1)
        for domain in one.schedule.domains:
            needed[family, domain, TRAINING] = STATIC_REQUESTS
    return [(*key, num) for key, num in needed.items()]
