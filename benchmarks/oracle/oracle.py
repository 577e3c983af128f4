"""`osd bench oracle`: how near the control of speculation comes to who knows what will be accepted.

    recorded requests ─► the service's own control, replayed (`benchmarks/replays/closed_loop.py`)
                     ├─► every fixed k of the draft or the memory, a simple adaptive rule
                     ├─► where answers are drawn: who knows the odds, or pays to see them
                     └─► the oracles: exact lengths of one proposer; of both, chosen backwards

The draft never learns: this is the service with its trainer off. All are charged alike: measured
times of a step at each batch, and a GPU's published prices. The control alone pays for its probes,
its noise, and a draft model that catches up after it slept. The bound takes batches of equal
requests; the control's are of what is under way, and one request that asks the draft model makes
all of them wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.drift import jobs
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES
from benchmarks.drift.memory import schedules_of, streams_of
from benchmarks.learning.online_report import MEASURED, PUBLISHED
from benchmarks.oracle import jobs as oracle_jobs
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.step_times import ModelledStepTimes, measure, published
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import DIRECTORY, read

SCHEDULES = {"steady": (288,), "sharp": (96, 288), "interleaved": (288,)}
"""Schedule of generated traffic -> requests of each phase."""
LANGUAGES = {"prose/home-and-de": (96, 288), "prose/interleaved": (288,)}
"""The same of prose, whose models and recordings take an hour to build."""
QUICK_REQUESTS = (32, 64)
BATCHES = (1, 4, 16)
CYCLES, NUM_STEPS = 4, 12
"""Bursts of each engine whose steps are timed, and their length."""
CLOSED, CONTROL, BEST_FIXED = "share of the gap closed", "control", "best fixed choice"
LEAST_CLOSED = 0.5
ALL_TRAFFIC = "all schedules"


def protocol(options: Options, traffic: dict[str, tuple[int, ...]] = SCHEDULES) -> Protocol:
    """What will be measured. `traffic`: schedule -> requests of each phase."""
    given = jobs.base_config().speculation
    return Protocol(
        bench="oracle",
        question="How much of the gap between the best fixed choice and an oracle is closed?",
        arms=(BEST_FIXED, CONTROL, "oracles"),
        order="All on the same recorded requests, two schedules at a time.",
        sizes={
            "schedules": {
                name: read(DIRECTORY / f"{name}.yaml")
                .shortened(QUICK_REQUESTS[: len(requests)] if options.quick else requests)
                .model_dump()
                for name, requests in traffic.items()
            },
            "seeds": [0] if options.quick else [0, 1, 2],
            "prices": [PUBLISHED] if options.quick else [PUBLISHED, MEASURED],
            "batches": list(BATCHES),
            "k_max": given.k_max,
            "memory_k_max": given.memory_k_max,
            "cycles": CYCLES,
            "steps_of_a_burst": NUM_STEPS,
        },
        goals=(Goal(figure=CLOSED, at_least=LEAST_CLOSED),),
    )


def run(options: Options, traffic: dict[str, tuple[int, ...]] = SCHEDULES) -> Result:
    """Time steps where asked, record where the cache lacks it, then replay."""
    plan = protocol(options, traffic)
    notebook = Notebook(options, plan)
    schedules, spawn = schedules_of(plan), get_context("spawn")
    for family in dict.fromkeys(schedule.family for schedule in schedules.values()):
        FAMILIES[family].models()
    times = {batch: {PUBLISHED: _published(batch)} for batch in plan.sizes["batches"]}
    if MEASURED in plan.sizes["prices"]:
        for batch, of_batch in times.items():
            options.say(f"timing steps of {batch} requests of the cost-shaped target")
            with ProcessPoolExecutor(1, mp_context=spawn, initializer=jobs.prepare) as process:
                timed = process.submit(measure, CYCLES, batch, NUM_STEPS).result()
            for row in timed:
                notebook.add(**row)
            of_batch[MEASURED] = ModelledStepTimes.of(timed, batch)
    runs = [(name, seed) for name in schedules for seed in plan.sizes["seeds"]]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=jobs.prepare) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        for stream in [pool.submit(jobs.record_stream, *s) for s in streams_of(schedules, runs)]:
            stream.result()
        found = [
            pool.submit(oracle_jobs.run, name, schedules[name], seed, of_batch)
            for of_batch in times.values()
            for name, seed in runs
        ]
        for number, done in enumerate(found, 1):
            for row in done.result():
                notebook.add(**row)
            options.say(
                f"{number} of {len(found)}: {row['schedule']}, seed {row['seed']}, "
                f"batch {row['batch']}"
            )
    return summarise(plan, notebook.rows)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows: means over the seeds of the traffic; of each schedule, and of all
    together, for which one choice is fixed."""
    figures: list[Figure] = []
    for price in plan.sizes["prices"]:
        for batch in plan.sizes["batches"]:
            key = {"batch": batch, "price": price}
            mine = [row for row in rows if row.items() >= key.items()]
            for name in plan.sizes["schedules"]:
                of_one = [row for row in mine if row["schedule"] == name]
                figures += _figures(f"{name}, batch {batch}, {price}", of_one, plan.sizes)
            figures += _figures(f"{ALL_TRAFFIC}, batch {batch}, {price}", _pooled(mine), plan.sizes)
    return Result(protocol=plan, figures=tuple(figures))


