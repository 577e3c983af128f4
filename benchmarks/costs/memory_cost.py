"""`osd bench memory_cost`: what the memory takes where it finds nothing.

Two engines that differ in `speculation.proposers` alone write text that nobody wrote before: of
their target, any token may come next. The control decides as it serves; it comes to
use neither draft nor memory. What the control takes in the scheduler's thread is metered apart,
since a share of a step depends on the model.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import estimate, median_ratio

K_MAX = 5
ON, OFF = "memory on", "memory off"
MOST = {OFF: K_MAX, ON: 8}
"""Tokens that an engine keeps room for (`speculation.k_max`, `speculation.memory_k_max`)."""
TOKENS = {1: 192, 16: 768, 64: 3072}
QUICK_TOKENS = {1: 192, 64: 1024}
"""Requests that decode together -> tokens of a turn."""
STEPS_MS = (20, 40)
"""Steps of a target, of which the memory's time is said as a share."""
CPU = "CPU seconds per token, memory on / off"
CONTROL_US = "CPU of the control per token"
MEMORY_US = "CPU of the memory per token"
VERIFIED = "tokens of the memory verified per output token"
MOST_FREQUENT = "share of the most frequent token, at most"
"""Of the tokens of a turn: shows whether any token came next."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    tokens = QUICK_TOKENS if options.quick else TOKENS
    return Protocol(
        bench="memory_cost",
        question="What does the memory cost on text in which it finds nothing?",
        arms=(OFF, ON),
        order="Both engines in one process take turns with the same prompts; who is first changes "
        "from pair to pair.",
        sizes={
            "num_pairs": 3 if options.quick else 24,
            "num_warm": 1 if options.quick else 4,
            "batches": list(tokens),
            "tokens": {str(batch): num for batch, num in tokens.items()},
            "k_max": K_MAX,
            "target": "the tiny target at the cost of a model of 77 M parameters, with a last "
            "norm of a hundredth",
        },
        goals=(Goal(figure=CPU, at_most=1.03),),
    )


def run(options: Options) -> Result:
    """Measure all pairs."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.engines import loaded as engines
    from serving.vllm.fixes import fix_cpu_sampling

    # Without it, a step that verifies anything samples text that repeats itself.
    fix_cpu_sampling()
    plan = protocol(options)
    notebook = Notebook(options, plan)
    loaded, prompts = _engines(max(plan.sizes["batches"])), engines.home_prompts()
    meters = {arm: one.meter() for arm, one in loaded.items()}
    first = 0
    for batch in plan.sizes["batches"]:
        options.say(f"batch {batch}: {plan.sizes['num_pairs']} pairs")
        for pair in range(-plan.sizes["num_warm"], plan.sizes["num_pairs"]):
            first += 1000
            for arm in plan.arms if pair % 2 else plan.arms[::-1]:
                phase = batch, plan.sizes["tokens"][str(batch)]
                row = _turn(loaded[arm], meters[arm], phase, prompts, first)
                if pair >= 0:
                    notebook.add(batch=batch, arm=arm, pair=pair, **row)
    return summarise(plan, notebook.rows)


def _engines(batch: int) -> dict[str, Any]:
    from benchmarks.engines import loaded as engines
    from benchmarks.engines import models
    from osd.tiny.models import ensure, ensure_cost_shaped

    draft, settings = ensure().draft, engines.settings(K_MAX) | {"is_alone": True}
    # The memory's engine last: it imports numba, beside which no other can start.
    proposers = {OFF: ["draft"], ON: ["draft", "memory"]}
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        target = models.copy_undecided(ensure_cost_shaped(), Path(directory))
        return {
            arm: engines.Loaded(
                target,
                draft,
                k=MOST[arm],
                settings=settings | {"proposers": who},
                speculates=True,
                batch=batch,
            )
            for arm, who in proposers.items()
        }


def _turn(engine: Any, meter: Any, phase: tuple[int, int], prompts: Any, first: int) -> Row:
    control_s, verified = meter(), _verified(engine)
    driven = engine.drive((phase,), prompts, first, temperature=1.0)
    return {
        "cpu_seconds": driven.cpu_seconds,
        "control_cpu_seconds": meter() - control_s,
        "num_tokens": driven.num_tokens,
        "num_verified": _verified(engine) - verified,
        "most_frequent": _most_frequent(driven.outputs.values()),
    }


def _most_frequent(answers: Iterable[Sequence[int]]) -> float:
    """Share of the token that came most often."""
    counts = Counter(token for answer in answers for token in answer)
    return max(counts.values()) / counts.total()


def _verified(engine: Any) -> int:
    return int(engine.command("report")["sources"]["memory"][0])


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """CPU per token with the memory over that without, and what the memory takes."""
    figures, spread = list[Figure](), []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        group = f"batch {batch}"
        mine = {
            arm: [r for r in rows if (r["batch"], r["arm"]) == (batch, arm)] for arm in (OFF, ON)
        }
        cpu = {arm: [r["cpu_seconds"] / r["num_tokens"] for r in mine[arm]] for arm in mine}
        control = {
            arm: [1e6 * r["control_cpu_seconds"] / r["num_tokens"] for r in mine[arm]]
            for arm in mine
        }
        memory = [on - off for on, off in zip(control[ON], control[OFF], strict=True)]
        verified = [r["num_verified"] / r["num_tokens"] for r in mine[ON]]
        ratio = median_ratio(cpu[ON], cpu[OFF])
        figures.append(Figure.of(group, CPU, ratio))
        for arm in mine:
            name = f"{CONTROL_US}, {arm}"
            figures.append(Figure.of(group, name, estimate(control[arm]), "µs"))
        figures.append(Figure.of(group, MEMORY_US, estimate(memory), "µs"))
        figures += [
            Figure.of(
                group,
                f"CPU of the memory in a step over a step of {ms} ms",
                estimate([us * batch / (1000 * ms) for us in memory]),
            )
            for ms in STEPS_MS
        ]
        without = estimate([1e3 * batch * seconds for seconds in cpu[OFF]])
        figures.append(Figure.of(group, "CPU of a step, memory off", without, "ms"))
        figures.append(Figure.of(group, VERIFIED, estimate(verified)))
        most = max(row["most_frequent"] for arm in mine for row in mine[arm])
        figures.append(Figure(group=group, name=MOST_FREQUENT, value=most))
        observed = tuple(on / off for on, off in zip(cpu[ON], cpu[OFF], strict=True))
        spread.append((group, ratio, observed))
    drawing = Spread(title=CPU, unit="ratio", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))
