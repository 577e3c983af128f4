"""`osd bench ablation`: which part of the trainer's recipe matters, by one change at a time.

Traffic is home, then another domain, then home again. It is replayed over a recording of the tiny
target (`benchmarks/replays/learning.py`), so all arms meet the same requests. The bench shows how
fast each recipe learns and what it forgets, not how fast serving is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift import jobs
from benchmarks.drift.drift import NUM_PROCESSES
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Lines, Result
from benchmarks.stats import estimate

DEFAULTS = "the defaults"
ARMS: dict[str, tuple[str, ...]] = {
    DEFAULTS: (),
    "loss reverse_kl": ("trainer.loss=reverse_kl",),
    "loss jensen_shannon": ("trainer.loss=jensen_shannon",),
    "loss total_variation": ("trainer.loss=total_variation",),
    "loss negative_log_acceptance": ("trainer.loss=negative_log_acceptance",),
    "loss lk_hybrid": ("trainer.loss=lk_hybrid",),
    "rejected rows alone": ("capture.accepted_fraction=0", "capture.plain_fraction=0"),
    "a quarter of the other "
    "rows": ("capture.accepted_fraction=0.25", "capture.plain_fraction=0.25"),
    "all rows": ("capture.accepted_fraction=1", "capture.plain_fraction=1"),
    "no replay": ("trainer.replay_batches=0",),
    "replay 4": ("trainer.replay_batches=4",),
    "replay 16": ("trainer.replay_batches=16",),
    "batches of 4": ("trainer.batch_size=4",),
    "batches of 4, replay 4": ("trainer.batch_size=4", "trainer.replay_batches=4"),
    "replay of recent traces alone": ("trainer.recent_fraction=1", "trainer.num_anchors=0"),
    "replay of all times alike": ("trainer.recent_fraction=0",),
    "half the learning rate": ("trainer.learning_rate=1e-3",),
    "twice the learning rate": ("trainer.learning_rate=4e-3",),
    "rounds twice as often": ("trainer.min_new_traces=12",),
    "LoRA, rank 16, 3 x the rate": ("trainer.method=lora", "trainer.learning_rate=6e-3"),
    "LoRA, rank 64, 3 x the "
    "rate": ("trainer.method=lora", "trainer.lora_rank=64", "trainer.lora_alpha=128",
                                    "trainer.learning_rate=6e-3"),
}  # fmt: skip
"""Arm -> what it changes."""
BASE = (
    "trainer.learning_rate=2e-3",
    "trainer.min_new_traces=24",
    "trainer.warmup_steps=2",
    "trainer.num_threads=1",
)
"""Every arm's settings beside the defaults: those of `configs/tiny-cpu.yaml`."""
NUM_HOME, NUM_SHIFTED, NUM_BACK = 120, 432, 60
SHIFTED = "sql"
WINDOW = 48


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="ablation",
        question="Which part of the trainer's recipe matters, for learning the new and for keeping "
        "the old?",
        arms=tuple(ARMS)[: 2 if options.quick else None],
        order="Every arm on the same requests; two at a time, so their seconds are shared ones.",
        sizes={
            "requests": [NUM_HOME, NUM_SHIFTED, NUM_BACK],
            "settings": BASE,
            "changes": ARMS,
            "seeds": [0] if options.quick else [0, 1],
            "traffic": f"home, {SHIFTED}, home; another traffic seed for each seed",
        },
    )


def run(options: Options) -> Result:
    """Record the target's answers, then every arm over them."""
    plan = narrowed(protocol(options), options)
    notebook = Notebook(options, plan)
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        recordings = {seed: _record(seed, Path(directory)) for seed in plan.sizes["seeds"]}
        asked = [
            Asked(
                {"group": arm, "seed": seed},
                partial(_measure, arm, seed, recordings[seed], directory),
            )
            for seed in plan.sizes["seeds"]
            for arm in plan.arms
        ]
        with ProcessPoolExecutor(
            NUM_PROCESSES, mp_context=get_context("spawn"), initializer=jobs.prepare
        ) as pool:
            rows = measured(pool, notebook, asked, options.say, at_once=NUM_PROCESSES)
    return summarise(plan, rows)


def _record(seed: int, directory: Path) -> Path:
    """The requests of one seed as a file that other processes can read."""
    from benchmarks.replays.recording import record
    from benchmarks.traffic.recordings import save
    from osd.tiny import models
    from osd.tiny.traffic import HOME, requests

    traffic_seed = 30_000 + seed
    home = requests(HOME, NUM_HOME + NUM_BACK, traffic_seed)
    shifted = requests(SHIFTED, NUM_SHIFTED, traffic_seed)
    prompts = [r.prompt for r in (*home[:NUM_HOME], *shifted, *home[NUM_HOME:])]
    target = models.ensure().target
    recorded = record(target, prompts, top_k=64, max_tokens=160, progress=lambda num: None)
    file = directory / f"{seed}.npz"
    save(recorded, file)
    return file


def _measure(arm: str, seed: int, recording: Path, directory: str) -> Row:
    import torch

    from benchmarks.replays.learning import learn
    from benchmarks.traffic import recordings as drift_recordings
    from osd.config.reading import load
    from osd.tiny import models

    torch.set_num_threads(1)
    requests = drift_recordings.load(recording, temperature=0.0)
    config = load(None, [*BASE, *ARMS[arm]], environ={}).config
    where = Path(tempfile.mkdtemp(dir=directory))
    started = time.process_time()
    curve = learn(config, models.ensure().draft, requests, where, seed=seed)
    end = NUM_HOME + NUM_SHIFTED
    return {
        "home": curve.rate(0, NUM_HOME),
        "shifted": curve.rate(NUM_HOME, end),
        "shifted_end": curve.rate(end - 100, end),
        "back_home": curve.rate(end, end + NUM_BACK),
        "windows": [curve.rate(i, i + WINDOW) for i in range(NUM_HOME, end, WINDOW)],
        "num_rounds": curve.num_rounds,
        "num_published": curve.num_published,
        "padding": curve.padding,
        "cpu_seconds": time.process_time() - started,
    }


COLUMNS = {
    "acceptance, all shifted requests": "shifted",
    "acceptance, last 100 shifted": "shifted_end",
    "acceptance, home again": "back_home",
    "CPU seconds": "cpu_seconds",
}


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Means over seeds per arm."""
    figures: list[Figure] = []
    lines: dict[str, Any] = {}
    for arm in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == arm]
        figures += [
            Figure.of(arm, name, estimate([r[key] for r in mine], np.mean))
            for name, key in COLUMNS.items()
        ]
        means = np.mean([row["windows"] for row in mine], axis=0)
        lines[arm] = tuple(
            (float(WINDOW * i + WINDOW / 2), float(mean)) for i, mean in enumerate(means)
        )
    drawing = Lines(
        title="After the shift",
        x_label="requests since the shift",
        y_label="acceptance rate",
        lines=lines,
    )
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))
