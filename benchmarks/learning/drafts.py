"""`osd bench drafts`: what learning online brings to first drafts of three sizes, and to those that
have met the new language before.

    0.4 M ── 1 M ── 2 M parameters, all of home alone
             1 M with 1, 5, 20 % of its first lessons in the other languages

One schedule of natural prose (English, German, English again), replayed as in `online.py` at the
published price, at which training takes no time. That price is the same for every draft, whatever
its size: speeds compare a draft with itself, α compares drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from benchmarks.drift import jobs, names
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES
from benchmarks.drift.memory import streams_of
from benchmarks.drift.report import TO_REACH, requests_to_reach
from benchmarks.learning.online import SCHEDULES
from benchmarks.learning.online_report import speed
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.prose.recipe import FOREIGN, SIZE, SIZES
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import STREAMS, published
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES, TRAINING
from benchmarks.traffic.schedule import Schedule, read_all

SCHEDULE, PHASE = "home-and-de", 1
"""Where German comes."""
BY_SIZE = {size: "prose" if size == SIZE else f"prose-{size}-0%" for size in SIZES}
BY_FOREIGN = {foreign: f"prose-{SIZE}-{foreign:.0%}" if foreign else "prose" for foreign in FOREIGN}
DRAFTS = tuple(dict.fromkeys([*BY_SIZE.values(), *BY_FOREIGN.values()]))
SMALL, LARGE = BY_SIZE[next(iter(SIZES))], BY_SIZE[next(reversed(SIZES))]
NONE, MOST = BY_FOREIGN[min(FOREIGN)], BY_FOREIGN[max(FOREIGN)]
ALPHA = (names.FROZEN, names.OURS, names.CEILING)
"""Four tokens of the draft in every step."""
TIMED = (names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP, names.FROZEN_LOOP, names.SERVED)
CEILING_REQUESTS = 192
"""Of each language, that the draft trained offline learns from."""
BY_SIZE_GAINED = f"α gained, {next(reversed(SIZES))} less {next(iter(SIZES))}"
BY_FOREIGN_GAINED = f"α gained, {min(FOREIGN):.0%} foreign less {max(FOREIGN):.0%}"
REACHED = f"runs that come to {TO_REACH:.0%} of the α trained offline"
GAINED, OF_OFFLINE = "α gained, last third", "α learnt over that trained offline, last third"
SPEED = {
    "learning over frozen, without a memory, last third": (
        names.LEARNING_DRAFT_LOOP,
        names.DRAFT_LOOP,
    ),
    "learning over frozen, with a memory, last third": (names.SERVED, names.FROZEN_LOOP),
}


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="drafts",
        question="What does learning bring to larger drafts, and to those that know more?",
        arms=(*ALPHA, *TIMED),
        order="Every arm on the same recorded requests, two at a time.",
        sizes={
            "schedule": read_all(SCHEDULES)[SCHEDULE].model_dump(),
            "families": list(DRAFTS),
            "seeds": [0] if options.quick else [0, 1, 2],
            "streams": STREAMS,
            "ceiling_requests": CEILING_REQUESTS,
        },
        goals=(
            Goal(figure=BY_SIZE_GAINED, at_least=0.0),
            Goal(figure=BY_FOREIGN_GAINED, at_least=0.0),
            Goal(figure=REACHED, at_least=1.0),
        ),
    )


def run(options: Options) -> Result:
    """Build and record what the cache lacks, then replay."""
    plan = narrowed(protocol(options), options)
    notebook = Notebook(options, plan)
    for family in plan.sizes["families"]:
        FAMILIES[family].models()
    spawn = get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=jobs.prepare) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        for stream in [pool.submit(jobs.record_stream, *one) for one in _streams(plan)]:
            stream.result()
        asked = [
            _asked(plan, family, seed, arm)
            for family in plan.sizes["families"]
            for seed in plan.sizes["seeds"]
            for arm in plan.arms
        ]
        return summarise(plan, measured(pool, notebook, asked, options.say, at_once=NUM_PROCESSES))


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    figures: list[Figure] = []
    gained: dict[str, list[float]] = {}
    for family in plan.sizes["families"]:
        curves = {arm: found for arm in plan.arms if (found := _curves(rows, family, arm))}
        figures += _of_draft(family, _schedule(plan), curves)
        if {names.OURS, names.FROZEN} <= curves.keys():
            gained[family] = _gained(_schedule(plan), curves)
    for figure, more, less in (
        (BY_SIZE_GAINED, LARGE, SMALL),
        (BY_FOREIGN_GAINED, NONE, MOST),
    ):
        if {more, less} <= gained.keys():
            pairs = zip(gained[more], gained[less], strict=True)
            figures.append(mean_with_interval("compared", figure, [a - b for a, b in pairs]))
    return Result(protocol=plan, figures=tuple(figures))


def _of_draft(family: str, schedule: Schedule, curves: dict[str, list[Curve]]) -> Iterator[Figure]:
    window = schedule.last_third(PHASE)
    for arm in (arm for arm in ALPHA if arm in curves):
        values = [curve.alpha(*window) for curve in curves[arm]]
        yield mean_with_interval(f"{family}: α, last third of German", arm, values)
    group = f"{family}: compared"
    if {names.OURS, names.FROZEN} <= curves.keys():
        yield mean_with_interval(group, GAINED, _gained(schedule, curves))
    if {names.OURS, names.CEILING} <= curves.keys():
        yield from _of_offline(group, family, schedule, curves)
    for figure, (learning, frozen) in SPEED.items():
        if {learning, frozen} <= curves.keys():
            pairs = zip(curves[learning], curves[frozen], strict=True)
            ratios = [speed(a, *window) / speed(b, *window) for a, b in pairs]
            yield mean_with_interval(group, figure, ratios)


def _of_offline(
    group: str, family: str, schedule: Schedule, curves: dict[str, list[Curve]]
) -> Iterator[Figure]:
    """How near to offline training, and how soon."""
    start, stop = schedule.bounds[PHASE : PHASE + 2]
    pairs = list(zip(curves[names.OURS], curves[names.CEILING], strict=True))
    window = schedule.last_third(PHASE)
    ratios = [own.alpha(*window) / top.alpha(*window) for own, top in pairs]
    yield mean_with_interval(group, OF_OFFLINE, ratios)
    needed = [requests_to_reach(own, top, start, stop) for own, top in pairs]
    share = sum(one is not None for one in needed) / len(needed)
    yield Figure(group=group, name=REACHED, value=share, n=len(needed))
    reached = [(own, num) for (own, _), num in zip(pairs, needed, strict=True) if num is not None]
    if reached:
        group = f"{family}: to {TO_REACH:.0%} of the α trained offline, where it is reached"
        yield mean_with_interval(group, "requests", [float(num) for _, num in reached])
        tokens = [float(own.total("tokens", start, start + num)) for own, num in reached]
        yield mean_with_interval(group, "served tokens", tokens)


def _gained(schedule: Schedule, curves: dict[str, list[Curve]]) -> list[float]:
    window = schedule.last_third(PHASE)
    pairs = zip(curves[names.OURS], curves[names.FROZEN], strict=True)
    return [ours.alpha(*window) - frozen.alpha(*window) for ours, frozen in pairs]


def _asked(plan: Protocol, family: str, seed: int, arm: str) -> Asked:
    schedule = _schedule(plan).model_copy(update={"family": family})
    times = published() if arm in TIMED else None
    of = partial(jobs.run_one, SCHEDULE, schedule, seed, arm, CEILING_REQUESTS, times)
    return Asked({"family": family, "seed": seed, "contender": arm}, of)


def _curves(rows: Sequence[Row], family: str, arm: str) -> list[Curve]:
    wanted = {"family": family, "contender": arm}
    return [Curve.from_row(row) for row in rows if wanted.items() <= row.items()]


def _streams(plan: Protocol) -> list[tuple[str, str, int, int]]:
    """(family, domain, block, requests) of all that must be recorded: the same for every draft."""
    schedule = _schedule(plan)
    served = streams_of({SCHEDULE: schedule}, [(SCHEDULE, seed) for seed in plan.sizes["seeds"]])
    return [*served, *((schedule.family, d, TRAINING, CEILING_REQUESTS) for d in schedule.domains)]


def _schedule(plan: Protocol) -> Schedule:
    return Schedule.model_validate(plan.sizes["schedule"])
