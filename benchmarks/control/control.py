"""`osd bench control`: whether the closed loop finds the best speculation, and what it costs.

For three drafts and four loads, every fixed choice and `auto` take turns on the same prompts. The
best fixed choice of a cell is picked on half of the repeats and scored on the others, so that it is
not picked by luck. `auto` runs in separate engines, which learn only from their own steps. Engines
schedule synchronously; `asynchronous.py` is the same with asynchronous ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import Estimate, estimate, median_ratio

K_MAX = 5
FIXED: dict[str, tuple[str, int]] = {
    "k = 0": ("off", 0),
    "k = 1": ("draft", 1),
    "k = 3": ("draft", 3),
    "k = 5": ("draft", 5),
    "memory, 8": ("memory", 8),
}
AUTO, NONE, STATIC = "auto", "no speculation", "vLLM, k = 3"
CONTROLLED = "controlled, k = 3"
COST_GROUP = "good draft, cost of control"
ALL = "all cells"
MEAN_BEST, MEAN_SINGLE = (
    "auto / best fixed of each cell, geometric mean",
    "auto / best single fixed, geometric mean",
)
MEAN_TABLE = "auto / best table of k by batch, geometric mean"
BEST, OVER_NONE, COST, CPU = (
    "auto / best fixed",
    "auto / no speculation",
    "controlled / vLLM's own, same k",
    "CPU seconds per token, auto / best fixed",
)
LOW, MOST_CPU = 0.90, 1.03
EITHER = f"cells at {LOW} of the best fixed (lower bound), or at {MOST_CPU} of its CPU per token"
"""Share of the cells. Time by the clock holds what other processes of the machine take, too."""


def protocol(options: Options, *, is_async: bool = False) -> Protocol:
    """What will be measured; of engines that schedule asynchronously, without the memory."""
    from benchmarks.engines.loaded import LOADS, NOISE, OUTPUT_TOKENS

    loads = {name: LOADS[name] for name in (("4 streams",) if options.quick else LOADS)}
    return Protocol(
        bench="control_async" if is_async else "control",
        question="Does the closed loop deliver what the best fixed choice would, wherever that "
        "lies?",
        arms=(*(arm for arm in FIXED if not (is_async and "memory" in arm)), AUTO, NONE),
        order="All arms of a cell in turns, in another order each time; the same prompts for all "
        "arms of one repeat.",
        sizes={
            "drafts": NOISE
            if not options.quick
            else {name: NOISE[name] for name in ("good", "useless")},
            "loads": loads,
            "output_tokens": OUTPUT_TOKENS,
            "k_max": K_MAX,
            "num_repeats": 2 if options.quick else 8,
            "num_cost_repeats": 4 if options.quick else 12,
            "target": "the tiny target at the cost of a model of 77 M parameters",
            "scheduling": "asynchronous" if is_async else "synchronous",
        },
        goals=(
            Goal(figure=MEAN_BEST, at_least=0.97),
            Goal(figure=BEST, bound="low", at_least=LOW),
            Goal(figure=EITHER, at_least=1.0),
            Goal(figure=MEAN_SINGLE, at_least=1.10),
            Goal(figure=OVER_NONE, at_least=0.97),
            Goal(figure=COST, at_least=0.99),
        ),
    )


def run(options: Options, *, is_async: bool = False) -> Result:
    """Measure every cell of every draft."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.engines import loaded as engines
    from osd.tiny.models import ensure_cost_shaped

    plan = protocol(options, is_async=is_async)
    notebook = Notebook(options, plan)
    target, prompts = ensure_cost_shaped(), engines.home_prompts()
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        found = engines.drafts(Path(directory))
        kept = []  # the end of one engine in a process is the end of all
        none = engines.Loaded(
            target, found["good"], k=K_MAX, settings=None, speculates=False, is_async=is_async
        )
        for name in plan.sizes["drafts"]:
            options.say(f"{name} draft")
            fixed, auto = engines.controlled(target, found[name], K_MAX, is_async)
            kept += [fixed, auto]
            loaded = {"fixed": fixed, AUTO: auto, NONE: none}
            _measure(notebook, options, plan, name, loaded, prompts)
            if name == "good":
                options.say("cost of control")
                static = engines.Loaded(
                    target, found[name], k=3, settings=None, speculates=True, is_async=is_async
                )
                _measure_cost(notebook, plan, {STATIC: static, CONTROLLED: fixed}, prompts)
    return summarise(plan, notebook.rows)


