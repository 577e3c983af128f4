"""The loss on held-out traces before and after a round, which tells whether the round did harm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from osd.config.schema import GateConfig, TrainerConfig
from osd.records import Trace
from trainer.batch import TrainBatch, trainable
from trainer.distiller import Distiller
from trainer.loss import weighted_mean

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

NUM_WATCHED = 24
"""Held-out traces that are watched, or `gate.min_holdout_traces` if that is more. They are enough
to reveal a learning rate that is too high, and cost little."""
NUM_ERRORS = 2.0
"""A rise must exceed this many standard errors of the paired differences."""
LEAST_RISE = 0.02
"""A rise must also exceed this share of the loss."""


class Watched(NamedTuple):
    """Held-out traces that are measured together."""

    batch: TrainBatch
    num_traces: int


class LossGuard:
    """Measures a working draft on the newest held-out traces."""

    def __init__(self, config: TrainerConfig, gate: GateConfig, buffer: TraceBuffer) -> None:
        self._config, self._gate, self._buffer = config, gate, buffer

    def watched(self, vocab_size: int) -> list[Trace]:
        """The newest held-out traces; none when there are fewer than the gate needs."""
        newest = self._buffer.holdout(max(NUM_WATCHED, self._gate.min_holdout_traces))
        traces, _ = trainable(newest, vocab_size)
        return traces if len(traces) >= self._gate.min_holdout_traces else []

    def batches(self, distiller: Distiller, traces: Sequence[Trace]) -> list[Watched]:
        """The traces as batches, to be measured more than once."""
        size = self._config.batch_size
        parts = [traces[i : i + size] for i in range(0, len(traces), size)]
        return [Watched(distiller.collate(some), len(some)) for some in parts]

    @torch.no_grad()
    def losses(self, distiller: Distiller, batches: Sequence[Watched]) -> np.ndarray:
        """float64 [traces]; the mean loss of each trace, 0 for a trace whose weights are 0."""
        values: list[float] = []
        for batch, num_traces in batches:
            loss_N, weight_N, trace_N = distiller.losses(batch).cpu(), batch.weight_N, batch.trace_N
            for index in range(num_traces):
                here_N = trace_N == index
                total = float(weight_N[here_N].sum())
                values.append(
                    float(weighted_mean(loss_N[here_N], weight_N[here_N])) / total if total else 0.0
                )
        return np.array(values)


def has_risen(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the loss rose significantly (paired t) and by more than `LEAST_RISE`, or is not
    finite."""
    diff = after - before
    if not np.isfinite(diff).all():
        return True
    error = diff.std(ddof=1) / np.sqrt(len(diff))
    return bool(diff.mean() > NUM_ERRORS * error and diff.mean() > LEAST_RISE * before.mean())
