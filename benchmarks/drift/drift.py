"""`osd bench drift`: which contender proposes best when the traffic changes, and which forgets.

    configs/drift/NAME.yaml ─► requests ─► recorded once (answers and distributions, cached)
      ─► replayed for each contender ─► counts per request ─► figures

All contenders meet the same requests of eight schedules. No contender is told the domain of a
request, and no prompt occurs twice. With greedy drafting the replay is exact: a draft token is
accepted where it equals the served one (`benchmarks/replays/recording.py`). Speeds follow from the
steps of a run and the measured times of such steps (`benchmarks/replays/step_times.py`). Training
takes no time here, but its CPU seconds are counted; `osd bench drift_speed` measures its cost while
serving.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from benchmarks.drift import jobs, names
from benchmarks.drift.contest import LAST
from benchmarks.drift.modelled import GOALS
from benchmarks.drift.report import TO_REACH, WINDOW, summarise
from benchmarks.record import Goal, Notebook, Options, Protocol
from benchmarks.replays.step_times import CYCLES, STREAMS, WIDTHS, ModelledStepTimes, measure
from benchmarks.result import Result
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, TRAINING
from benchmarks.traffic.schedule import Schedule, arrivals, read_all

__all__ = ["protocol", "run", "summarise"]

NUM_PROCESSES = 2
QUICK_ARMS = (names.FROZEN, names.CEILING, names.NGRAM, next(iter(names.OSD_PUBLISHED)), names.OURS)
QUICK_SCHEDULE, QUICK_PHASES = "sharp", (96, 240)
CEILING_REQUESTS, QUICK_CEILING_REQUESTS = 384, 192
"""Requests per domain the ceiling is trained on."""
SUFFIX_PACKAGE, SUFFIX_MODULE = "arctic-inference", "arctic_inference"
"""What vLLM needs for suffix decoding too. It changes vLLM by a plugin, so it is no part of this
project's environment: `pip install --target DIRECTORY --no-deps arctic-inference==0.1.1`, then
PYTHONPATH=DIRECTORY for this bench alone."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    schedules = read_all()
    chosen = (
        {QUICK_SCHEDULE: schedules[QUICK_SCHEDULE].shortened(QUICK_PHASES)}
        if options.quick
        else schedules
    )
    arms = QUICK_ARMS if options.quick else names.ALL
    without = () if importlib.util.find_spec(SUFFIX_MODULE) else (names.SUFFIX, names.SUFFIX_LONG)
    left_out = {arm: f"{SUFFIX_PACKAGE} is not installed" for arm in arms if arm in without}
    config = jobs.base_config()
    return Protocol(
        bench="drift",
        question="Whose draft tokens are accepted when the traffic changes, how soon after, and "
        "what is forgotten?",
        arms=tuple(arm for arm in arms if arm not in left_out),
        order="Every contender on the same recorded requests, as if training took no time; two at "
        "a time.",
        sizes={
            "schedules": {name: schedule.model_dump() for name, schedule in chosen.items()},
            "seeds": [0] if options.quick else [0, 1, 2],
            "left_out": left_out,
            "k": config.speculation.k_max,
            "trainer": config.trainer.model_dump(),
            "gate": config.gate.model_dump(),
            "capture": config.capture.model_dump(),
            "moving_window": WINDOW,
            "last_requests": LAST,
            "share_of_the_ceiling_to_reach": TO_REACH,
            "ceiling_requests_per_domain": QUICK_CEILING_REQUESTS
            if options.quick
            else CEILING_REQUESTS,
            "n_gram": {
                names.NGRAM: "vLLM's defaults: 5 and 5",
                names.NGRAM_TUNED: names.LOOKUP_TUNED,
            },
            "step_times": {
                "streams": STREAMS,
                "widths": WIDTHS,
                "cycles": 0 if options.quick else CYCLES,
            },
            "OSD": "the better of its two published pairs of rate and interval, by α over all "
            "requests",
        },
        goals=tuple(Goal(figure=figure, at_least=least) for figure, least in GOALS.items()),
    )


def run(options: Options) -> Result:
    """Record, train ceilings, then run every contender over every schedule."""
    return replay(options, protocol(options))


def replay(options: Options, plan: Protocol) -> Result:
    """What a protocol of this bench says, whatever its schedules, seeds and arms."""
    notebook = Notebook(options, plan)
    for arm, reason in plan.sizes["left_out"].items():
        options.say(f"left out: {arm}: {reason}")
    schedules = {
        name: Schedule.model_validate(tree) for name, tree in plan.sizes["schedules"].items()
    }
    for family in dict.fromkeys(schedule.family for schedule in schedules.values()):
        FAMILIES[family].models()  # built by one process, with its progress to be seen
    times = None
    if num_cycles := plan.sizes["step_times"]["cycles"]:
        options.say("timing steps of the cost-shaped target")
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=jobs.prepare
        ) as alone:
            timed = alone.submit(measure, num_cycles).result()
        for row in timed:
            notebook.add(**row)
        times = ModelledStepTimes.of(timed)
    num = plan.sizes["ceiling_requests_per_domain"]
    with ProcessPoolExecutor(
        NUM_PROCESSES, mp_context=get_context("spawn"), initializer=jobs.prepare
    ) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        _wait(
            [
                pool.submit(jobs.record_stream, *stream)
                for stream in _streams(schedules, plan.sizes["seeds"], num)
            ]
        )
        options.say(
            "training the ceilings, where they are not in the cache, and running the contenders"
        )
        domains = {
            (schedule.family, tuple(sorted(schedule.domains))) for schedule in schedules.values()
        }
        ceilings: list[Future[Any]] = [
            pool.submit(jobs.ceiling, *one, num) for one in sorted(domains)
        ]
        found = [
            pool.submit(jobs.run_one, name, schedule, seed, arm, num, times)
            for arm in sorted(
                plan.arms, key=names.CEILING.__eq__
            )  # last: nobody is to wait for what is in training
            for name, schedule in schedules.items()
            for seed in plan.sizes["seeds"]
        ]
        runs = (done.result() for done in _as_they_end([*ceilings, *found]) if done not in ceilings)
        for number, row in enumerate(runs, 1):
            notebook.add(**row)
            options.say(
                f"{number} of {len(found)}: {row['schedule']}, seed {row['seed']}, "
                f"{row['contender']}"
            )
    return summarise(plan, notebook.rows)


def _streams(
    schedules: dict[str, Schedule], seeds: Sequence[int], ceiling_requests: int
) -> list[tuple[str, str, int, int]]:
    """(family, domain, block, requests) of all that must be recorded."""
    needed: dict[tuple[str, str, int], int] = {}
    for name, schedule in schedules.items():
        for domain in schedule.domains:
            needed.setdefault((schedule.family, domain, TRAINING), ceiling_requests)
        for seed in seeds:
            for arrival in arrivals(schedule, name, seed):
                key = schedule.family, arrival.domain, FIRST_SERVED + seed
                needed[key] = max(needed.get(key, 0), arrival.index + 1)
    return [(*key, num) for key, num in needed.items()]


def _wait(futures: Sequence[Future[Any]]) -> None:
    for done in _as_they_end(futures):
        done.result()


def _as_they_end(futures: Sequence[Future[Any]]) -> Iterator[Future[Any]]:
    """What raises keeps the rest from being started."""
    for done in as_completed(futures):
        if done.exception() is not None:
            for future in futures:
                future.cancel()
        yield done
