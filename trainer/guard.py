"""The loss on held-out traces before and after a round, which tells whether the round did harm.

Right after the traffic has changed, most held-out traces are still of before. A round that learns
the new traffic then raises the loss on them, and does what it is for. So it is no harm where the
loss was higher on those that came with the round's own traces, or since the traffic changed, and
fell there. What the old traffic lost by it is for the gate to judge.
"""

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
LEAST_CURRENT = 2
"""Current held-out traces that it takes to ask them by themselves."""
OTHER_ERRORS, LEAST_OTHER = 4.5, 3
"""Standard errors by which the loss of so many of the newest exceeds that of all earlier ones where
the traffic has changed. It is asked of every place between two of them: of 24 traces of one kind at
most 1 in 1,000 sets seems to have changed (simulated), and 3 of which each is 4 standard deviations
above are found in 4 of 5."""


class Watched(NamedTuple):
    """Held-out traces that are measured together."""

    batch: TrainBatch
    num_traces: int


class Watch(NamedTuple):
    """What is known before a round. R: watched traces, in the order of `batches`: the oldest
    first."""

    batches: list[Watched]
    before_R: np.ndarray
    """float64; mean losses."""
    is_own_R: np.ndarray
    """bool; whether the trace came with the round's own, or later."""

    @property
    def is_current_R(self) -> np.ndarray:
        """bool; whether the trace came with the round's own, or since the traffic changed. Small
        rounds bring a held-out trace each."""
        return self.is_own_R | (np.arange(len(self.before_R)) >= _last_rise(self.before_R))

    def shows_other_traffic(self) -> bool:
        """Whether the traffic has changed, and nothing showed it before the round's own traces."""
        earlier_R = self.before_R[~self.is_own_R]
        is_known = _last_rise(earlier_R) < len(earlier_R)
        return not is_known and _last_rise(self.before_R) < len(self.before_R)


class LossGuard:
    """Measures a working draft on the newest held-out traces."""

    def __init__(self, config: TrainerConfig, gate: GateConfig, buffer: TraceBuffer) -> None:
        self._config, self._gate, self._buffer = config, gate, buffer

    def begin(self, distiller: Distiller, new: Sequence[Trace]) -> Watch | None:
        """Measure before a round on the traces `new`; None where there is nothing to learn or too
        little to watch."""
        traces = self.watched(distiller.model.vocab_size) if new else []
        if not traces:
            return None
        since = min(trace.finished_at for trace in new)
        is_own_R = np.array([trace.finished_at >= since for trace in traces])
        batches = self.batches(distiller, traces)
        return Watch(batches, self.losses(distiller, batches), is_own_R)

    def end(self, distiller: Distiller, watch: Watch) -> tuple[float, float, bool]:
        """After it: the mean loss before, the mean loss now, and whether the round did harm."""
        after_R = self.losses(distiller, watch.batches)
        has_harmed = has_risen(watch.before_R, after_R, watch.is_current_R)
        return float(watch.before_R.mean()), float(after_R.mean()), has_harmed

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


def has_risen(before_R: np.ndarray, after_R: np.ndarray, is_current_R: np.ndarray) -> bool:
    """Whether the loss rose significantly (paired t) and by more than `LEAST_RISE`, and not for the
    sake of the current traces; or is not finite."""
    diff_R = after_R - before_R
    if not np.isfinite(diff_R).all():
        return True
    if _learnt_new(before_R, diff_R, is_current_R):
        return False
    error = diff_R.std(ddof=1) / np.sqrt(len(diff_R))
    least = max(NUM_ERRORS * error, LEAST_RISE * before_R.mean())
    return bool(diff_R.mean() > least)


def _learnt_new(before_R: np.ndarray, diff_R: np.ndarray, is_current_R: np.ndarray) -> bool:
    """Whether the loss was higher where the traces are current, and fell there by more than a
    standard error."""
    current_R = diff_R[is_current_R]
    if len(current_R) < LEAST_CURRENT or is_current_R.all():
        return False
    error = current_R.std(ddof=1) / np.sqrt(len(current_R))
    was_higher = before_R[is_current_R].mean() > before_R[~is_current_R].mean()
    return bool(was_higher and current_R.mean() < -error)


def _last_rise(loss_R: np.ndarray) -> int:
    """Index of the first trace since the loss is higher beyond doubt, the number of traces where it
    is nowhere. Of several such places it is the clearest."""
    found, surest = len(loss_R), OTHER_ERRORS
    for start in range(LEAST_OTHER, len(loss_R) - LEAST_OTHER + 1):
        earlier, since = loss_R[:start], loss_R[start:]
        # Of few the variance may be small by chance.
        variance = max(earlier.var(ddof=1), since.var(ddof=1))
        error = np.sqrt(variance / len(earlier) + variance / len(since))
        rise = since.mean() - earlier.mean()
        if rise > max(surest * error, LEAST_RISE * earlier.mean()):
            found, surest = start, rise / max(error, 1e-9)
    return found
