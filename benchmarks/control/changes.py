"""`osd bench changes`: how soon the closed loop recovers after a change of load or draft.

    settled ──► the change ──► 200 steps of `auto` ──► short runs of `auto` and of every fixed
                (streams, or a hot-swap                choice, in turns
                without a prediction)

As in `osd bench control`, the best fixed choice is picked on half of the runs, and `auto` is
compared with it on the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control.control import AUTO, BEST, FIXED, K_MAX, best_fixed, over_best, rates_of
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import estimate

DURING = "auto during the 200 steps / best fixed afterwards"
ENDLESS = 1 << 30
MOST_SWEEP_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Condition:
    """What an engine is under."""

    draft: str
    streams: int


CHANGES = {
    "load 1 to 16, middling draft": (Condition("middling", 1), Condition("middling", 16)),
    "load 16 to 1, middling draft": (Condition("middling", 16), Condition("middling", 1)),
    "draft good to useless, 4 streams": (Condition("good", 4), Condition("useless", 4)),
    "draft useless to good, 4 streams": (Condition("useless", 4), Condition("good", 4)),
}


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    changes = list(CHANGES)[2:] if options.quick else list(CHANGES)
    return Protocol(
        bench="changes",
        question="How soon does the closed loop find the best choice again when load or draft "
        "change?",
        arms=(*FIXED, AUTO),
        order="All arms in turns after the 200 steps, in another order each time, on the same "
        "prompts.",
        sizes={
            "changes": changes,
            "steps_before": 100,
            "steps_after": 200,
            "tokens_per_stream": 24 if options.quick else 48,
            "num_turns": 1 if options.quick else 2,
            "num_repeats": 2 if options.quick else 4,
            "k_max": K_MAX,
            "target": "the tiny target at the cost of a model of 77 M parameters",
        },
        goals=(Goal(figure=BEST, at_least=0.95),),
    )


def run(options: Options) -> Result:
    """Make every change, some times over."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.engines import loaded as engines
    from osd.tiny.models import ensure_cost_shaped

    plan = protocol(options)
    notebook = Notebook(options, plan)
    target, prompts = ensure_cost_shaped(), engines.home_prompts()
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        drafts = engines.drafts(Path(directory))
        fixed, auto = engines.controlled(target, drafts["good"], K_MAX)
        for streams in (1, 4, 16):
            _sweep(auto, streams, prompts)
        for turn in range(plan.sizes["num_turns"]):
            for name in plan.sizes["changes"]:
                options.say(f"{name}, turn {turn + 1}")
                _measure(notebook, plan, name, turn, {"fixed": fixed, AUTO: auto}, drafts, prompts)
    return summarise(plan, notebook.rows)


def _sweep(auto: Any, streams: int, prompts: Any) -> None:
    """Measure steps as a replica does at its start; requests are short here, so that some stream is
    often new."""
    auto.command("sweep", max(1, streams * 3 // 4))
    steps = _steps(MOST_SWEEP_STEPS)
    auto.drive(
        ((streams, ENDLESS),), prompts, 0, lambda: steps() or auto.command("sweep_steps_left") == 0
    )
    auto.command("end_sweep")


def _steps(num: int) -> Callable[[], bool]:
    """Whether it was called more than `num` times."""
    calls = count()
    return lambda: next(calls) >= num


def _measure(
    notebook: Notebook,
    plan: Protocol,
    name: str,
    turn: int,
    engines: dict[str, Any],
    drafts: dict[str, Path],
    prompts: Any,
) -> None:
    sizes, (before, after) = plan.sizes, CHANGES[name]
    auto, first = engines[AUTO], 10_000 * (turn + 1)
    for engine in engines.values():
        engine.swap(drafts[before.draft])
    auto.drive(((before.streams, ENDLESS),), prompts, first, _steps(sizes["steps_before"]))
    if after.draft != before.draft:
        for engine in engines.values():
            engine.swap(drafts[after.draft])
    auto.command("log", True)
    driven = auto.drive(
        ((after.streams, ENDLESS),), prompts, first + 1000, _steps(sizes["steps_after"])
    )
    plans = [step["plan"] for step in auto.command("log", False)]
    row = {"seconds": driven.seconds, "num_tokens": driven.num_tokens, "plans": plans}
    notebook.add(group=name, arm=DURING, repeat=turn, **row)
    rng = np.random.default_rng(turn)
    for repeat in range(
        -1, sizes["num_repeats"]
    ):  # the first warms up the fixed choices, and is not for `auto`
        for arm in rng.permutation([*FIXED, AUTO]).tolist():
            if arm in FIXED:
                engines["fixed"].command("force", FIXED[arm])
            elif repeat < 0:
                continue
            phases = ((after.streams, sizes["tokens_per_stream"] * after.streams),)
            driven = engines.get(arm, engines["fixed"]).drive(
                phases, prompts, first + 2000 + 100 * repeat
            )
            if repeat >= 0:
                row = {"seconds": driven.seconds, "num_tokens": driven.num_tokens}
                notebook.add(
                    group=name, arm=arm, repeat=turn * sizes["num_repeats"] + repeat, **row
                )


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Per change: `auto` against the best fixed choice, after the 200 steps and during them."""
    figures, spread = list[Figure](), []
    for group in dict.fromkeys(row["group"] for row in rows):
        rates = {arm: rates_of(rows, group, arm) for arm in plan.arms}
        figures += [Figure.of(group, f"tokens/s, {arm}", estimate(rates[arm])) for arm in plan.arms]
        ratio = over_best(rates)
        best = rates[best_fixed(rates, range(len(rates[AUTO])))]
        during = estimate(np.array(rates_of(rows, group, DURING)) / np.median(best))
        figures += [Figure.of(group, BEST, ratio), Figure.of(group, DURING, during)]
        spread.append((group, ratio, tuple(a / b for a, b in zip(rates[AUTO], best, strict=True))))
    drawing = Spread(title=BEST, unit="", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))
