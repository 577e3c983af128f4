"""`osd bench drafts`: what learning online brings to first drafts of three sizes, and to those that
have met the new language before.

    0.4 M ── 1 M ── 2 M parameters, all of home alone
             1 M with 1, 5, 20 % of its first lessons in the other languages

Both greedily and with sampled drafts, for each of the models that differ in their seeds. One
schedule of natural prose (English, German, English again), replayed as in `online.py` at the
published price, at which training takes no time. That price is the same for every draft, whatever
its size: speeds compare a draft with itself, α compares drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from benchmarks.drift import jobs, names
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES
from benchmarks.drift.memory import streams_of
from benchmarks.drift.report import TO_REACH, requests_to_reach
from benchmarks.learning.online import SCHEDULES
from benchmarks.learning.online_report import mean_over_models, speed
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.prose.recipe import FOREIGN, SIZE, SIZES
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import STREAMS, published
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES, PROSE, TRAINING
from benchmarks.traffic.schedule import Schedule, read_all

SCHEDULE, PHASE = "home-and-de", 1
"""Where German comes."""


def draft_of(model: str, size: str = SIZE, foreign: float = 0.0) -> str:
    """The name of the family in which this target is served with this draft."""
    return model if (size, foreign) == (SIZE, 0.0) else f"{model}-{size}-{foreign:.0%}"


SMALL, LARGE = next(iter(SIZES)), next(reversed(SIZES))
NONE, MOST = min(FOREIGN), max(FOREIGN)
DRAFTS = {
    model: tuple(
        dict.fromkeys(
            [
                *(draft_of(model, size) for size in SIZES),
                *(draft_of(model, foreign=share) for share in FOREIGN),
            ]
        )
    )
    for model in PROSE
}
"""Model -> its drafts."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A way to choose the draft's tokens, and the arms that choose so."""

    said: str
    """Put before the names of its figures."""
    frozen: str
    learning: str
    offline: str
    """Four tokens of the draft in every step."""
    speed: dict[str, tuple[str, str]]
    """Figure -> what learns, and what does not, at the published price."""

    @property
    def alpha(self) -> tuple[str, str, str]:
        return self.frozen, self.learning, self.offline


