"""The padded loop beside which the trainer's step is measured."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.costs import trainer as bench
from benchmarks.engines import models
from osd.config.schema import TrainerConfig

SET_UP_S = 0.5


def test_what_a_loop_does_before_its_first_step_is_not_charged(tmp_path: Path) -> None:
    """Hugging Face's collects garbage first, which takes as long as some of these steps."""
    models.build(models.Size(vocab_size=512, hidden_size=64, num_layers=1), tmp_path / "draft")
    traces = bench.mixed_traces(2 * bench.BATCH_SIZE, 512, np.random.default_rng(0))
    config = TrainerConfig(device="cpu", batch_size=bench.BATCH_SIZE, warmup_steps=0)
    ours = bench._ours(tmp_path / "draft", traces, config)
    padded = bench._padded(tmp_path / "draft", traces, config)
    collected = []

    def slowly(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and not collected:
            collected.append(info)
            time.sleep(SET_UP_S)

    gc.callbacks.append(slowly)
    try:
        began = time.perf_counter()
        seconds, num_tokens, losses = padded()
        whole = time.perf_counter() - began
    finally:
        gc.callbacks.remove(slowly)
    assert collected and 0 < seconds <= whole - SET_UP_S
    own_seconds, own_tokens, own_losses = ours()
    assert own_seconds > 0 and own_tokens == num_tokens
    assert own_losses == pytest.approx(losses, rel=1e-3)
