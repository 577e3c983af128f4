"""`osd bench papers_online`: the online curves of OSD (arXiv 2310.07177), in form, on the built-in
models: replays of recorded requests, 4 draft tokens in every step, as in `osd bench drift`.

    new traffic alone       online ─► offline, and over a draft trained on a tenth of the data
    a smooth shift          .8 home to .1, .1 sql to .8: online over the draft that never learns
    two kinds in turn       what is learnt of the second leaves the first as it was

The published run with two kinds serves both all along and trains on one of them at a time. Here a
trainer learns from what is served, so the kinds come one after the other, and the first comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.drift import jobs, names
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Notebook, Options, Protocol, Row, Shape
from benchmarks.result import Figure, Lines, Result
from benchmarks.stats import Estimate, estimate
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Phase, Schedule

ONLINE, OFFLINE, TENTH, FROZEN = "online", "offline", "offline, a tenth", "never learns"
CURVE, SMOOTH, TWO = "new traffic", "smooth shift", "two kinds"
ARMS = {CURVE: (ONLINE, OFFLINE, TENTH), SMOOTH: (ONLINE, FROZEN), TWO: (ONLINE,)}
NEARLY, KEPT = -0.02, -0.05
WINDOW = 24
NUM_PROCESSES = 2
"""No figure is a time."""
CLIMBS = "α online, last quarter less first"
REACHES = "α online less offline, last quarter"
STAYS_BELOW = "α online less a tenth offline, last quarter"
FOLLOWS = "α online less that of the draft that never learns, last quarter"
LEVEL = "α online, last quarter of the shift less first"
LEARNS_SECOND = "α of the second kind, last quarter less first"
KEEPS_FIRST = "α of the first kind, again less before"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    new, num = (288, 192) if options.quick else (576, 384)
    return Protocol(
        bench="papers_online",
        question="Does a draft that learns while it serves come to where training offline brings "
        "it?",
        arms=(ONLINE, OFFLINE, TENTH, FROZEN),
        order="Every arm on the same recorded requests, as if training took no time.",
        sizes={
            "schedules": {name: one.model_dump() for name, one in _schedules(new, num).items()},
            "arms": ARMS,
            "offline_requests": {OFFLINE: new, TENTH: new // 10},
            "seeds": [0] if options.quick else [0, 1, 2],
            "windows": "quarters of a phase, of the first kind before the second as many requests "
            "as when it comes again; intervals over requests, the same places in both windows",
            "moving_window": WINDOW,
        },
        shapes=(
            Shape(figure=CLIMBS, says="acceptance climbs", above=0),
            Shape(figure=REACHES, says="it comes to the offline line", above=NEARLY),
            Shape(figure=STAYS_BELOW, says="a tenth of the data stays below", above=0),
            Shape(figure=FOLLOWS, says="online follows a smooth shift", above=0),
            Shape(figure=LEVEL, says="acceptance stays level over the shift", above=KEPT),
            Shape(figure=LEARNS_SECOND, says="the second kind is learnt", above=0),
            Shape(figure=KEEPS_FIRST, says="the first kind is kept", above=KEPT),
        ),
    )


def _schedules(new: int, num: int) -> dict[str, Schedule]:
    """Of so many requests of new traffic, and of the shift."""
    shift = Phase(
        name="shift",
        requests=num,
        mix={"arithmetic": 0.8, "sql": 0.1, "finance": 0.1},
        mix_at_end={"arithmetic": 0.1, "sql": 0.8, "finance": 0.1},
    )
    turns = tuple(
        Phase(name=name, requests=requests, mix={domain: 1})
        for name, domain, requests in (
            ("first", "sql", num),
            ("second", "finance", num // 2),
            ("first again", "sql", num // 8),
        )
    )
    alone = Phase(name="new", requests=new, mix={"sql": 1})
    phases = {CURVE: (alone,), SMOOTH: (shift,), TWO: turns}
    return {name: Schedule.model_validate({"family": "tiny", "phases": p})
            for name, p in phases.items()}  # fmt: skip


def run(options: Options) -> Result:
    """Every arm of every schedule that is asked for."""
    plan = narrowed(protocol(options), options)
    notebook = Notebook(options, plan)
    FAMILIES["tiny"].models()
    asked = [
        Asked(
            {"schedule": name, "seed": seed, "arm": arm},
            partial(_replay, name, tree, seed, arm, plan.sizes),
        )
        for name, tree in plan.sizes["schedules"].items()
        for seed in plan.sizes["seeds"]
        for arm in ARMS[name]
    ]
    with ProcessPoolExecutor(
        NUM_PROCESSES, mp_context=get_context("spawn"), initializer=jobs.prepare
    ) as pool:
        rows = measured(pool, notebook, asked, options.say, at_once=NUM_PROCESSES)
    return summarise(plan, rows)


def _replay(name: str, tree: Any, seed: int, arm: str, sizes: dict[str, Any]) -> Row:
    contender = {ONLINE: names.OURS, FROZEN: names.FROZEN}.get(arm, names.CEILING)
    num = sizes["offline_requests"].get(arm, 0)
    return jobs.run_one(name, Schedule.model_validate(tree), seed, contender, num)


# ------------------------------------------------------------------------------------------ summary


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """α by quarters of each phase, and what the published curves say of them."""
    figures, drawings = list[Figure](), list[Lines]()
    for name, tree in plan.sizes["schedules"].items():
        schedule = Schedule.model_validate(tree)
        arms = {
            arm: found
            for arm in ARMS[name]
            if (found := [r for r in rows if (r["schedule"], r["arm"]) == (name, arm)])
        }
        if len(arms) < len(ARMS[name]):
            continue
        for arm, mine in arms.items():
            figures += _quarters(f"{name}, {arm}", schedule, mine)
        figures += _shapes(name, schedule, arms)
        drawings.append(_drawing(name, arms))
    return Result(protocol=plan, figures=tuple(figures), drawings=tuple(drawings))


def _quarters(group: str, schedule: Schedule, rows: Sequence[Row]) -> Iterator[Figure]:
    for number, phase in enumerate(schedule.phases):
        for quarter in range(4):
            counts = window(rows, *quarter_of(schedule, number, quarter))
            name = f"α, {phase.name}, quarter {quarter + 1}"
            yield Figure.of(group, name, difference(counts, None))


def _shapes(name: str, schedule: Schedule, arms: dict[str, list[Row]]) -> Iterator[Figure]:
    def of(arm: str, phase: int, quarter: int) -> np.ndarray:
        return window(arms[arm], *quarter_of(schedule, phase, quarter))

    end = of(ONLINE, 0, 3)
    if name == CURVE:
        yield Figure.of(name, CLIMBS, difference(end, of(ONLINE, 0, 0)))
        yield Figure.of(name, REACHES, difference(end, of(OFFLINE, 0, 3)))
        yield Figure.of(name, STAYS_BELOW, difference(end, of(TENTH, 0, 3)))
    if name == SMOOTH:
        yield Figure.of(name, FOLLOWS, difference(end, of(FROZEN, 0, 3)))
        yield Figure.of(name, LEVEL, difference(end, of(ONLINE, 0, 0)))
    if name == TWO:
        yield Figure.of(name, LEARNS_SECOND, difference(of(ONLINE, 1, 3), of(ONLINE, 1, 0)))
        _, end_of_first, start, stop = schedule.bounds
        before = window(arms[ONLINE], end_of_first - (stop - start), end_of_first)
        again = window(arms[ONLINE], start, stop)
        yield Figure.of(name, KEEPS_FIRST, difference(again, before))


def quarter_of(schedule: Schedule, phase: int, quarter: int) -> tuple[int, int]:
    """First request of a quarter of a phase, and its end."""
    start, stop = schedule.bounds[phase : phase + 2]
    size = stop - start
    return start + size * quarter // 4, start + size * (quarter + 1) // 4


def window(rows: Sequence[Row], start: int, stop: int) -> np.ndarray:
    """int [requests, 2]: draft tokens accepted and tested in requests [start, stop), of all
    seeds."""
    names_ = "accepted", "tested"
    return np.concatenate(
        [np.array([row["counts"][n][start:stop] for n in names_]).T for row in rows]
    )


def difference(one: np.ndarray, other: np.ndarray | None) -> Estimate:
    """α of these requests less that of as many others, None = 0; resampled by request, the same
    places in both."""
    assert other is None or len(other) == len(one), "windows of one length"

    def alpha(counts: np.ndarray, chosen: np.ndarray, axis: int) -> np.ndarray:
        accepted, tested = np.moveaxis(counts[chosen].sum(axis), -1, 0)
        return np.asarray(accepted / np.maximum(tested, 1))

    def statistic(chosen: np.ndarray, axis: int) -> np.ndarray:
        which = chosen.astype(int)
        found = alpha(one, which, axis)
        return found if other is None else found - alpha(other, which, axis)

    return estimate(np.arange(len(one)), statistic)


def _drawing(name: str, arms: dict[str, list[Row]]) -> Lines:
    lines = {}
    for arm, rows in arms.items():
        counts = sum(window([row], 0, len(row["counts"]["tested"])) for row in rows)
        sums = np.apply_along_axis(np.convolve, 0, counts, np.ones(WINDOW), "valid")
        alpha = sums[:, 0] / np.maximum(sums[:, 1], 1)
        lines[arm] = tuple((float(i + WINDOW / 2), float(a)) for i, a in enumerate(alpha))
    return Lines(title=name, x_label="requests", y_label="α, moving", lines=lines)
