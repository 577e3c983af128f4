"""Whether a round of training helped: the loss on held-out traces before and after it, trace by trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from osd.config.schema import GateConfig, TrainerConfig
from osd.records import Trace
from trainer.batch import trainable
from trainer.distiller import Distiller
from trainer.loss import weighted_mean

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

NUM_WATCHED = 24
"""Held-out traces looked at, or the least the gate wants where that is more: enough to see a learning rate that is too
high, few enough to cost little."""
NUM_ERRORS = 2.0
"""A rise counts when it is so many standard errors of the paired differences,"""
LEAST_RISE = 0.02
"""and this part of the loss."""


class LossGuard:
    """Measures a working draft on the newest held-out traces."""

    def __init__(self, config: TrainerConfig, gate: GateConfig, buffer: TraceBuffer) -> None:
        self._config, self._gate, self._buffer = config, gate, buffer

    def watched(self, vocab_size: int) -> list[Trace]:
        """The traces to look at; none when there are too few to judge by."""
        newest = self._buffer.holdout(max(NUM_WATCHED, self._gate.min_holdout_traces))
        traces, _ = trainable(newest, vocab_size)
        return traces if len(traces) >= self._gate.min_holdout_traces else []

    @torch.no_grad()
    def losses(self, distiller: Distiller, traces: Sequence[Trace]) -> np.ndarray:
        """float64 [traces]: the mean loss of each. A trace that weighs nothing beside the others counts 0."""
        values: list[float] = []
        for start in range(0, len(traces), self._config.batch_size):
            some = traces[start : start + self._config.batch_size]
            batch = distiller.collate(some)
            loss_N, weight_N, trace_N = distiller.losses(batch).cpu(), batch.weight_N, batch.trace_N
            for index in range(len(some)):
                here_N = trace_N == index
                total = float(weight_N[here_N].sum())
                values.append(float(weighted_mean(loss_N[here_N], weight_N[here_N])) / total if total else 0.0)
        return np.array(values)


def has_risen(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the loss is higher than before by more than chance (paired t), and by more than a trifle."""
    diff = after - before
    if not np.isfinite(diff).all():
        return True
    error = diff.std(ddof=1) / np.sqrt(len(diff))
    return bool(diff.mean() > NUM_ERRORS * error and diff.mean() > LEAST_RISE * before.mean())
