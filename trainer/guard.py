"""The loss on held-out traces before and after a round, which tells whether the round did harm.

Right after the traffic has changed, most held-out traces are still of before. A round that learns
the new traffic then raises the loss on them, and does what it is for. So it is no harm where the
loss was higher on the newest, and fell there. The newest are those that came with the round's own
traces; and, since a small round brings hardly one, those that came since the traffic changed. New
traces that judge the round (`Evaluator.judges_among`) are held-out ones for it. What the old
traffic lost by it is for the gate to judge.
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
from trainer.replay import NewTraces

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

NUM_WATCHED = 24
"""Held-out traces that are watched, or `gate.min_holdout_traces` if that is more. They are enough
to reveal a learning rate that is too high, and cost little."""
NUM_ERRORS = 2.0
"""A rise must exceed this many standard errors of the paired differences."""
LEAST_RISE = 0.02
"""A rise must also exceed this share of the loss."""
LEAST_NEWEST = 2
"""Newest held-out traces without which the mean of all decides."""
SURE, LEAST_SIDE = 4.5, 3
"""Standard errors by which the mean loss must be higher since some trace than before it for the
traffic to have changed there, and traces on either side. It is asked of every place: of sets of 24
traces of one traffic, independent of each other, at most 1 in 1,000 seems to have changed
(simulated), and 3 that lie 4 standard deviations higher are found in 4 of 5."""


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
    is_since_R: np.ndarray
    """bool; whether it came since the traffic changed. All, where no change is known."""
    changed_at: float = 0.0
    """When the first of these finished (Unix time); 0 = no change is known."""
    has_changed: bool = False
    """Whether no round before has seen that change."""


class LossGuard:
    """Measures a working draft on the newest held-out traces."""

    def __init__(self, config: TrainerConfig, gate: GateConfig, buffer: TraceBuffer) -> None:
        self._config, self._gate, self._buffer = config, gate, buffer

    def begin(self, distiller: Distiller, new: NewTraces, changed_at: float = 0.0) -> Watch | None:
        """Measure before a round on these traces; None where there is nothing to learn or too
        little to watch. `changed_at`: of the last change that is known (`Watch.changed_at`)."""
        traces = self.watched(distiller.model.vocab_size) if new.traces else []
        if not traces:
            return None
        traces = sorted([*traces, *new.judges.traces], key=lambda trace: trace.finished_at)
        batches = self.batches(distiller, traces)
        before_R = self.losses(distiller, batches)
        finished_R = np.array([trace.finished_at for trace in traces])
        is_own_R = finished_R >= min(trace.finished_at for trace in new.traces)
        if changed_at > max(finished_R[-1], *(trace.finished_at for trace in new.traces)):
            changed_at = 0.0  # a clock was set back
        first = int((finished_R < changed_at).sum())
        found = first + start_of_change(before_R[first:])
        if has_changed := found < len(traces):
            changed_at = float(finished_R[found])
        is_since_R = finished_R >= changed_at
        return Watch(batches, before_R, is_own_R, is_since_R, changed_at, has_changed)

    def end(self, distiller: Distiller, watch: Watch) -> tuple[float, float, bool]:
        """After it: the mean loss before, the mean loss now, and whether the round did harm."""
        after_R = self.losses(distiller, watch.batches)
        has_harmed = has_risen(watch.before_R, after_R, (watch.is_own_R, watch.is_since_R))
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


def has_risen(before_R: np.ndarray, after_R: np.ndarray, newest: Sequence[np.ndarray] = ()) -> bool:
    """Whether the loss rose significantly (paired t) and by more than `LEAST_RISE`, and not for the
    sake of new traffic; or is not finite. `newest`: bool [R] each; traces that may be new traffic.
    """
    diff_R = after_R - before_R
    if not np.isfinite(diff_R).all():
        return True
    if any(_learnt_new(before_R, diff_R, is_new_R) for is_new_R in newest):
        return False
    error = diff_R.std(ddof=1) / np.sqrt(len(diff_R))
    least = max(NUM_ERRORS * error, LEAST_RISE * before_R.mean())
    return bool(diff_R.mean() > least)


def _learnt_new(before_R: np.ndarray, diff_R: np.ndarray, is_new_R: np.ndarray) -> bool:
    """Whether the loss was higher on the new ones, and fell there by more than a standard error."""
    new_R = diff_R[is_new_R]
    if len(new_R) < LEAST_NEWEST or is_new_R.all():
        return False
    error = new_R.std(ddof=1) / np.sqrt(len(new_R))
    was_higher = before_R[is_new_R].mean() > before_R[~is_new_R].mean()
    return bool(was_higher and new_R.mean() < -error)


def start_of_change(loss_R: np.ndarray, least_since: int = LEAST_SIDE) -> int:
    """Index of the first trace since the loss is higher beyond doubt, so many traces before the end
    at least; of several such places it is that of the clearest rise. The number of traces, where
    there is none or a loss is not finite."""
    found, surest = len(loss_R), SURE
    if not np.isfinite(loss_R).all():
        return found
    for start in range(LEAST_SIDE, len(loss_R) - least_since + 1):
        before, since = loss_R[:start], loss_R[start:]
        # Of few the variance may be small by chance.
        variance = max(before.var(ddof=1), since.var(ddof=1))
        error = np.sqrt(variance / len(before) + variance / len(since))
        rise = since.mean() - before.mean()
        if rise > max(surest * error, LEAST_RISE * before.mean()):
            found, surest = start, rise / max(error, 1e-9)
    return found
