"""Training rounds: new traces, mixed with replayed ones, are distilled into a candidate.

    TraceBuffer ─read───► fresh ──┐
                └─sample─► replay ┴► collate ─► loss ─► AdamW ─► did the held-out loss rise?
                (some answered anew by the draft: `trainer.sampling`)
        no:  average with earlier rounds ─► candidates/N ─► evaluate on held-out traces
             ─► checkpoints/N ─► RoundOutcome
        yes: undo, halve the learning rate ───────────────► checkpoints/N ─► RoundOutcome

Waits for nothing: a round takes the traces that are there. A trainer that is killed starts again
from the last finished round. Given the same traces, and as many batches to replay, it ends with the
same weights, because all draws of a round depend only on the seed and the round's number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from osd.common.memory import told_when_out
from osd.common.model_directory import WEIGHTS
from osd.config.schema import GateConfig, TrainerConfig
from osd.errors import ReleaseError
from osd.exchange.transfer import read_part
from osd.records import NO_TRACES, DraftRelease, EarlierReport, EvalReport, RoundOutcome, RoundSize
from trainer.batch import TrainBatch, trainable
from trainer.distiller import Distiller, needing_less
from trainer.draft import RowModel, export_draft
from trainer.eagle3.features import features_of
from trainer.evaluator import Evaluator
from trainer.files import prune
from trainer.guard import LossGuard
from trainer.replay import Judges, NewTraces, ReplayMix, Step, Unread, size_of
from trainer.sampling.student import SamplingCost, student_of
from trainer.sampling.teacher import Teacher
from trainer.trackers import open_trackers, point
from trainer.working_draft import WorkingDraft

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

FOR_ONE_FIT = 4
"""Traces read for each that is to be replayed: some have a single token, or are malformed."""
KEEP_CANDIDATES = 3
"""Candidates left on disk; the releases made of them are copies."""
NON_FINITE = "non-finite loss"
"""`RoundOutcome.discarded` when a loss or a weight is not finite."""
OnStep = Callable[[int, int, float], None]
"""Called with the steps done, the expected number of steps, and the last loss."""


@dataclass(slots=True)
class _Progress:
    """What the steps of one round add up to."""

    losses: list[float] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    """Tokens, padding included."""
    is_finite: bool = False
    """Whether all losses and the weights at the end are finite."""
    holdout: tuple[float, float] | None = None
    """Mean loss over the watched traces before and after; None when there were too few."""
    has_harmed: bool = False
    """Whether it raised the held-out loss, and not for the sake of new traffic."""
    sampled: SamplingCost = SamplingCost()

    def add(self, loss: float, batch: TrainBatch) -> None:
        self.losses.append(loss)
        self.num_rows += batch.num_rows
        self.num_tokens += batch.num_tokens
        self.num_computed += batch.ids_BS.numel()

    @property
    def padding(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.num_tokens / self.num_computed if self.num_computed else 0.0


class _Result(NamedTuple):
    """How a round ended: with a candidate, or with the reason why it was discarded."""

    path: str = ""
    report: EvalReport | None = None
    discarded: str = ""
    files: Mapping[str, str] = MappingProxyType({})


class Trainer:
    """Distils one draft from a replay buffer, round by round.

    Its weights continue from round to round, also after the gate refused a candidate. It returns to
    the serving release when that is not its own newest (rollback, recall, pin), when its last
    candidate was significantly worse, or when a round's first loss is not finite. A round that made
    the loss infinite, or raised it on held-out traces, is undone. A discarded one halves the rate.

    Not thread-safe, except that `evaluate_releases` and `num_new_traces` may run during a round.
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
        teacher: Teacher | None = None,
        is_sampled: bool = False,
    ) -> None:
        """`teacher`: the target, which heads, and `trainer.sampling` student and mixed, need."""
        torch.set_num_threads(config.num_threads)
        disable_progress_bar()
        self._config, self._buffer, self._unread = config, buffer, Unread(buffer)
        self._candidates = directory / "candidates"
        self._features = features_of(config, teacher, k)
        self._remedy = needing_less(config, has_teacher=teacher is not None)
        self._evaluator = Evaluator(config, gate, k, buffer, self._features, is_sampled)
        self._guard, self._mix = LossGuard(config, gate, buffer), ReplayMix(config, buffer)
        self._student = student_of(config, teacher)
        self._trackers = open_trackers(config, directory, target_id)
        self._working = WorkingDraft(
            config, directory / "checkpoints", draft, target_id, self._features
        )

    def run_round(
        self,
        base: DraftRelease,
        on_step: OnStep | None = None,
        *,
        line: int = 0,
        size: RoundSize | None = None,
    ) -> RoundOutcome:
        """Train on new traces, write a candidate, evaluate it against `base` (the serving draft).

        `line` (`ReleaseStore.line`) changes when a release was chosen since the last round. `base`
        alone does not show that: a release that came and went looks like a refused candidate.
        `size`: instead of that of the configuration.

        Raises `OSDError` when the disk does not take candidate or checkpoint, or memory runs out,
        `ReleaseError` when `base` cannot be loaded. After any the next round begins as if this had
        not.
        """
        started, features_s = time.monotonic(), self._features_cpu_s()
        size = size or size_of(self._config)
        self._mix.begin_round(size.replay_batches)
        with told_when_out(self._remedy):
            distiller = self._working.begin_round(base, line)
            new = self._read_new(base, distiller.model.vocab_size, size.new_traces)
            progress = self._train(distiller, new, on_step)
            outcome = self._conclude(base, new, progress)
            self._finish(new)
        seconds, features_s = time.monotonic() - started, self._features_cpu_s() - features_s
        outcome = replace(outcome, seconds=seconds, features_cpu_s=features_s)
        for tracker in self._trackers:
            tracker.log(self._working.state.round, point(outcome, progress.num_tokens))
        return outcome

    def close(self) -> None:
        """Let trackers write what they still have. Call it after the last round."""
        for tracker in self._trackers:
            tracker.close()

    def forget(self) -> None:
        """Keep nothing in memory of texts that were read before: some were purged."""
        if self._features:
            self._features.forget()

    def num_new_traces(self) -> int:
        """Training traces that arrived since the last round."""
        return self._unread.num(self._working.state.cursor)

    def evaluate_releases(
        self, versions: Sequence[DraftRelease], num_traces: int
    ) -> dict[int, float]:
        """Version -> α of each release on the same newest held-out traces; {} when there are too
        few."""
        with told_when_out(self._remedy):
            return self._evaluator.alphas(versions, num_traces)

    def compare_earlier(
        self, base: DraftRelease, earlier: Sequence[DraftRelease], num_traces: int
    ) -> list[EarlierReport]:
        """Earlier releases against the serving one on the newest unread traces, which none of them
        has learnt; [] when they are fewer than `num_traces` and `gate.min_holdout_traces`."""
        with told_when_out(self._remedy):
            newest = self._unread.newest(self._working.state.cursor, FOR_ONE_FIT * num_traces)
            return self._evaluator.compare_earlier(base, earlier, newest.traces, num_traces)

    def read_candidate(
        self, path: str, files: Mapping[str, str], name: str, offset: int, size: int
    ) -> bytes:
        """A part of a file of one of the candidates. Raises `ReleaseError`."""
        if Path(path).parent != self._candidates or not Path(path).name.isdigit():
            raise ReleaseError(f"{path}: no candidate of this trainer")
        return read_part(Path(path), files, name, offset, size)

    # Reading and training

    def _read_new(self, base: DraftRelease, vocab_size: int, most: int) -> NewTraces:
        """The newest unread traces, at most so many."""
        read = self._unread.newest(self._working.state.cursor, most)
        traces, num_contradicting = trainable(read.traces, vocab_size)
        judges = self._evaluator.judges_among(base, traces)
        return NewTraces(traces, read.start, read.end, num_contradicting, judges)

    def _train(self, distiller: Distiller, new: NewTraces, on_step: OnStep | None) -> _Progress:
        """Step over new and replayed traces. Stop at the first step that is not finite."""
        progress = _Progress()
        watch = self._guard.begin(distiller, new, self._working.state.changed_at)
        if watch is not None and watch.has_changed:
            self._working.note_change(watch.changed_at)
        for index, (traces, num_steps) in enumerate(self._batches(distiller, new, progress)):
            batch = distiller.collate(traces)
            loss = distiller.step(batch, index, self._working.state.rate_scale)
            if loss is None:
                return progress
            progress.add(loss, batch)
            if on_step is not None:
                on_step(index + 1, num_steps, loss)
        progress.is_finite = distiller.is_finite()
        if watch is not None and progress.is_finite:
            before, after, progress.has_harmed = self._guard.end(distiller, watch)
            progress.holdout = before, after
        return progress

    def _batches(self, distiller: Distiller, new: NewTraces, progress: _Progress) -> Iterator[Step]:
        """Replayed traces are drawn part by part: those of a large round do not fit in memory."""
        vocab_size, size = distiller.model.vocab_size, self._config.batch_size
        fresh, seen = new.without_judges(new.traces), self._working.state.replay
        rng, sampling_rng, done, most = self._rng(0), self._rng(2), 0, self._mix.most_new
        for start in range(0, len(fresh), most):
            part = fresh[start : start + most]
            num_left = len(fresh) - start - len(part)
            pool = new.without_judges(self._mix.pool(part, new.end, seen, rng))
            pool, _ = trainable(pool, vocab_size)
            if self._student is not None:
                assert isinstance(distiller.model, RowModel), "a head has no answers of its own"
                pool, cost = self._student.replace(
                    distiller.model.hf, pool, distiller.max_length, sampling_rng
                )
                progress.sampled += cost
            steps = [pool[i : i + size] for i in range(0, len(pool), size)]
            num_steps = done + len(steps) + round(len(steps) * num_left / len(part))
            for traces in steps:
                yield traces, num_steps
            done += len(steps)

    def _rng(self, use: int) -> np.random.Generator:
        """The round's own randomness, one stream for each use."""
        return np.random.default_rng([self._config.seed, self._working.state.round, use])

    # The end of a round

    def _conclude(self, base: DraftRelease, new: NewTraces, progress: _Progress) -> RoundOutcome:
        """Keep or discard the round; the outcome without its duration."""
        rate = self._working.learning_rate
        result = _Result(discarded=NO_TRACES)
        if new.traces:
            result = self._keep_or_discard(base, new, progress)
            self._working.adapt_rate(went_well=not result.discarded)
        before, after = progress.holdout or (None, None)
        ages = [max(0.0, time.time() - trace.finished_at) for trace in new.traces]
        return RoundOutcome(
            draft=self._working.state.draft,
            base_version=base.version,
            target_id=self._working.state.target_id,
            path=result.path,
            files=dict(result.files),
            kind=self._config.method,
            num_steps=len(progress.losses),
            num_tokens=progress.num_rows,
            loss_first=progress.losses[0] if progress.losses else 0.0,
            loss_last=progress.losses[-1] if progress.losses else 0.0,
            seconds=0.0,
            trace_age_mean_s=float(np.mean(ages)) if ages else 0.0,
            trace_age_max_s=max(ages, default=0.0),
            eval=result.report,
            discarded=result.discarded,
            learning_rate=rate,
            holdout_loss_before=before,
            holdout_loss_after=after,
            padding=progress.padding,
            replay_batches=self._mix.batches,
            num_new_rows=sum(trace.num_rows for trace in new.traces),
            num_contradicting=new.num_contradicting,
            num_student_traces=progress.sampled.num_traces,
            sampling_cpu_s=progress.sampled.sampling_cpu_s,
            scoring_cpu_s=progress.sampled.scoring_cpu_s,
        )

    def _keep_or_discard(self, base: DraftRelease, new: NewTraces, progress: _Progress) -> _Result:
        if not progress.is_finite:
            if progress.losses:
                self._working.undo_round(base, keeps_moments=False)
            else:  # by the weights that it began with
                self._working.start_from(base)
            return _Result(discarded=NON_FINITE)
        if progress.has_harmed:
            return self._undo(base, progress)
        return self._export_and_evaluate(base, new.judges)

    def _undo(self, base: DraftRelease, progress: _Progress) -> _Result:
        assert progress.holdout is not None
        before, after = progress.holdout
        self._working.undo_round(base)
        return _Result(
            discarded=f"held-out loss rose from {before:.3g} to {after:.3g}; "
            "the learning rate is halved"
        )

    def _export_and_evaluate(self, base: DraftRelease, judges: Judges) -> _Result:
        number = self._working.state.round
        candidate = self._candidates / str(number)
        weights = self._working.average()
        files = export_draft(self._working.distiller.model, base.path, candidate, weights)
        prune(self._candidates, number, KEEP_CANDIDATES)
        report = self._evaluator.compare(candidate, base, judges)
        if report is not None and report.diff_high < 0:
            self._working.start_from(base)
        else:
            self._working.note_candidate(files[WEIGHTS])
        return _Result(str(candidate), report, files=files)

    def _finish(self, new: NewTraces) -> None:
        """Draw anchors among the new traces, then save the round."""
        state = self._working.state
        seen = self._mix.remember(
            new.traces, state.cursor, state.replay, self._rng(1), read=(new.start, new.end)
        )
        self._working.finish_round(new.end, seen)

    def _features_cpu_s(self) -> float:
        return self._features.cpu_s if self._features else 0.0
