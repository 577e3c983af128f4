"""`osd bench where_it_pays`: how sure a target has to be, and how cheap a draft, for a draft that
learns to make a service with a memory faster.

One schedule of natural prose (English, German, English again), answered at several temperatures:
the lower, the likelier the likeliest token. Replays under the service's own control at the
published price of verification on an H100, at which a draft costs several shares of a step. The
service with its trainer off, memory included, is the reference, as in `online.py`. A target as
small as this one repeats itself more than a large one does; what learning brings to a service
without a memory is the other end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np

from benchmarks.drift import jobs, names
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.drift import NUM_PROCESSES
from benchmarks.drift.memory import streams_of
from benchmarks.learning.online import SCHEDULES
from benchmarks.learning.online_report import LAST_THIRD, OFF, speed
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.recording import Recorded
from benchmarks.replays.step_times import STREAMS, ModelledStepTimes, published
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import AT_TEMPERATURE, FAMILIES, FIRST_SERVED
from benchmarks.traffic.schedule import Schedule, read_all

SCHEDULE, PHASE = "home-and-de", 1
"""Where German comes."""
SHARES = (0.05, 0.14, 0.3)
"""What the drafts of a step add, of a step without any: 0.3 as the public simulator has a target of
8 B with EAGLE; 0.14 by the share published of one of 70 B."""
TIMED = (OFF, names.SERVED, names.MEMORY, names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP)
ALPHA = (names.FROZEN, names.OURS)
"""Four tokens of the draft in every step."""
OVER_NONE = "decode speed over no speculation, last third"
WITHOUT_MEMORY = "the same without a memory"
LIKELIEST, LOOPS = "mean probability of the likeliest token", "answers that loop"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="where_it_pays",
        question="How sure a target and how cheap a draft make learning online pay?",
        arms=(*TIMED, *ALPHA),
        order="Every arm on the same recorded requests, two at a time.",
        sizes={
            "schedule": read_all(SCHEDULES)[SCHEDULE].model_dump(),
            "temperatures": sorted(AT_TEMPERATURE),
            "shares": SHARES,
            "seeds": [0] if options.quick else [0, 1, 2],
            "streams": STREAMS,
        },
        goals=(Goal(figure=LAST_THIRD, at_least=1.10),),
    )


def run(options: Options) -> Result:
    """Record where the cache lacks it, then replay."""
    plan = narrowed(protocol(options), options)
    notebook = Notebook(options, plan)
    FAMILIES[AT_TEMPERATURE[plan.sizes["temperatures"][0]]].models()
    spawn = get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=spawn, initializer=jobs.prepare) as pool:
        options.say("recording the target's answers, where they are not in the cache")
        for stream in [pool.submit(jobs.record_stream, *one) for one in _streams(plan)]:
            stream.result()
        asked = [*_of_targets(plan), *(_asked(plan, *one) for one in _runs(plan))]
        return summarise(plan, measured(pool, notebook, asked, options.say, at_once=NUM_PROCESSES))


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the raw rows."""
    figures = list[Figure]()
    for temperature in _temperatures(plan):
        mine = [row for row in rows if row["temperature"] == temperature]
        group = f"T = {temperature}"
        for name in (LIKELIEST, LOOPS):
            figures += [mean_with_interval(group, name, [r[name]]) for r in mine if name in r]
        start, stop = _schedule(plan).last_third(PHASE)
        for arm in (arm for arm in ALPHA if arm in plan.arms):
            values = [curve.alpha(start, stop) for curve in _curves(mine, arm, None)]
            figures.append(mean_with_interval(f"{group}: α, last third", arm, values))
        for share in plan.sizes["shares"]:
            figures += _cell(f"{group}, a draft of {share:.0%} of a step", plan, mine, share)
    return Result(protocol=plan, figures=tuple(figures))


