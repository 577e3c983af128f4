"""Training rounds: new traces, mixed with replayed ones, are distilled into the draft; a candidate comes out.

    TraceBuffer ─read──► fresh ──┐
                └sample─► replay ┴► collate ► forward KL ► AdamW ► candidates/N ► judge on held-out ► RoundOutcome
                                                                                └► checkpoints/N

A round is all or nothing: weights, moments and cursor reach the disk together, after it. A trainer killed at any
moment starts again from the last finished round and, given the same traces, ends with the same weights: what is drawn
in a round depends on the seed and the round's number alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from osd.config import GateConfig, TrainerConfig
from osd.records import DraftRelease, EvalReport, RoundOutcome, Trace
from trainer.batch import TrainBatch, check_rows, collate, well_formed
from trainer.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from trainer.distiller import Distiller
from trainer.draft import RowModel, export_draft, load_draft
from trainer.files import prune
from trainer.judge import Judge

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

logger = logging.getLogger(__name__)

KEEP_CANDIDATES = 3
"""Candidates left on disk; the releases made of them are copies."""
NO_TRACES, NON_FINITE = "no traces", "non-finite loss"
"""`RoundOutcome.discarded`."""


@dataclass(slots=True)
class _Progress:
    """What the steps of one round add up to."""

    losses: list[float] = field(default_factory=list)
    num_rows: int = 0
    is_finite: bool = True


class Trainer:
    """Distils one draft from a replay buffer, round by round.

    It keeps its own line of weights from round to round, also when the gate refused them, so nothing learnt is lost.
    It goes back to the serving release when that is not one it grew from (rollback, promote, pin), when its last
    candidate was significantly worse, and after a non-finite loss.

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
        self._state = TrainerState(draft=draft, target_id=target_id)
        self._distiller: Distiller | None = None
        self._is_mid_round = False
        self._resume()

    def run_round(self, base: DraftRelease) -> RoundOutcome:
        """Train on what is new, write a candidate, judge it against `base` (the draft that serves now).

        Raises `OSDError` when the disk does not take candidate or checkpoint, and `ReleaseError` when `base` cannot be
        loaded. After any error the next round begins as if this one never had.
        """
        started = time.monotonic()
        if self._is_mid_round:
            self._resume()
        self._is_mid_round = True
        distiller = self._follow(base)
        self._state = replace(self._state, round=self._state.round + 1)
        fresh, cursor = self._read_new(distiller.model.vocab_size)
        progress = self._train(distiller, fresh, cursor)
        outcome = self._conclude(distiller, base, fresh, progress)
        self._state = replace(self._state, cursor=cursor)
        save_checkpoint(self._checkpoints, self._state, distiller.model, distiller.optimizer)
        self._is_mid_round = False
        return replace(outcome, seconds=time.monotonic() - started)

    def num_new_traces(self) -> int:
        """Training traces that arrived since the last round."""
        return self._buffer.num_unread(self._state.cursor)

    def restart_from_base(self) -> None:
        """Let the next round start from its base (for a candidate that was published, then rolled back live).

        To be called between rounds. The trainer sees only what serves when a round begins: a release that came and
        went in between looks to it like a candidate that was refused.
        """
        if self._is_mid_round:
            self._resume()
        self._state = replace(self._state, base_version=None, candidate_sha256="")
        if self._distiller is not None:
            save_checkpoint(self._checkpoints, self._state, self._distiller.model, self._distiller.optimizer)

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
        if found is None or (found[0].draft, found[0].target_id) != (draft, target_id):
            return
        self._state, model, moments = found
        self._distiller = self._distiller or Distiller(model, self._config)
        self._distiller.restart(model, moments)
        logger.info("trainer resumes after round %d", self._state.round)

    def _follow(self, base: DraftRelease) -> Distiller:
        """Continue from the working weights if `base` belongs to them, else start from `base`."""
        if self._distiller is None or not self._is_own(base):
            return self._start_from(base)
        self._state = replace(self._state, base_version=base.version)
        return self._distiller

    def _is_own(self, base: DraftRelease) -> bool:
        """Whether the working weights grew from `base`, or `base` is their last candidate, published."""
        return self._state.base_version is not None and (
            base.version == self._state.base_version or base.sha256 == self._state.candidate_sha256
        )

    def _start_from(self, base: DraftRelease) -> Distiller:
        model = load_draft(base.path)
        self._distiller = self._distiller or Distiller(model, self._config)
        self._distiller.restart(model)
        self._state = replace(self._state, base_version=base.version, candidate_sha256="")
        return self._distiller

    # One round

    def _read_new(self, vocab_size: int) -> tuple[list[Trace], dict[str, int]]:
        """The newest unread traces that can be trained on, and the cursor behind all of them."""
        most = self._config.max_new_traces
        cursor = self._buffer.skip_to_newest(self._state.cursor, most)
        read: list[Trace] = []
        while len(read) < most:
            more, cursor = self._buffer.read(cursor, most - len(read))
            if not more:
                break
            read += more
        return well_formed([t for t in read if t.num_rows], check_rows, vocab_size), cursor

    def _train(self, distiller: Distiller, fresh: Sequence[Trace], cursor: dict[str, int]) -> _Progress:
        """Steps over the fresh traces, each followed by replayed ones. Stops at the first that is not finite."""
        progress = _Progress()
        for index, batch in enumerate(self._batches(fresh, cursor, distiller.model.vocab_size)):
            loss = distiller.step(batch, index)
            if loss is None:
                progress.is_finite = False
                return progress
            progress.losses.append(loss)
            progress.num_rows += batch.num_rows
        progress.is_finite = distiller.is_finite()
        return progress

    def _batches(self, fresh: Sequence[Trace], cursor: dict[str, int], vocab_size: int) -> Iterator[TrainBatch]:
        """One batch of fresh traces, then `replay_batches` drawn from all that was ever read, and so on."""
        size, max_length = self._config.batch_size, self._config.max_length
        rng = np.random.default_rng([self._config.seed, self._state.round])
        for start in range(0, len(fresh), size):
            yield collate(fresh[start : start + size], max_length, vocab_size)
            for _ in range(self._config.replay_batches):
                seen = [t for t in self._buffer.sample(size, rng, cursor) if t.num_rows]
                if seen := well_formed(seen, check_rows, vocab_size):
                    yield collate(seen, max_length, vocab_size)

    def _conclude(
        self, distiller: Distiller, base: DraftRelease, fresh: Sequence[Trace], progress: _Progress
    ) -> RoundOutcome:
        """Export and judge, or discard."""
        path, report, discarded = "", None, ""
        if not fresh:
            discarded = NO_TRACES
        elif not progress.is_finite:
            discarded = NON_FINITE
            self._start_from(base)
        else:
            path, report = self._export_and_judge(distiller.model, base)
        ages = [max(0.0, time.time() - trace.finished_at) for trace in fresh]
        return RoundOutcome(
            draft=self._state.draft,
            base_version=base.version,
            target_id=self._state.target_id,
            path=path,
            num_steps=len(progress.losses),
            num_tokens=progress.num_rows,
            loss_first=progress.losses[0] if progress.losses else 0.0,
            loss_last=progress.losses[-1] if progress.losses else 0.0,
            seconds=0.0,
            trace_age_mean_s=float(np.mean(ages)) if ages else 0.0,
            trace_age_max_s=max(ages, default=0.0),
            eval=report,
            discarded=discarded,
        )

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
