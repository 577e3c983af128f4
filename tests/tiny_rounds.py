"""Trainers of tiny drafts, and what to ask of the candidates they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from buffers.base import TraceBuffer
from buffers.memory import MemoryTraceBuffer
from osd.config import GateConfig, TrainerConfig
from osd.records import Trace
from tests.tiny_drafts import TARGET_ID
from trainer.draft import load_draft
from trainer.evaluate import replay
from trainer.loop import Trainer

GATE = GateConfig(min_holdout_traces=4, max_holdout_traces=16)


def config(**fields: Any) -> TrainerConfig:
    values: dict[str, Any] = {"device": "cpu", "learning_rate": 1e-2, "warmup_steps": 2, "max_length": 64}
    values["replay_batches"] = 4
    return TrainerConfig(**(values | fields))


def buffer_with(*traces: Trace, **options: Any) -> MemoryTraceBuffer:
    buffer = MemoryTraceBuffer(target_id=TARGET_ID, **options)
    assert buffer.put(traces) == len(traces)
    return buffer


def trainer_at(directory: Path, buffer: TraceBuffer, **fields: Any) -> Trainer:
    return Trainer(config(**fields), GATE, 4, buffer, directory, TARGET_ID)


def alpha(directory: str | Path, traces: list[Trace]) -> float:
    value = replay(load_draft(directory), traces, 4, max_length=64).alpha
    assert value is not None
    return value


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "model.safetensors")


def same_weights(one: str | Path, other: str | Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
