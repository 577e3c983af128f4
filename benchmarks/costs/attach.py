"""`osd bench attach`: what a stock engine pays for being attached.

Engines side by side, one as vLLM starts it, the others built to be attached: with everything
switched off, observed, and captured. Each burst of requests is one turn, in which the counters are
asked for as an attached engine's loop does, once a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import median_ratio
from osd.config.schema import CaptureConfig

K = 4
NUM_TOKENS = 48
STOCK, OFF, OBSERVED, CAPTURED = "stock", "all off", "observe", "observe, capture"
SWITCHED = {OFF: (False, False), OBSERVED: (True, False), CAPTURED: (True, True)}
CPU = "CPU seconds per token over stock"
OVER_OFF = "CPU seconds per token over all off"
"""Of engines that were built alike: what the switches take."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="attach",
        question="What does a `vllm serve` pay for being attached, step by step?",
        arms=(STOCK, *SWITCHED),
        order="All arms in one process take turns with the same requests, each time in another "
        "order.",
        sizes={
            "num_pairs": 3 if options.quick else 30,
            "streams": [4] if options.quick else [1, 4],
            "num_tokens": NUM_TOKENS,
            "k": K,
            "target": "the tiny target at the cost of a model of 77 M parameters",
        },
        goals=(Goal(figure=f"{OBSERVED}: {CPU}", bound="high", at_most=1.01),),
    )


def run(options: Options) -> Result:
    """Measure all pairs."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.engines.loaded import home_prompts
    from osd.tiny.models import ensure, ensure_cost_shaped

    plan = protocol(options)
    notebook = Notebook(options, plan)
    target, draft, prompts = ensure_cost_shaped(), ensure().draft, home_prompts()
    engines = {arm: _engine(arm, target, draft) for arm in plan.arms}
    for streams in plan.sizes["streams"]:
        options.say(f"{streams} streams: {plan.sizes['num_pairs']} pairs")
        for pair in range(-1, plan.sizes["num_pairs"]):  # the first warms up
            first = (pair + 1) * streams
            asked = [prompts[(first + i) % len(prompts)] for i in range(streams)]
            turn = pair % len(plan.arms)
            for arm in (*plan.arms[turn:], *plan.arms[:turn]):
                row = _burst(engines[arm], arm, asked)
                if pair >= 0:
                    notebook.add(group=_title(streams), arm=arm, pair=pair, **row)
    return summarise(plan, notebook.rows)


def _engine(arm: str, target: Any, draft: Any) -> Any:
    from benchmarks.engines import models
    from benchmarks.engines.engine import Engine
    from osd.attach.arguments import SCHEDULER
    from serving.worker import start_settings

    release = models.release(draft, 1)
    if arm == STOCK:
        return Engine(target, release, k=K, batch=16, worker_extension_cls="")
    held = {"mode": "auto", "k_max": K, "is_held": True}
    engine = Engine(
        target, release, k=K, batch=16, scheduler_cls=SCHEDULER, additional_config={"osd": held}
    )
    more = {"k": K, "sink": {}, "target_id": "bench", "seed": 0, "is_controlled": True}
    engine.rpc("osd_start", start_settings(release, CaptureConfig(), **more))
    engine.rpc("osd_switch", *SWITCHED[arm])
    return engine


def _burst(engine: Any, arm: str, prompts: Sequence[list[int]]) -> Row:
    started, asked_at = time.process_time(), time.perf_counter()

    def ask() -> bool:
        nonlocal asked_at
        if arm in (OBSERVED, CAPTURED) and time.perf_counter() - asked_at > 1:
            asked_at = time.perf_counter()
            engine.rpc("osd_report", "bench", "default")
        return False

    found = engine.burst(prompts, NUM_TOKENS, ask)
    if arm in (OBSERVED, CAPTURED):
        engine.rpc("osd_drain")
    return {
        "seconds": found.seconds,
        "cpu_seconds": time.process_time() - started,
        "num_tokens": found.num_tokens,
    }


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """CPU seconds per token and tokens per second of each arm over those of stock vLLM."""
    figures, spread = list[Figure](), []
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = {
            arm: [r for r in rows if (r["group"], r["arm"]) == (group, arm)] for arm in plan.arms
        }
        cpu = {arm: [r["cpu_seconds"] / r["num_tokens"] for r in mine[arm]] for arm in mine}
        speed = {arm: [r["num_tokens"] / r["seconds"] for r in mine[arm]] for arm in mine}
        for arm in SWITCHED:
            ratio = median_ratio(cpu[arm], cpu[STOCK])
            figures.append(Figure.of(group, f"{arm}: {CPU}", ratio))
            figures.append(
                Figure.of(
                    group, f"{arm}: tokens/s over stock", median_ratio(speed[arm], speed[STOCK])
                )
            )
            if arm != OFF:
                over_off = median_ratio(cpu[arm], cpu[OFF])
                figures.append(Figure.of(group, f"{arm}: {OVER_OFF}", over_off))
            observed = tuple(a / b for a, b in zip(cpu[arm], cpu[STOCK], strict=True))
            spread.append((f"{group}, {arm}", ratio, observed))
    drawing = Spread(title=CPU, unit="ratio", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def _title(streams: int) -> str:
    return f"{streams} stream{'s' if streams > 1 else ''}"
