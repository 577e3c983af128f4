"""`osd bench papers_rates`: the rate sweep of TurboSpec (arXiv 2406.14066), in form.

    Poisson arrivals at rising rates ─► no speculation, each fixed k, or the service's own control
        papers_rates         modelled: a GPU's published prices of a step, the real control
        papers_rates_live    here: real engines, their clocks their CPU time

What is compared is the mean latency of a request, from its arrival to its last token: what the
paper compares, and what a user waits for. Tokens per second of busy time would not do: at a low
rate whoever is faster has fewer requests at once, so its steps carry fewer tokens, and it would
look slower. Loads are shares of what the engine can serve without speculation, so that this arm
never falls behind for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.drift import jobs
from benchmarks.record import Goal, Notebook, Options, Protocol, Row, Shape
from benchmarks.result import Figure, Lines, Result
from benchmarks.stats import estimate, median_ratio

FIXED = (0, 1, 2, 4)
"""Draft tokens in every step; 0 = no speculation."""
AUTO, NONE = "auto", 0
MODELLED, HERE = "modelled, H100", "here, CPU seconds"
OVER_NONE, OVER_BEST = "speed of auto / no speculation", "speed of auto / best fixed k"
FALLS = "best fixed k, lowest load less highest"
LEAST = 0.97


def protocol(options: Options, where: str = MODELLED) -> Protocol:
    """What will be measured, modelled or here."""
    return Protocol(
        bench="papers_rates" if where == MODELLED else "papers_rates_live",
        question="Does the best number of draft tokens fall as requests come faster, and does the "
        "control follow it?",
        arms=(*(f"k = {k}" for k in FIXED), AUTO),
        order="All arms over the same requests and arrivals, one after the other."
        if where == MODELLED
        else "An engine for each arm, on the same prompts and arrivals, side by side: whose clock "
        "is furthest behind takes some steps.",
        sizes={
            "where": where,
            "compared": "mean latency of a request, from arrival to last token; speed is its "
            "inverse",
            "load": "arrivals, as a share of what the engine serves without speculation, full",
            "best fixed k": "in each draw the one that is fastest in all others; 0 among them",
            "intervals": "over draws of requests and arrivals",
            "fixed": FIXED,
            **(_modelled if where == MODELLED else _live)(options.quick),
        },
        goals=(Goal(figure=OVER_NONE, at_least=LEAST), Goal(figure=OVER_BEST, at_least=LEAST)),
        shapes=(
            Shape(figure=FALLS, says="the best fixed k falls with load", above=0),
            Shape(figure=OVER_NONE, says=f"auto is above {LEAST} of none", above=LEAST),
            Shape(figure=OVER_BEST, says=f"auto is above {LEAST} of the best k", above=LEAST),
        ),
    )


def _modelled(quick: bool) -> dict[str, Any]:
    from benchmarks.engines.loaded import NOISE

    return {
        "drafts": {name: NOISE[name] for name in (("middling", "useless") if quick else NOISE)},
        "loads": (0.02, 0.1, 0.3, 0.6, 0.9),
        "draws": 3 if quick else 8,
        "seconds": 3 if quick else 8,
        "num_recorded": 96,
        "not modelled": "what a decision takes; the prompt a draft reads",
    }


def _live(quick: bool) -> dict[str, Any]:
    from benchmarks.engines.loaded import MAX_STREAMS, NOISE

    return {
        "drafts": {name: NOISE[name] for name in (("middling",) if quick else NOISE)},
        "loads": (0.2, 0.9) if quick else (0.1, 0.3, 0.6, 0.9),
        "draws": 3 if quick else 8,
        "requests": 16 if quick else 48,
        "output_tokens": 24 if quick else 48,
        "most at once": MAX_STREAMS,
        "full_tokens": 384,
        "target": "the tiny target at the cost of a model of 77 M parameters",
    }


def run(options: Options) -> Result:
    """Simulate."""
    from benchmarks.traffic.family import FAMILIES

    plan = protocol(options)
    notebook = Notebook(options, plan)
    FAMILIES["tiny"].models()
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=jobs.prepare
    ) as process:
        for draft, noise in plan.sizes["drafts"].items():
            for draw in range(plan.sizes["draws"]):
                for row in process.submit(_simulate, noise, draft, draw, plan.sizes).result():
                    notebook.add(**row)
                options.say(f"{draft} draft: draw {draw + 1} of {plan.sizes['draws']}")
    return summarise(plan, notebook.rows)


def _simulate(noise: float, draft: str, draw: int, sizes: dict[str, Any]) -> list[Row]:
    from benchmarks.papers.open_loop import simulate

    return simulate(noise, draft, draw, sizes)


# ------------------------------------------------------------------------------------------ summary


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Of each draft: latencies by load, auto over the others, and how the best fixed k moves."""
    figures, drawings = list[Figure](), list[Lines]()
    for draft in dict.fromkeys(row["draft"] for row in rows):
        mine = [row for row in rows if row["draft"] == draft]
        group = f"{plan.sizes['where']}, {draft} draft"
        loads = list(dict.fromkeys(row["share"] for row in mine))
        cells = {load: latencies([r for r in mine if r["share"] == load]) for load in loads}
        for load, cell in cells.items():
            of_load = [row for row in mine if row["share"] == load]
            figures += _figures(f"{group}, load {load:g}", cell, of_load)
        first, last = (bests(cells[load]) for load in (loads[0], loads[-1]))
        fall = [a - b for a, b in zip(first, last, strict=True)]
        figures.append(Figure.of(group, FALLS, estimate(fall, np.mean)))
        drawings.append(_drawing(group, cells))
    return Result(protocol=plan, figures=tuple(figures), drawings=tuple(drawings))