def _measure(
    notebook: Notebook,
    options: Options,
    plan: Protocol,
    draft: str,
    engines: dict[str, Any],
    prompts: Any,
) -> None:
    rng = np.random.default_rng(0)
    first = 0
    for repeat in range(-1, plan.sizes["num_repeats"]):  # the first warms up
        for load, phases in plan.sizes["loads"].items():
            outputs: dict[int, list[int]] = {}
            first += 1000
            for arm in rng.permutation(plan.arms).tolist():
                loaded = engines.get(arm, engines["fixed"])
                if arm in FIXED:
                    loaded.command("force", FIXED[arm])
                if arm == AUTO:
                    loaded.command("log", True)
                driven = loaded.drive(phases, prompts, first)
                _compare(outputs, driven.outputs, f"{draft}, {load}, {arm}")
                if repeat >= 0:
                    did = seen(loaded) if arm == AUTO else {}
                    notebook.add(
                        group=f"{draft} draft, {load}",
                        arm=arm,
                        repeat=repeat,
                        seconds=driven.seconds,
                        cpu_seconds=driven.cpu_seconds,
                        num_tokens=driven.num_tokens,
                        **did,
                    )
        options.say(f"{draft} draft: repeat {repeat + 1} of {plan.sizes['num_repeats']}")


def seen(auto: Any) -> Row:
    """What the control did since its log was begun: steps of each plan, and how well it foresaw
    their time."""
    steps = auto.command("log", False)
    plans: dict[str, int] = {}
    for step in steps:
        plans[step["plan"]] = plans.get(step["plan"], 0) + 1
    foreseen = [
        s["seconds"] / s["predicted_seconds"]
        for s in steps
        if s["is_pure"] and s["predicted_seconds"]
    ]
    report = auto.command("report")
    return {
        "plans": plans,
        "measured_over_foreseen": median(foreseen) if foreseen else None,
        "decision_us": report["decision_us"],
        "num_probes": report["num_probes"],
    }


def _compare(known: dict[int, list[int]], outputs: dict[int, list[int]], where: str) -> None:
    for index, tokens in outputs.items():
        before = known.setdefault(index, tokens)
        if any(a != b for a, b in zip(before, tokens, strict=False)):
            raise ValueError(f"{where}: prompt {index} was answered otherwise than by another arm")
        if len(tokens) > len(before):
            known[index] = tokens


def _measure_cost(
    notebook: Notebook, plan: Protocol, engines: dict[str, Any], prompts: Any
) -> None:
    engines[CONTROLLED].command("force", ("draft", 3))
    for repeat in range(-1, plan.sizes["num_cost_repeats"]):
        for arm in (STATIC, CONTROLLED)[:: 1 if repeat % 2 else -1]:
            driven = engines[arm].drive(((4, 192),), prompts, 500_000 + 1000 * repeat)
            if repeat >= 0:
                row = {"seconds": driven.seconds, "num_tokens": driven.num_tokens}
                notebook.add(group=COST_GROUP, arm=arm, repeat=repeat, **row)


