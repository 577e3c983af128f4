"""`osd bench net`: whether the net speed-up that a service reports is the one it has.

A service measures its gain against itself, in windows in which nothing speculates. Here that figure
is held against engines side by side: one that speculates, one that has no draft at all. Both ways
of scheduling are measured, as a window without speculation is another thing in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import Estimate, median_ratio

K_MAX = 5
STREAMS = 4
NUM_PAIRS = 3
"""Of engines: two alike differ by a little for as long as they live."""
WINDOWS, SPECULATING, NONE = "net windows", "speculating", "no draft"
REPORTED, PAIRED, OFF = "reported net speed-up", "speculating / no draft", "reported / paired"
COUNTED = "windows that count"
SCHEDULING = {"synchronous": False, "asynchronous": True}


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    from serving.speculation.net import MIN_FOR_INTERVAL

    return Protocol(
        bench="net",
        question="Is the net speed-up that a service reports the one that engines side by side "
        "show?",
        arms=(WINDOWS, SPECULATING, NONE),
        order="The two engines of a pair take turns, now one first, now the other, with the same "
        "prompts, one pair after the other; between turns its requests wait, so that none begins "
        "or ends with a turn. Then the engine with net windows runs without a break: where traffic "
        "began anew, windows would begin with it, and all prompts be read in the same ones.",
        sizes={
            "streams": STREAMS,
            "tokens_per_turn": 1280,
            "tokens_of_windows": 4_000 if options.quick else 20_000,
            "k_max": K_MAX,
            "net_window_seconds": 2.0,
            "net_interval_seconds": 0.5,
            "pairs_of_engines": NUM_PAIRS,
            "num_repeats": 3 if options.quick else 12,
            "scheduling": list(SCHEDULING),
            "target": "the tiny target at the cost of a model of 77 M parameters",
        },
        goals=(
            Goal(figure=OFF, bound="low", at_most=1.0),
            Goal(figure=OFF, bound="high", at_least=1.0),
            Goal(figure=COUNTED, at_least=MIN_FOR_INTERVAL),  # else nothing was reported
        ),
    )


def run(options: Options) -> Result:
    """Measure both ways of scheduling."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.engines import loaded as engines
    from osd.tiny.models import ensure, ensure_cost_shaped

    plan = protocol(options)
    notebook = Notebook(options, plan)
    target, draft, prompts = ensure_cost_shaped(), ensure().draft, engines.home_prompts()
    windows = {name: plan.sizes[name] for name in ("net_interval_seconds", "net_window_seconds")}
    settings: dict[str, dict[str, Any] | None] = {
        WINDOWS: engines.settings(K_MAX) | windows,
        SPECULATING: engines.settings(K_MAX),
        NONE: None,
    }
    kept = []  # the end of one engine in a process is the end of all
    for scheduling, is_async in SCHEDULING.items():

        def load(arm: str, is_async: bool = is_async) -> engines.Loaded:
            given, speculates = settings[arm], settings[arm] is not None
            return engines.Loaded(
                target, draft, k=K_MAX, settings=given, speculates=speculates, is_async=is_async
            )

        pairs = [{arm: load(arm) for arm in (SPECULATING, NONE)} for _ in range(NUM_PAIRS)]
        with_windows = load(WINDOWS)
        kept.append((pairs, with_windows))
        _measure_pairs(notebook, options, scheduling, pairs, prompts)
        _measure_windows(notebook, options, scheduling, with_windows, prompts)
    return summarise(plan, notebook.rows)


def _measure_pairs(
    notebook: Notebook, options: Options, scheduling: str, pairs: Sequence[Any], prompts: Any
) -> None:
    sizes = protocol(options).sizes
    phases = ((STREAMS, sizes["tokens_per_turn"]),)
    for repeat in range(-NUM_PAIRS, sizes["num_repeats"]):  # the first of each pair warm up
        pair, first = repeat % NUM_PAIRS, 1000 * (repeat + NUM_PAIRS)
        for arm in (SPECULATING, NONE)[:: 1 if repeat % 2 else -1]:
            driven = pairs[pair][arm].drive(phases, prompts, first, goes_on=True)
            if repeat >= 0:
                row = {"seconds": driven.seconds, "num_tokens": driven.num_tokens, "pair": pair}
                notebook.add(group=scheduling, arm=arm, repeat=repeat, **row)
        options.say(f"{scheduling}: repeat {repeat + 1} of {sizes['num_repeats']}")


def _measure_windows(
    notebook: Notebook, options: Options, scheduling: str, loaded: Any, prompts: Any
) -> None:
    tokens = protocol(options).sizes["tokens_of_windows"]
    driven = loaded.drive(((STREAMS, tokens),), prompts, 0)
    row = {"seconds": driven.seconds, "num_tokens": driven.num_tokens}
    net = loaded.command("report")["net"]
    notebook.add(group=scheduling, arm=WINDOWS, repeat=0, **row, **net)
    options.say(f"{scheduling}: {net['windows']} windows")


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """The reported speed-up beside the paired one, and their ratio."""
    figures, spread = list[Figure](), []
    for group in plan.sizes["scheduling"]:
        mine = [row for row in rows if row["group"] == group]
        rates = {
            arm: [row["num_tokens"] / row["seconds"] for row in mine if row["arm"] == arm]
            for arm in (SPECULATING, NONE)
        }
        ratios = np.array(rates[SPECULATING]) / np.array(rates[NONE])
        paired = median_ratio(rates[SPECULATING], rates[NONE])
        net = [row for row in mine if row["arm"] == WINDOWS][-1]
        figures.append(Figure.of(group, PAIRED, paired))
        figures.append(Figure(group=group, name=COUNTED, value=net["windows"]))
        spread.append((f"{group}, paired", paired, tuple(ratios)))
        if net["low"] is None:
            continue
        reported = Estimate(value=net["ratio"], low=net["low"], high=net["high"], n=net["windows"])
        spread.append((f"{group}, reported", reported, ()))
        figures += [
            Figure.of(group, REPORTED, reported),
            Figure.of(group, OFF, over(reported, paired)),
        ]
    drawing = Spread(title="speed-up over no draft", unit="", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def over(one: Estimate, other: Estimate) -> Estimate:
    """The ratio of two independent ratios: their intervals add as squares of logarithms."""

    def half(of: Estimate) -> float:
        return math.log(of.high / of.low) / 2

    value, width = one.value / other.value, math.hypot(half(one), half(other))
    return Estimate(
        value=value,
        low=value * math.exp(-width),
        high=value * math.exp(width),
        n=min(one.n, other.n),
    )