ALONE = "learning over frozen, without a memory, last third"
BESIDE = "learning over frozen, with a memory, last third"
GREEDY = Drafting(
    said="",
    frozen=names.FROZEN,
    learning=names.OURS,
    offline=names.CEILING,
    speed={
        ALONE: (names.LEARNING_DRAFT_LOOP, names.DRAFT_LOOP),
        BESIDE: (names.SERVED, names.FROZEN_LOOP),
    },
)
SAMPLED = Drafting(
    said="sampled drafts: ",
    frozen=names.DRAWN_FROZEN,
    learning=names.DRAWN_OURS,
    offline=names.DRAWN_CEILING,
    speed={
        ALONE: (names.DRAWN_SERVED, names.DRAWN_DRAFT_LOOP),
        BESIDE: (names.MIXED_SERVED, names.MIXED_FROZEN_LOOP),
    },
)
WAYS = (GREEDY, SAMPLED)
TIMED = tuple(arm for way in WAYS for pair in way.speed.values() for arm in reversed(pair))
CEILING_REQUESTS = 192
"""Of each language, that the draft trained offline learns from."""
BY_SIZE_GAINED = f"α gained, {LARGE} less {SMALL}"
BY_FOREIGN_GAINED = f"α gained, {NONE:.0%} foreign less {MOST:.0%}"
REACHED = f"runs that come to {TO_REACH:.0%} of the α trained offline"
GAINED, OF_OFFLINE = "α gained, last third", "α learnt over that trained offline, last third"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    models = PROSE[:1] if options.quick else PROSE
    return Protocol(
        bench="drafts",
        question="What does learning bring to larger drafts, and to those that know more?",
        arms=(*(arm for way in WAYS for arm in way.alpha), *TIMED),
        order="Every arm on the same recorded requests, two at a time.",
        sizes={
            "schedule": read_all(SCHEDULES)[SCHEDULE].model_dump(),
            "families": [family for model in models for family in DRAFTS[model]],
            "seeds": [0] if options.quick else [0, 1, 2],
            "streams": STREAMS,
            "ceiling_requests": CEILING_REQUESTS,
            "interval": "hierarchical bootstrap; of one model, Student's t over traffic alone",
        },
        goals=tuple(
            Goal(figure=way.said + figure, at_least=at_least)
            for way in WAYS
            for figure, at_least in (
                (BY_SIZE_GAINED, 0.0),
                (BY_FOREIGN_GAINED, 0.0),
                (REACHED, 1.0),
            )
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
    schedule = _schedule(plan)
    for way in WAYS:
        gained: dict[str, list[float]] = {}
        for family in plan.sizes["families"]:
            arms = [*way.alpha, *(arm for pair in way.speed.values() for arm in pair)]
            curves = {arm: found for arm in arms if (found := _curves(rows, family, arm))}
            figures += _of_draft(way, family, schedule, curves)
            if {way.learning, way.frozen} <= curves.keys():
                gained[family] = _gained(way, schedule, curves)
        figures += _over_models(way, gained)
    return Result(protocol=plan, figures=tuple(figures))


def _over_models(way: Drafting, gained: dict[str, list[float]]) -> Iterator[Figure]:
    """`gained`: family -> α gained, by traffic."""
    for figure, more, less in (
        (BY_SIZE_GAINED, {"size": LARGE}, {"size": SMALL}),
        (BY_FOREIGN_GAINED, {"foreign": NONE}, {"foreign": MOST}),
    ):
        pairs = [(draft_of(model, **more), draft_of(model, **less)) for model in DRAFTS]
        differences = [
            [a - b for a, b in zip(gained[one], gained[other], strict=True)]
            for one, other in pairs
            if {one, other} <= gained.keys()
        ]
        if differences:
            yield mean_over_models("compared", way.said + figure, differences)


def _of_draft(
    way: Drafting, family: str, schedule: Schedule, curves: dict[str, list[Curve]]
) -> Iterator[Figure]:
    window = schedule.last_third(PHASE)
    for arm in (arm for arm in way.alpha if arm in curves):
        values = [curve.alpha(*window) for curve in curves[arm]]
        yield mean_with_interval(f"{family}: α, last third of German", arm, values)
    group = f"{family}: compared"
    if {way.learning, way.frozen} <= curves.keys():
        yield mean_with_interval(group, way.said + GAINED, _gained(way, schedule, curves))
    if {way.learning, way.offline} <= curves.keys():
        yield from _of_offline(way, family, schedule, curves)
    for figure, (learning, frozen) in way.speed.items():
        if {learning, frozen} <= curves.keys():
            pairs = zip(curves[learning], curves[frozen], strict=True)
            ratios = [speed(a, *window) / speed(b, *window) for a, b in pairs]
            yield mean_with_interval(group, way.said + figure, ratios)


def _of_offline(
    way: Drafting, family: str, schedule: Schedule, curves: dict[str, list[Curve]]
) -> Iterator[Figure]:
    """How near to offline training, and how soon."""
    group = f"{family}: compared"
    start, stop = schedule.bounds[PHASE : PHASE + 2]
    pairs = list(zip(curves[way.learning], curves[way.offline], strict=True))
    window = schedule.last_third(PHASE)
    ratios = [own.alpha(*window) / top.alpha(*window) for own, top in pairs]
    yield mean_with_interval(group, way.said + OF_OFFLINE, ratios)
    needed = [requests_to_reach(own, top, start, stop) for own, top in pairs]
    share = sum(one is not None for one in needed) / len(needed)
    yield Figure(group=group, name=way.said + REACHED, value=share, n=len(needed))
    reached = [(own, num) for (own, _), num in zip(pairs, needed, strict=True) if num is not None]
    if reached:
        group = f"{family}: to {TO_REACH:.0%} of the α trained offline, where it is reached"
        requests = [float(num) for _, num in reached]
        yield mean_with_interval(group, f"{way.said}requests", requests)
        tokens = [float(own.total("tokens", start, start + num)) for own, num in reached]
        yield mean_with_interval(group, f"{way.said}served tokens", tokens)


def _gained(way: Drafting, schedule: Schedule, curves: dict[str, list[Curve]]) -> list[float]:
    window = schedule.last_third(PHASE)
    pairs = zip(curves[way.learning], curves[way.frozen], strict=True)
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
    """(family, domain, block, requests) of all that must be recorded: the same for every draft of a
    model."""
    asked, found = set(plan.sizes["families"]), list[tuple[str, str, int, int]]()
    for model in (model for model, drafts in DRAFTS.items() if asked & set(drafts)):
        schedule = _schedule(plan).model_copy(update={"family": model})
        runs = [(SCHEDULE, seed) for seed in plan.sizes["seeds"]]
        found += streams_of({SCHEDULE: schedule}, runs)
        found += [(model, domain, TRAINING, CEILING_REQUESTS) for domain in schedule.domains]
    return found


def _schedule(plan: Protocol) -> Schedule:
    return Schedule.model_validate(plan.sizes["schedule"])
