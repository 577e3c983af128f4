"""Training rounds: new traces, mixed with replayed ones, are distilled into the draft; a candidate comes out.

    TraceBuffer ─read──► fresh ──┐
                └sample─► replay ┴► collate ► loss ► AdamW ► helped? ► candidates/N ► judge on held-out ► RoundOutcome
                                                             └ no: undo, halve the rate          └► checkpoints/N

A round is all or nothing: weights, moments and cursor reach the disk together, after it. A trainer killed at any
moment starts again from the last finished round and, given the same traces, ends with the same weights: what is drawn
in a round depends on the seed and the round's number alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from osd.config.schema import GateConfig, TrainerConfig
from osd.records import NO_TRACES, DraftRelease, EvalReport, RoundOutcome, Trace
from trainer import adapter
from trainer.batch import TrainBatch, trainable
from trainer.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from trainer.distiller import Distiller
from trainer.draft import RowModel, export_draft, load_draft
from trainer.files import prune
from trainer.guard import LossGuard, has_risen
from trainer.judge import Judge
from trainer.replay import ReplayMix
from trainer.trackers import open_trackers, point

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

logger = logging.getLogger(__name__)

PART = 64
"""New traces that are trained on together with what is replayed beside them."""
KEEP_CANDIDATES = 3
"""Candidates left on disk; the releases made of them are copies."""
NON_FINITE = "non-finite loss"
"""`RoundOutcome.discarded`, beside a held-out loss that rose and `NO_TRACES`."""
OnStep = Callable[[int, int, float], None]
RECOVERY = 1.1
"""A learning rate that was halved grows by so much with every round that is not undone, up to the configured one."""


@dataclass(slots=True)
class _Progress:
    """What the steps of one round add up to."""

    losses: list[float] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    """Tokens, padding included."""
    is_finite: bool = False
    """Whether all losses and the weights at the end are."""
    holdout: tuple[float, float] | None = None
    """Mean loss over the watched traces before and after."""
    has_risen: bool = False

    def add(self, loss: float, batch: TrainBatch) -> None:
        self.losses.append(loss)
        self.num_rows += batch.num_rows
        self.num_tokens += batch.num_tokens
        self.num_computed += batch.ids_BS.numel()


class Trainer:
    """Distils one draft from a replay buffer, round by round.

    It keeps its own line of weights from round to round, also when the gate refused them, so nothing learnt is lost.
    It goes back to the serving release when another one was chosen than its own newest (rollback, promote, pin), when
    its last candidate was significantly worse, and after a non-finite loss. A round that raised the loss on held-out
    traces is undone. After these two, the learning rate is halved.

    Not safe for use by several threads, except that `evaluate_releases` and `num_new_traces` may run during a round.
    """

    def __init__(
        self,
        config: TrainerConfig,
        gate: GateConfig,
        k: int,
        buffer: TraceBuffer,
        directory: Path,
        target_id: str,
        draft: str = "default",
    ) -> None:
        torch.set_num_threads(config.num_threads)
        disable_progress_bar()
        self._config, self._buffer = config, buffer
        self._checkpoints, self._candidates = Path(directory) / "checkpoints", Path(directory) / "candidates"
        self._judge = Judge(config, gate, k, buffer)
        self._guard = LossGuard(config, gate, buffer)
        self._mix = ReplayMix(config, buffer)
        self._trackers = open_trackers(config, Path(directory), target_id)
        self._state = TrainerState(draft=draft, target_id=target_id)
        self._distiller: Distiller | None = None
        self._is_mid_round = False
        self._is_from_base = False
        """Whether the round under way began with its base's weights, not with those of the last checkpoint."""
        self._resume()

    def run_round(self, base: DraftRelease, on_step: OnStep | None = None, *, line: int = 0) -> RoundOutcome:
        """Train on what is new, write a candidate, judge it against `base` (the draft that serves now).

        `line` (`ReleaseStore.line`) is another number than in the round before when a release was chosen in between,
        which `base` alone does not show: one that came and went looks like a candidate that was refused.

        `on_step` hears how many of the round's steps are done, of about how many, and the last loss.

        Raises `OSDError` when the disk does not take candidate or checkpoint, and `ReleaseError` when `base` cannot be
        loaded. After any error the next round begins as if this one never had.
        """
        started = time.monotonic()
        if self._is_mid_round:
            self._resume()
        self._is_mid_round, self._is_from_base = True, False
        distiller = self._follow(base, line)
        self._state = replace(self._state, round=self._state.round + 1)
        fresh, num_contradicting, start, cursor = self._read_new(distiller.model.vocab_size)
        progress = self._train(distiller, fresh, cursor, on_step)
        outcome = self._conclude(distiller, base, fresh, progress)
        seen = self._mix.remember(fresh, self._state.cursor, self._state.replay, self._rng(1), read_from=start)
        self._state = replace(self._state, cursor=cursor, replay=seen)
        save_checkpoint(self._checkpoints, self._state, distiller)
        self._is_mid_round = False
        outcome = replace(
            outcome,
            seconds=time.monotonic() - started,
            num_contradicting=num_contradicting,
            num_new_rows=sum(trace.num_rows for trace in fresh),
        )
        for tracker in self._trackers:
            tracker.log(self._state.round, point(outcome, progress.num_tokens))
        return outcome

    def close(self) -> None:
        """Let trackers write what they still have. To be called after the last round."""
        for tracker in self._trackers:
            tracker.close()

    def num_new_traces(self) -> int:
        """Training traces that arrived since the last round."""
        return self._buffer.num_unread(self._state.cursor)

    def evaluate_releases(self, versions: Sequence[DraftRelease], num_traces: int) -> dict[int, float]:
        """Version -> α of each release on the same newest held-out traces; {} when there are too few to judge."""
        return self._judge.alphas(versions, num_traces)

    # The working line of weights

    def _resume(self) -> None:
        """Go to the last finished round on disk, if it was for this draft and target; else to the very beginning."""
        self._is_mid_round = False
        draft, target_id = self._state.draft, self._state.target_id
        self._state = TrainerState(draft=draft, target_id=target_id)
        found = load_checkpoint(self._checkpoints)
        if found is None or (found.state.draft, found.state.target_id) != (draft, target_id):
            return
        self._state = found.state
        weights = adapter.below(found.model.hf)
        self._distiller = self._distiller or Distiller(found.model, self._config)
        try:
            self._distiller.restart(weights, found.moments, found.adapters)
        except ValueError as error:
            logger.warning(
                "the next round starts from the serving draft: the checkpoint is of other settings (%s)", error
            )
            self._state = replace(self._state, base_version=None, candidate_sha256="")
        logger.info("trainer resumes after round %d", self._state.round)

    def _follow(self, base: DraftRelease, line: int) -> Distiller:
        """Continue from the working weights if `base` belongs to them, else start from `base`."""
        distiller = self._distiller
        if distiller is None or line != self._state.line or not self._is_own(base):
            distiller = self._start_from(base)
        self._state = replace(self._state, base_version=base.version, line=line)
        return distiller

    def _is_own(self, base: DraftRelease) -> bool:
        """Whether the working weights grew from `base`, or `base` is their last candidate, published."""
        return base.version == self._state.base_version or base.sha256 == self._state.candidate_sha256

    def _start_from(self, base: DraftRelease) -> Distiller:
        model = load_draft(base.path)
        weights = adapter.below(model.hf)
        self._distiller = self._distiller or Distiller(model, self._config)
        self._distiller.restart(weights, {})
        self._is_from_base = True
        self._state = replace(self._state, base_version=base.version, candidate_sha256="")
        return self._distiller

    # One round

    def _read_new(self, vocab_size: int) -> tuple[list[Trace], int, dict[str, int], dict[str, int]]:
        """The newest unread traces that can be trained on, how many rows they lost to that, and the cursors before and
        behind all of them."""
        most = self._config.max_new_traces
        start = cursor = self._buffer.skip_to_newest(self._state.cursor, most)
        read: list[Trace] = []
        while len(read) < most:
            more, cursor = self._buffer.read(cursor, most - len(read))
            if not more:
                break
            read += more
        return *trainable(read, vocab_size), start, cursor

    def _train(
        self, distiller: Distiller, fresh: Sequence[Trace], cursor: dict[str, int], on_step: OnStep | None
    ) -> _Progress:
        """Steps over fresh and replayed traces. Stops at the first that is not finite."""
        progress = _Progress()
        watched = self._guard.watched(distiller.model.vocab_size) if fresh else []
        before = self._guard.losses(distiller, watched)
        for index, (traces, num_steps) in enumerate(self._batches(distiller, fresh, cursor)):
            batch = distiller.collate(traces)
            loss = distiller.step(batch, index, self._state.rate_scale)
            if loss is None:
                return progress
            progress.add(loss, batch)
            if on_step is not None:
                on_step(index + 1, num_steps, loss)
        progress.is_finite = distiller.is_finite()
        if watched and progress.is_finite:
            after = self._guard.losses(distiller, watched)
            progress.holdout = (float(before.mean()), float(after.mean()))
            progress.has_risen = has_risen(before, after)
        return progress

    def _batches(
        self, distiller: Distiller, fresh: Sequence[Trace], cursor: dict[str, int]
    ) -> Iterator[tuple[list[Trace], int]]:
        """The traces of each step, and how many steps the round will have, as far as is known by then.

        Drawn in parts: what replay adds to a large round would not fit in memory at once.
        """
        vocab_size, size, rng = distiller.model.vocab_size, self._config.batch_size, self._rng(0)
        done = 0
        for start in range(0, len(fresh), PART):
            part, num_left = fresh[start : start + PART], max(0, len(fresh) - start - PART)
            pool, _ = trainable(self._mix.pool(part, cursor, self._state.replay, rng), vocab_size)
            steps = [pool[i : i + size] for i in range(0, len(pool), size)]
            num_steps = done + len(steps) + round(len(steps) * num_left / len(part))
            for traces in steps:
                yield traces, num_steps
            done += len(steps)

    def _rng(self, use: int) -> np.random.Generator:
        """The round's own randomness, one stream for each use."""
        return np.random.default_rng([self._config.seed, self._state.round, use])

    def _conclude(
        self, distiller: Distiller, base: DraftRelease, fresh: Sequence[Trace], progress: _Progress
    ) -> RoundOutcome:
        """Export and judge, or discard."""
        path, report, discarded = "", None, ""
        rate = self._config.learning_rate * self._state.rate_scale
        if not fresh:
            discarded = NO_TRACES
        elif not progress.is_finite:
            discarded = NON_FINITE
            self._start_from(base)
        elif progress.has_risen:
            discarded = self._undo(distiller, base, progress)
        else:
            path, report = self._export_and_judge(distiller.model, base)
        if fresh:
            self._adapt_rate(went_well=not discarded)
        ages = [max(0.0, time.time() - trace.finished_at) for trace in fresh]
        return RoundOutcome(
            draft=self._state.draft,
            base_version=base.version,
            target_id=self._state.target_id,
            path=path,
            kind=self._config.method,
            num_steps=len(progress.losses),
            num_tokens=progress.num_rows,
            loss_first=progress.losses[0] if progress.losses else 0.0,
            loss_last=progress.losses[-1] if progress.losses else 0.0,
            seconds=0.0,
            trace_age_mean_s=float(np.mean(ages)) if ages else 0.0,
            trace_age_max_s=max(ages, default=0.0),
            eval=report,
            discarded=discarded,
            learning_rate=rate,
            holdout_loss_before=progress.holdout[0] if progress.holdout else None,
            holdout_loss_after=progress.holdout[1] if progress.holdout else None,
            padding=1 - progress.num_tokens / progress.num_computed if progress.num_computed else 0.0,
        )

    def _undo(self, distiller: Distiller, base: DraftRelease, progress: _Progress) -> str:
        """Go back to the weights before this round; why, in words."""
        assert progress.holdout is not None
        found = None if self._is_from_base else load_checkpoint(self._checkpoints)
        if found is None:
            self._start_from(base)
        else:
            distiller.restart(adapter.below(found.model.hf), found.moments, found.adapters)
        return "held-out loss rose from {:.3g} to {:.3g}; the learning rate is halved".format(*progress.holdout)

    def _adapt_rate(self, *, went_well: bool) -> None:
        scale = min(1.0, self._state.rate_scale * RECOVERY) if went_well else self._state.rate_scale / 2
        self._state = replace(self._state, rate_scale=scale)

    def _export_and_judge(self, model: RowModel, base: DraftRelease) -> tuple[str, EvalReport | None]:
        candidate = self._candidates / str(self._state.round)
        sha256 = export_draft(model, base.path, candidate)
        prune(self._candidates, self._state.round, KEEP_CANDIDATES)
        report = self._judge.compare(candidate, base)
        if report is not None and report.diff_high < 0:
            self._start_from(base)
        else:
            self._state = replace(self._state, candidate_sha256=sha256)
        return str(candidate), report
