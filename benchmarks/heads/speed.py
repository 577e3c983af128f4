"""`osd bench head_speed`: what an EAGLE-3 head and a draft model gain on one target.

Both were trained on home traffic alone, which is served here: nothing learns meanwhile. Three live
engines take turns on the same prompts, the control of speculation decides in two of them, and the
third has no draft at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.record import Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import median_ratio

K_MAX = 4
HEAD, MODEL, NONE = "head", "draft model", "no draft"
ARMS = (HEAD, MODEL, NONE)
STREAMS = {"1 stream": 1, "4 streams": 4}
TOKENS = {"1 stream": 384, "4 streams": 1280}
"""Of a turn."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="head_speed",
        question="How much faster is decoding with an EAGLE-3 head, and with a draft model, than "
        "without a draft, on traffic that both were trained on?",
        arms=ARMS,
        order="The three engines take turns with the same prompts, in another order each time; "
        "between turns their requests wait. The first turns are not counted.",
        sizes={
            "streams": STREAMS,
            "tokens_per_turn": TOKENS,
            "k_max": K_MAX,
            "num_repeats": 3 if options.quick else 10,
            "target": "the deep tiny target at the cost of a model of 77 M parameters",
            "memory": "off",
        },
    )


def run(options: Options) -> Result:
    """Measure at each number of streams."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.engines import loaded as engines
    from osd.models.built_in import DRAFTS, TARGETS

    plan = protocol(options)
    notebook = Notebook(options, plan)
    target, prompts = TARGETS["tiny-deep-cost-shaped"](), engines.home_prompts()
    drafts = {HEAD: DRAFTS["tiny-eagle3-cost-shaped"](), MODEL: DRAFTS["tiny-deep"]()}
    drafts[NONE] = drafts[MODEL]
    settings = engines.settings(K_MAX) | {"proposers": ["draft"]}
    loaded = {
        arm: engines.Loaded(
            target,
            drafts[arm],
            k=K_MAX,
            settings=settings if arm != NONE else None,
            speculates=arm != NONE,
        )
        for arm in ARMS
    }
    for group, streams in STREAMS.items():
        phases = ((streams, plan.sizes["tokens_per_turn"][group]),)
        for repeat in range(-1, plan.sizes["num_repeats"]):
            shift = repeat % len(ARMS)
            for arm in (*ARMS[shift:], *ARMS[:shift]):
                first = 1000 * (repeat + 1)
                driven = loaded[arm].drive(phases, prompts, first, goes_on=True)
                if repeat >= 0:
                    row = {"seconds": driven.seconds, "num_tokens": driven.num_tokens}
                    cpu = {"cpu_seconds": driven.cpu_seconds}
                    notebook.add(group=group, arm=arm, repeat=repeat, **row, **cpu)
            options.say(f"{group}: repeat {repeat + 1} of {plan.sizes['num_repeats']}")
    return summarise(plan, notebook.rows)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Decode speed of each draft over none, and of the head over the model."""
    figures, spread = list[Figure](), list[Any]()
    for group, streams in plan.sizes["streams"].items():
        rates = {
            arm: [
                row["num_tokens"] / row["seconds"]
                for row in rows
                if row["group"] == group and row["arm"] == arm
            ]
            for arm in ARMS
        }
        for arm, other in ((HEAD, NONE), (MODEL, NONE), (HEAD, MODEL)):
            paired = median_ratio(rates[arm], rates[other])
            figures.append(Figure.of(group, f"tokens/s, {arm} / {other}", paired))
            ratios = [a / b for a, b in zip(rates[arm], rates[other], strict=True)]
            spread.append((f"{group}: {arm} / {other}", paired, tuple(ratios)))
        for arm in ARMS:
            middle = sorted(rates[arm])[len(rates[arm]) // 2]
            figures.append(Figure(group=group, name=f"tokens/s, {arm}", value=middle))
            tpot = Figure(
                group=group, name=f"TPOT, {arm}", value=1000 * streams / middle, unit="ms"
            )
            figures.append(tpot)
    drawing = Spread(title="decode speed", unit="", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))