# ------------------------------------------------------------------------------------------ summary


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Rates per cell, `auto` against the best fixed choice and against none."""
    figures: list[Figure] = []
    spread = []
    cells = [group for group in dict.fromkeys(row["group"] for row in rows) if group != COST_GROUP]
    fixed = [arm for arm in FIXED if arm in plan.arms]
    best_logs, single_logs = list[float](), {arm: list[float]() for arm in fixed}
    either = list[bool]()
    for group in cells:
        rates = {arm: rates_of(rows, group, arm) for arm in plan.arms}
        figures += [Figure.of(group, f"tokens/s, {arm}", estimate(rates[arm])) for arm in plan.arms]
        ratio = over_best(rates)
        best_logs.append(float(np.log(ratio.value)))
        for arm in fixed:
            single_logs[arm].append(float(np.log(median_ratio(rates[AUTO], rates[arm]).value)))
        figures.append(Figure.of(group, BEST, ratio))
        figures.append(Figure.of(group, OVER_NONE, median_ratio(rates[AUTO], rates[NONE])))
        cpu = over_best(rates, {arm: cpu_of(rows, group, arm) for arm in plan.arms})
        figures.append(Figure.of(group, CPU, cpu))
        either.append(ratio.low >= LOW or cpu.value <= MOST_CPU)
        mine = [row for row in rows if row["group"] == group and row["arm"] == AUTO]
        foreseen = [
            row["measured_over_foreseen"] for row in mine if row.get("measured_over_foreseen")
        ]
        if foreseen:
            figures.append(Figure.of(group, "step time, measured / foreseen", estimate(foreseen)))
        observed = tuple(
            a / b
            for a, b in zip(
                rates[AUTO], rates[best_fixed(rates, range(len(rates[AUTO])))], strict=True
            )
        )
        spread.append((group, ratio, observed))
    if cells:
        figures.append(
            Figure(group=ALL, name=MEAN_BEST, value=float(np.exp(np.mean(best_logs))), n=len(cells))
        )
        figures.append(Figure(group=ALL, name=EITHER, value=float(np.mean(either)), n=len(cells)))
        single = min(single_logs, key=lambda arm: float(np.mean(single_logs[arm])))
        gain = float(np.exp(np.mean(single_logs[single])))
        figures.append(Figure(group=ALL, name=MEAN_SINGLE, value=gain, n=len(cells)))
        if (over_table := _over_table(plan, rows)) is not None:
            figures.append(over_table)
        decisions = [row["decision_us"] for row in rows if row.get("decision_us")]
        if decisions:
            figures.append(Figure.of(ALL, "time of a decision", estimate(decisions), "us"))
    if any(row["group"] == COST_GROUP for row in rows):
        ratio = median_ratio(
            rates_of(rows, COST_GROUP, CONTROLLED), rates_of(rows, COST_GROUP, STATIC)
        )
        figures.append(Figure.of(COST_GROUP, COST, ratio))
    drawing = Spread(title=BEST, unit="", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def _over_table(plan: Protocol, rows: Sequence[Row]) -> Figure | None:
    """`auto` against what vLLM can do by itself: a table of k by batch size
    (`num_speculative_tokens_per_batch_size`), whatever the draft. Picked on all repeats, which
    favours the table; where the batch never changes it does what its fixed k does."""
    choices = [arm for arm in FIXED if arm.startswith("k = ")]
    logs = list[float]()
    for load in (name for name, phases in plan.sizes["loads"].items() if len(phases) == 1):
        groups = [f"{draft} draft, {load}" for draft in plan.sizes["drafts"]]
        cells = [{arm: rates_of(rows, group, arm) for arm in (*choices, AUTO)} for group in groups]
        ratios = {
            arm: [
                float(np.log(median_ratio(cell[AUTO], cell[arm]).value))
                for cell in cells
                if cell[AUTO]
            ]
            for arm in choices
        }
        logs += min(ratios.values(), key=sum)
    return (
        Figure(group=ALL, name=MEAN_TABLE, value=float(np.exp(np.mean(logs))), n=len(logs))
        if logs
        else None
    )


def rates_of(rows: Sequence[Row], group: str, arm: str) -> list[float]:
    """Tokens/s of each repeat, in their order."""
    mine = [row for row in rows if row["group"] == group and row["arm"] == arm]
    return [
        row["num_tokens"] / row["seconds"] for row in sorted(mine, key=lambda row: row["repeat"])
    ]


def cpu_of(rows: Sequence[Row], group: str, arm: str) -> list[float]:
    """CPU seconds per token of each repeat, in their order."""
    mine = [row for row in rows if row["group"] == group and row["arm"] == arm]
    return [
        row["cpu_seconds"] / row["num_tokens"]
        for row in sorted(mine, key=lambda row: row["repeat"])
    ]


def best_fixed(rates: dict[str, list[float]], repeats: Sequence[int]) -> str:
    """The fixed choice with the highest median over these repeats."""
    measured = [arm for arm in FIXED if arm in rates]
    return max(measured, key=lambda arm: median(rates[arm][i] for i in repeats))


def over_best(
    rates: dict[str, list[float]], scores: dict[str, list[float]] | None = None
) -> Estimate:
    """The best fixed choice is picked by rate on every other repeat, and the score of `auto`, by
    default the rate, held against its score on the rest, both ways."""
    scores = scores or rates
    num = len(rates[AUTO])
    halves = [range(0, num, 2), range(1, num, 2)]
    above, below = [], []
    for picked_on, scored_on in (halves, halves[::-1]):
        arm = best_fixed(rates, picked_on)
        above += [scores[AUTO][i] for i in scored_on]
        below += [scores[arm][i] for i in scored_on]
    return median_ratio(above, below)
