"""Trainers of tiny drafts, and checks of the candidates they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from buffers.base import TraceBuffer
from buffers.memory import MemoryTraceBuffer
from osd.config.schema import GateConfig, TrainerConfig
from osd.records import Trace
from tests.support.tiny_drafts import TARGET_ID
from trainer.draft import load_draft
from trainer.evaluate import replay
from trainer.loop import Trainer
from trainer.replay import ReplayMix, ReplayState

GATE = GateConfig(min_holdout_traces=4, max_holdout_traces=16, judge_since_change=False)
"""All that is new teaches: where some of it judges is a matter of `test_judges.py`."""


def config(**fields: Any) -> TrainerConfig:
    values: dict[str, Any] = {
        "device": "cpu",
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_length": 64,
    }
    values["replay_batches"] = 4
    return TrainerConfig(**(values | fields))


def buffer_with(*traces: Trace, **options: Any) -> MemoryTraceBuffer:
    buffer = MemoryTraceBuffer(target_id=TARGET_ID, **options)
    assert buffer.put(traces) == len(traces)
    return buffer


def trainer_at(directory: Path, buffer: TraceBuffer, **fields: Any) -> Trainer:
    return Trainer(config(**fields), GATE, 4, buffer, directory, TARGET_ID)


class Rounds:
    """The mix as a trainer uses it, without any training."""

    def __init__(self, buffer: TraceBuffer, seed: int = 0, **fields: Any) -> None:
        self.buffer, self.state, self.seed, self.num = buffer, ReplayState(), seed, 0
        self.cursor: dict[str, int] = {}
        self.mix = ReplayMix(config(**fields), buffer)

    def round(self, *traces: Trace) -> list[Trace]:
        """Stores and reads these traces. Returns what the round would be trained on."""
        self.buffer.put(traces)
        self.num += 1
        fresh, cursor = self.buffer.read(self.cursor, 10_000)
        pool = self.mix.pool(
            fresh, cursor, self.state, np.random.default_rng([self.seed, self.num, 0])
        )
        rng = np.random.default_rng([self.seed, self.num, 1])
        self.state = self.mix.remember(fresh, self.cursor, self.state, rng)
        self.cursor = cursor
        return pool

    def anchors(self) -> list[Trace]:
        """Everything the mix could draw as an anchor."""
        found: dict[str, Trace] = {}
        for slot, place in enumerate(self.state.places):
            found |= {trace.trace_id: trace for trace in self.buffer.anchors([2 * slot + place])}
        return list(found.values())


def alpha(directory: str | Path, traces: list[Trace]) -> float:
    value = replay(load_draft(directory), traces, 4, max_length=64).alpha
    assert value is not None
    return value


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "model.safetensors")


def same_weights(one: str | Path, other: str | Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