Cell = dict[int | str, list[float]]
"""Arm -> mean latency in each draw."""


def latencies(rows: Sequence[Row]) -> Cell:
    """Of one load. Draws that were cut off are left out."""
    draws: dict[int, dict[int | str, float]] = {}
    for row in rows:
        draws.setdefault(row["draw"], {})[row["arm"]] = row["latency_s"]
    whole = [draw for draw in draws.values() if len(draw) == len(FIXED) + 1]
    return {arm: [draw[arm] for draw in whole] for arm in (*FIXED, AUTO)}


def bests(cell: Cell) -> list[int]:
    """The fastest fixed k in each draw."""
    return [min(FIXED, key=lambda k: cell[k][draw]) for draw in range(len(cell[AUTO]))]


def best_of_others(cell: Cell) -> list[int]:
    """For each draw the fixed k that is fastest in the mean over the others, so that none is picked
    by luck."""
    num = len(cell[AUTO])
    others = [[i for i in range(num) if i != draw or num == 1] for draw in range(num)]
    return [
        min(FIXED, key=lambda k: float(np.mean([np.log(cell[k][i]) for i in some])))
        for some in others
    ]


def _figures(group: str, cell: Cell, rows: Sequence[Row]) -> Iterator[Figure]:
    for arm, seconds in cell.items():
        name = f"latency, {arm if arm == AUTO else f'k = {arm}'}"
        yield Figure.of(group, name, estimate(1000 * np.array(seconds)), "ms")
    told = [row["k"] for row in rows if row["arm"] == AUTO and "k" in row]
    if told:
        yield Figure.of(group, "draft tokens per step and request, auto", estimate(told))
    flying = [row["in_flight"] for row in rows if row["arm"] == NONE and "in_flight" in row]
    if flying:
        yield Figure.of(group, "requests at once, no speculation", estimate(flying))
    yield Figure.of(group, "best fixed k", estimate(bests(cell), np.mean))
    yield Figure.of(group, OVER_NONE, median_ratio(cell[NONE], cell[AUTO]))
    best = [cell[k][draw] for draw, k in enumerate(best_of_others(cell))]
    yield Figure.of(group, OVER_BEST, median_ratio(best, cell[AUTO]))


def _drawing(group: str, cells: dict[float, Cell]) -> Lines:
    arms = [arm for arm in (*FIXED, AUTO) if arm != NONE]
    return Lines(
        title=f"Speed over no speculation: {group}",
        x_label="load",
        y_label="speed",
        lines={
            arm if arm == AUTO else f"k = {arm}": tuple(
                (load, median_ratio(cell[NONE], cell[arm]).value) for load, cell in cells.items()
            )
            for arm in arms
        },
    )