def _pooled(rows: Sequence[Row]) -> list[Row]:
    """A row a seed: means over its schedules."""

    def mean(of_seed: Sequence[Row], key: str) -> dict[str, float]:
        return {
            name: sum(row[key][name] for row in of_seed) / len(of_seed) for name in rows[0][key]
        }

    pooled = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        of_seed = [row for row in rows if row["seed"] == seed]
        control = sum(row["control"] for row in of_seed) / len(of_seed)
        speeds, parts = mean(of_seed, "speeds"), mean(of_seed, "parts")
        pooled.append({"control": control, "speeds": speeds, "parts": parts})
    return pooled


def _figures(where: str, rows: Sequence[Row], sizes: dict[str, Any]) -> Iterator[Figure]:
    from benchmarks.replays.closed_loop import DRAFT, MEMORY
    from osd.evaluate.bound.speeds import ALL, NONE, best_fixed, share_closed

    if not rows:
        return
    most = {DRAFT: sizes["k_max"], MEMORY: sizes["memory_k_max"]}
    group = f"{where}: speed over no speculation"
    for rule in rows[0]["speeds"]:
        if rule != NONE:
            yield mean_with_interval(group, rule, [row["speeds"][rule] for row in rows])
    # One choice for all seeds: who fixes k does not know what comes.
    means = {rule: sum(row["speeds"][rule] for row in rows) for rule in rows[0]["speeds"]}
    chosen = best_fixed(means, most)
    fixed = [row["speeds"][chosen] for row in rows]
    yield mean_with_interval(group, f"{BEST_FIXED}: {chosen}", fixed)
    yield mean_with_interval(group, CONTROL, [row["control"] for row in rows])
    group = f"{where}: the control's distance to the oracle"
    closed = [
        share_closed(row["control"], one, row["speeds"][ALL])
        for row, one in zip(rows, fixed, strict=True)
    ]
    known = [share for share in closed if share is not None]
    if known:
        yield mean_with_interval(group, CLOSED, known)
    yield from _with_foresight(group, rows, fixed)
    of_oracle = [row["control"] / row["speeds"][ALL] for row in rows]
    yield mean_with_interval(group, "control / oracle of all proposers", of_oracle)
    for part in rows[0]["parts"]:
        shares = [row["parts"][part] for row in rows]
        yield mean_with_interval(group, f"time over the oracle's: {part}", shares, "of it")


def _with_foresight(group: str, rows: Sequence[Row], fixed: Sequence[float]) -> Iterator[Figure]:
    """How much of the gap is closed by who knows more than any control can, and not what will be
    drawn."""
    from osd.evaluate.bound.foresight import KNOWS, PAYS
    from osd.evaluate.bound.speeds import ALL, share_closed

    for who in (KNOWS, PAYS):
        if who not in rows[0]["speeds"]:
            continue
        shares = [
            share_closed(row["speeds"][who], one, row["speeds"][ALL])
            for row, one in zip(rows, fixed, strict=True)
        ]
        known = [share for share in shares if share is not None]
        if known:
            yield mean_with_interval(group, f"{CLOSED}, {who}", known)


def _published(batch: int) -> ModelledStepTimes:
    return published(num_kv_tokens=1024 * batch, batch=batch)
