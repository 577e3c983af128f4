"""`osd bench heads`: what an EAGLE-3 head gains by learning, with the memory of served text and
without, beside a draft model of the same target.

    target ──► draft model ┐   frozen  | learning
           ──► head        ┘   without | with the memory, under the control of speculation

Replays of recorded requests, `STREAMS` at a time, at modelled prices of a step. A head and a draft
model cost the same here: the published price is an EAGLE head's, which flatters the model; the
measured one a tiny draft model's. Neither price holds the recomputation of the target's hidden
states that a head learns from: that is the trainer's, and counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from benchmarks.drift import jobs
from benchmarks.heads import jobs as heads_jobs
from benchmarks.heads import report
from benchmarks.heads.jobs import LOOPS, TIMELESS, Job, foreign, unserved
from benchmarks.heads.report import HOME_KEPT, OF_OFFLINE, WITH, WITHOUT
from benchmarks.learning.online_report import MEASURED, PUBLISHED
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.step_times import CYCLES, STREAMS, ModelledStepTimes, published
from benchmarks.result import Result
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, TRAINING
from benchmarks.traffic.schedule import DIRECTORY, Schedule, arrivals, read

SCHEDULES = {"sharp": DIRECTORY / "sharp.yaml", "home-and-de": DIRECTORY / "prose/home-and-de.yaml"}
REQUESTS = {"sharp": (96, 288), "home-and-de": (96, 384, 96)}
"""Schedule -> requests of each phase."""
QUICK_REQUESTS = {"sharp": (48, 96), "home-and-de": (96, 192)}
FAMILIES_OF = {
    "sharp": ("tiny-deep", "tiny-deep-head"),
    "home-and-de": ("prose", "prose-head"),
}
"""Schedule -> the same target with its draft model, and with its head."""
OFFLINE_REQUESTS, HOME_REQUESTS = 192, 96


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    config = jobs.base_config()
    given = QUICK_REQUESTS if options.quick else REQUESTS
    return Protocol(
        bench="heads",
        question="What does an EAGLE-3 head gain by learning, beside a draft model?",
        arms=(*TIMELESS, *LOOPS),
        order="Every arm on the same recorded requests, one at a time.",
        sizes={
            "schedules": {
                name: read(path).shortened(given[name]).model_dump()
                for name, path in SCHEDULES.items()
            },
            "families": FAMILIES_OF,
            "seeds": [0] if options.quick else [0, 1, 2],
            "prices": [PUBLISHED] if options.quick else [PUBLISHED, MEASURED],
            "streams": STREAMS,
            "cycles": CYCLES,
            "offline_requests": OFFLINE_REQUESTS // 2 if options.quick else OFFLINE_REQUESTS,
            "home_requests": HOME_REQUESTS // 2 if options.quick else HOME_REQUESTS,
            "k": config.speculation.k_max,
            "trainer": config.trainer.model_dump(),
        },
        goals=(
            Goal(figure=WITHOUT, at_least=1.1),
            Goal(figure=WITH, at_least=1.0),
            Goal(figure=OF_OFFLINE, at_least=0.9),
            Goal(figure=HOME_KEPT, at_least=0.9),
        ),
    )


def run(options: Options) -> Result:
    """Time steps where asked, record and build what the cache lacks, then replay."""
    plan = narrowed(protocol(options), options)
    notebook = Notebook(options, plan)
    times, timed = {PUBLISHED: published()}, list[Row]()
    if MEASURED in plan.sizes["prices"]:
        timed = jobs.step_times(notebook, plan.sizes["cycles"], options.say)
        times[MEASURED] = ModelledStepTimes.of(timed)
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=jobs.prepare)
    with pool:
        planned = list(_jobs(plan))
        options.say("building models and recording answers, where they are not in the cache")
        for family in dict.fromkeys(job.schedule.family for job in planned):
            pool.submit(_models, family).result()
        for stream in _streams(planned):
            pool.submit(jobs.record_stream, *stream).result()
        asked = [
            _asked(job, price, times[price])
            for arms in (TIMELESS, LOOPS[:2], LOOPS[2:])
            for job in planned
            if job.arm in arms
            for price in (plan.sizes["prices"] if job.arm in LOOPS else [PUBLISHED])
        ]
        return summarise(plan, [*timed, *measured(pool, notebook, asked, options.say, at_once=1)])


def _asked(job: Job, price: str, times: ModelledStepTimes) -> Asked:
    key = {"schedule": job.name, "family": job.schedule.family, "seed": job.seed}
    return Asked({**key, "contender": job.arm, "price": price}, partial(heads_jobs.run, job, times))


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    return report.summarise(plan, rows)


def _models(family: str) -> None:
    FAMILIES[family].models()


def _jobs(plan: Protocol) -> Iterator[Job]:
    for name, tree in plan.sizes["schedules"].items():
        for family in plan.sizes["families"][name]:
            schedule = Schedule.model_validate(tree | {"family": family})
            for seed in plan.sizes["seeds"]:
                for arm in plan.arms:
                    yield Job(
                        name=name,
                        schedule=schedule,
                        seed=seed,
                        arm=arm,
                        offline_requests=plan.sizes["offline_requests"],
                        home_requests=plan.sizes["home_requests"],
                    )


def _streams(planned: Sequence[Job]) -> list[tuple[str, str, int, int]]:
    """(family, domain, block, requests) of all that must be recorded."""
    needed: dict[tuple[str, str, int], int] = {}
    for job in planned:
        family = job.schedule.family
        coming, home = arrivals(job.schedule, job.name, job.seed), FAMILIES[family].home()
        for domain in job.schedule.domains:
            key = family, domain, FIRST_SERVED + job.seed
            extra = job.home_requests if domain == home else 0
            needed[key] = max(needed.get(key, 0), unserved(coming, domain) + extra)
        for domain in foreign(job.schedule):
            needed[family, domain, TRAINING] = job.offline_requests
    return [(*key, num) for key, num in needed.items()]
