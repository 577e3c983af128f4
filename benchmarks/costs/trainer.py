"""`osd bench trainer`: tokens per second of the trainer's step, compared with a padded loop of
Hugging Face's `Trainer`.

Both make the same updates: same traces in the same order, same batches, loss, optimizer and
learning rate. The loop pads every trace to the longest of its batch and computes the logits of all
tokens. Ours packs the traces and computes the logits of the captured rows. The losses of both are
kept, and must agree. Time is that of the steps, from the first batch to the last update: what
either does once, before them, is in neither.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.costs.buffer import ROWS_PER_TOKEN, make_trace
from benchmarks.engines import models
from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import estimate, median_ratio
from osd.common import machine
from osd.config.schema import TrainerConfig
from osd.records import Trace

SIZES = {
    "0.4 M, 2,048 tokens": models.Size(vocab_size=2048, hidden_size=64, num_layers=3),
    "20 M, 32,000 tokens": models.Size(vocab_size=32_000, hidden_size=256, num_layers=4),
}
LENGTHS = (24, 256)
"""Shortest and longest prompt; lengths between are log-uniform, as in mixed traffic. Outputs are
half as long."""
BATCH_SIZE = 8
RATIO = "tokens/s over the padded loop"
Loop = Callable[[], tuple[float, int, list[float]]]
"""Seconds of its steps, tokens without padding, losses."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="trainer",
        question="How fast does the trainer's step go, and what memory does it need?",
        arms=("ours", "padded"),
        order="In turns, the first of one pair is the second of the next; a new optimizer each "
        "time.",
        sizes={
            "models": list(SIZES)[: 1 if options.quick else None],
            "prompt_tokens": LENGTHS,
            "rows_per_output_token": ROWS_PER_TOKEN,
            "batch_size": BATCH_SIZE,
            "num_steps": 4 if options.quick else 8,
            "num_repeats": 2 if options.quick else 8,
            "num_threads": 1,
        },
        goals=(Goal(figure=RATIO, bound="low", at_least=2.0),),
    )


def run(options: Options) -> Result:
    """Both loops over the same traces, again and again."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        for name in plan.sizes["models"]:
            options.say(name)
            draft = Path(directory) / name
            models.build(SIZES[name], draft)
            _measure(notebook, plan, name, draft)
    return summarise(plan, notebook.rows)


def _measure(notebook: Notebook, plan: Protocol, name: str, draft: Path) -> None:
    rng = np.random.default_rng(0)
    config = TrainerConfig(device="cpu", batch_size=BATCH_SIZE, warmup_steps=0)
    for repeat in range(-1, plan.sizes["num_repeats"]):  # the first warms up
        traces = mixed_traces(plan.sizes["num_steps"] * BATCH_SIZE, SIZES[name].vocab_size, rng)
        arms: dict[str, Loop] = {
            "ours": _ours(draft, traces, config),
            "padded": _padded(draft, traces, config),
        }
        rows: dict[str, Row] = {}
        for arm in ("ours", "padded") if repeat % 2 else ("padded", "ours"):
            machine.reset_peak_memory()
            before = machine.memory()["anonymous"]
            seconds, num_tokens, losses = arms[arm]()
            rows[arm] = {
                "seconds": seconds,
                "num_tokens": num_tokens,
                "losses": losses,
                "peak_bytes": machine.peak_memory() - before,
            }
        if repeat >= 0:
            notebook.add(group=name, repeat=repeat, **rows)


def mixed_traces(num: int, vocab_size: int, rng: np.random.Generator) -> list[Trace]:
    """Traces whose lengths are as different as those of mixed traffic."""
    shortest, longest = np.log(LENGTHS)
    prompts = np.exp(rng.uniform(shortest, longest, num)).astype(int)
    return [
        make_trace(f"t{i}", int(length), max(8, int(length) // 2), rng, vocab_size=vocab_size)
        for i, length in enumerate(prompts)
    ]


def _ours(draft: Path, traces: Sequence[Trace], config: TrainerConfig) -> Loop:
    from trainer.distiller import Distiller
    from trainer.draft import load_draft

    distiller = Distiller(load_draft(draft), config)

    def work() -> tuple[float, int, list[float]]:
        losses, num_tokens, started = [], 0, time.perf_counter()
        for index, start in enumerate(range(0, len(traces), BATCH_SIZE)):
            batch = distiller.collate(traces[start : start + BATCH_SIZE])
            loss = distiller.step(batch, index)
            assert loss is not None
            losses.append(loss)
            num_tokens += batch.num_tokens
        return time.perf_counter() - started, num_tokens, losses

    return work


def _padded(draft: Path, traces: Sequence[Trace], config: TrainerConfig) -> Loop:
    from benchmarks.costs.padded import PaddedLoop

    return PaddedLoop(draft, traces, config, BATCH_SIZE).run


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures per model. Raises `ValueError` where the two loops did not do the same."""
    figures: list[Figure] = []
    spread = []
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        for row in mine:
            if not np.allclose(row["ours"]["losses"], row["padded"]["losses"], rtol=1e-3):
                raise ValueError(
                    f"{group}: the losses differ, so the updates were not the same: {row}"
                )
        speed = {arm: [r[arm]["num_tokens"] / r[arm]["seconds"] for r in mine] for arm in plan.arms}
        memory = {arm: [r[arm]["peak_bytes"] / 2**20 for r in mine] for arm in plan.arms}
        ratio = median_ratio(speed["ours"], speed["padded"])
        figures += [
            Figure.of(group, "tokens/s", estimate(speed["ours"])),
            Figure.of(group, "tokens/s, padded loop", estimate(speed["padded"])),
            Figure.of(group, RATIO, ratio),
            Figure.of(group, "peak memory of a step", estimate(memory["ours"]), "MiB"),
            Figure.of(
                group, "peak memory of a step, padded loop", estimate(memory["padded"]), "MiB"
            ),
        ]
        ratios = [a / b for a, b in zip(speed["ours"], speed["padded"], strict=True)]
        spread.append((group, ratio, tuple(ratios)))
    drawing = Spread(title=RATIO, unit="", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))
