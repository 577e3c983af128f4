"""`osd bench trees`: whether token trees would pay, over the chain that the service verifies.

    tokens per step (as measured) x price of a step (measured here | published) ─► speed, by batch

Tokens per step come from the tiny target; seconds of a step from a target that computes the same at
the cost of a far larger model. One draft proposes here (several: `osd bench pools`); what several
would cost is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Result

CHAIN, SIX, TWENTY_ONE = (1, 1, 1), (2, 1, 1), (3, 2, 2)
"""Three deep: a chain of k = 3, and trees of 6 and of 21 nodes."""
SHAPES = (CHAIN, SIX, TWENTY_ONE)
NOISE = {"good": 0.0, "middling": 0.5}
"""Draft -> noise added to its weights."""
TEMPERATURES = (0.0, 1.0)
FLAT = 3.0
"""A temperature at which neither model is sure of any token."""
KS = (1, 2, 3, 4, 5)
ANSWER = 48
"""Tokens of an answer at most."""
GREEDY, MULTI_STEP, NAIVE = "greedy", "multi-step, drawn", "naive, drawn"
"""How often a child is accepted: at temperature 0, and by arithmetic over independent draws."""
GAIN = "multi-step / naive, drawn children accepted"
WIDER = "width 5 - width 1, tokens per step"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    quick = options.quick
    return Protocol(
        bench="trees",
        question="Would token trees pay on this target and traffic, over a chain, and up to which "
        "batch?",
        arms=("no speculation", "chain k = 3", "tree of 6 nodes", "tree of 21 nodes"),
        order="Counts: each arm on the same prompts. Times: the arms take turns at each batch, in "
        "another order each time.",
        sizes={
            "num_requests": 8 if quick else 48,
            "answer_tokens": ANSWER,
            "noise": NOISE,
            "temperatures": TEMPERATURES,
            "temperatures_of_success": (*TEMPERATURES, FLAT),
            "children": "temperature 0: the likeliest; else drawn without replacement",
            "shapes": SHAPES,
            "widths": (1, 5) if quick else (1, 2, 3, 5),
            "depths": (3,) if quick else (1, 3, 5),
            "ks": KS,
            "batches": (1, 4) if quick else (1, 4, 16),
            "repeats": 1 if quick else 3,
            "timed_tokens": 8 if quick else 12,
            "pools": (1, 2, 3),
        },
        goals=(Goal(figure=GAIN, bound="low", at_least=1.0), Goal(figure=WIDER, at_least=0.0)),
    )


def run(options: Options) -> Result:
    """Count, then time, then compute."""
    from benchmarks.trees.prices import LLAMA_1B, LLAMA_8B, pool_costs
    from benchmarks.trees.report import summarise
    from benchmarks.trees.runs import Bench

    plan = protocol(options)
    notebook = Notebook(options, plan)
    with TemporaryDirectory() as directory:
        bench = Bench(Path(directory), NOISE, plan.sizes["num_requests"])
    _count(plan, notebook, bench, options)
    bench.use_costly_target()
    _time(plan, notebook, bench, options)
    for pool in plan.sizes["pools"]:
        for widths in (SIX, TWENTY_ONE):
            costs = pool_costs(LLAMA_8B, LLAMA_1B, pool, widths, batch=4)
            notebook.add(kind="costs", pool=pool, widths=widths, costs=costs)
    return summarise(plan, notebook.rows)


def grid(plan: Protocol) -> list[tuple[int, ...]]:
    """Widths of the first depth, by depth."""
    sizes = plan.sizes
    return [(width,) + (1,) * (depth - 1) for depth in sizes["depths"] for width in sizes["widths"]]


def _count(plan: Protocol, notebook: Notebook, bench: Any, options: Options) -> None:
    """Success of a token, and tokens per step."""
    for draft in NOISE:
        for temperature in plan.sizes["temperatures_of_success"]:
            for row in bench.successes(draft, temperature, ANSWER, KS):
                notebook.add(kind="success", draft=draft, temperature=temperature, **row)
        for temperature in TEMPERATURES:
            case = {"draft": draft, "temperature": temperature}
            for widths in dict.fromkeys((*SHAPES, *grid(plan))):
                _steps(notebook, bench, case, widths=widths, children="distinct")
            options.say(f"{draft} draft, temperature {temperature:g}: counted")
        for widths in SHAPES:
            for rule in ("multi-step", "naive"):
                case = {"draft": draft, "temperature": 1.0}
                _steps(notebook, bench, case, widths=widths, children="sampled", rule=rule)


def _steps(notebook: Notebook, bench: Any, case: Row, **how: Any) -> None:
    found = bench.steps(case["draft"], ANSWER, batch=16, temperature=case["temperature"], **how)
    notebook.add(kind="steps", rule=how.pop("rule", ""), **case, **how, **found)


def _time(plan: Protocol, notebook: Notebook, bench: Any, options: Options) -> None:
    """Seconds of a step, the arms in turn."""
    arms: Sequence[tuple[int, ...]] = ((), *SHAPES)
    for batch in plan.sizes["batches"]:
        for repeat in range(plan.sizes["repeats"]):
            shift = repeat % len(arms)
            for widths in (*arms[shift:], *arms[:shift]):
                found = bench.times("middling", widths, batch, plan.sizes["timed_tokens"])
                notebook.add(kind="times", batch=batch, widths=widths, repeat=repeat, **found)
        options.say(f"batch {batch}: timed")