def _cell(group: str, plan: Protocol, rows: Sequence[Row], share: float) -> Iterator[Figure]:
    start, stop = _schedule(plan).last_third(PHASE)
    measure = partial(speed, start=start, stop=stop)
    speeds = {
        arm: [measure(curve) for curve in _curves(rows, arm, share)]
        for arm in TIMED
        if arm in plan.arms
    }
    without = price(share).tokens_per_second_without()
    for arm, values in speeds.items():
        yield mean_with_interval(f"{group}: {OVER_NONE}", arm, [one / without for one in values])
    for figure, arm, rival in (
        (LAST_THIRD, names.SERVED, OFF),
        (WITHOUT_MEMORY, names.LEARNING_DRAFT_LOOP, names.DRAFT_LOOP),
    ):
        if {arm, rival} <= speeds.keys():
            ratios = [a / b for a, b in zip(speeds[arm], speeds[rival], strict=True)]
            yield mean_with_interval(group, figure, ratios)


def price(share: float) -> ModelledStepTimes:
    """Verification as published; drafts at that share of a step without any."""
    times = published()
    return replace(times, draft_s=share * times.step(0, drafts=False))


def likeliest(requests: Sequence[Recorded]) -> float:
    """The mean probability of the likeliest token at the temperature of the answers, among those
    recorded."""
    tempered = [one.target_logprobs.astype(np.float64) / one.temperature for one in requests]
    shares = [np.exp(rows[:, 0] - np.logaddexp.reduce(rows, axis=1)) for rows in tempered]
    return float(np.concatenate(shares).mean())


def _of_targets(plan: Protocol) -> list[Asked]:
    seed = plan.sizes["seeds"][0]
    return [
        Asked(
            {"temperature": one, "of": "target", "seed": seed}, partial(_sureness, plan, one, seed)
        )
        for one in _temperatures(plan)
    ]


def _sureness(plan: Protocol, temperature: float, seed: int) -> Row:
    """How sure the target is in the new phase, and how often it goes in circles."""
    from benchmarks.natural.report import is_loop
    from benchmarks.traffic.recordings import take

    phase = _schedule(plan).phases[PHASE]
    (domain,) = phase.mix
    family = AT_TEMPERATURE[temperature]
    requests = take(family, domain, FIRST_SERVED + seed, phase.requests)
    loops = float(np.mean([is_loop(one.output_ids.tolist()) for one in requests]))
    return {LIKELIEST: likeliest(requests), LOOPS: loops}


def _asked(plan: Protocol, temperature: float, seed: int, arm: str, share: float | None) -> Asked:
    key = {"temperature": temperature, "share": share, "seed": seed, "contender": arm}
    times = None if share is None else price(share)
    schedule = _answered(plan, temperature)
    return Asked(key, partial(jobs.run_one, SCHEDULE, schedule, seed, arm, 0, times))


def _runs(plan: Protocol) -> Iterator[tuple[float, int, str, float | None]]:
    """(temperature, traffic seed, arm, share)"""
    for seed in plan.sizes["seeds"]:
        for temperature in _temperatures(plan):
            yield from ((temperature, seed, arm, None) for arm in plan.arms if arm in ALPHA)
            for share in plan.sizes["shares"]:
                yield from ((temperature, seed, arm, share) for arm in plan.arms if arm in TIMED)


def _streams(plan: Protocol) -> list[tuple[str, str, int, int]]:
    """(family, domain, block, requests) of all that must be recorded."""
    runs = [(SCHEDULE, seed) for seed in plan.sizes["seeds"]]
    return [
        stream
        for temperature in _temperatures(plan)
        for stream in streams_of({SCHEDULE: _answered(plan, temperature)}, runs)
    ]


def _temperatures(plan: Protocol) -> list[float]:
    return list(plan.sizes["temperatures"])


def _schedule(plan: Protocol) -> Schedule:
    return Schedule.model_validate(plan.sizes["schedule"])


def _answered(plan: Protocol, temperature: float) -> Schedule:
    return _schedule(plan).model_copy(update={"family": AT_TEMPERATURE[temperature]})


def _curves(rows: Sequence[Row], arm: str, share: float | None) -> list[Curve]:
    wanted = {"contender": arm, "share": share}
    return [Curve.from_row(row) for row in rows if wanted.items() <= row.items()]
