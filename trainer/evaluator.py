"""The evaluator: compares drafts on disk by replaying them on the newest held-out traces."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from osd.config.schema import GateConfig, TrainerConfig
from osd.errors import ReleaseError
from osd.records import DraftRelease, EarlierReport, EvalReport, Trace
from trainer.batch import check_rows, check_tokens, well_formed
from trainer.classes import LEAST_SIDE
from trainer.distiller import accelerator
from trainer.draft import Draft, load_draft
from trainer.evaluate import ReplayCounts, can_replay, change_of, compare, least_diff, replay_all
from trainer.guard import start_of_change
from trainer.replay import NO_JUDGES, Judges

if TYPE_CHECKING:
    from buffers.base import TraceBuffer
    from trainer.eagle3.features import TargetFeatures


logger = logging.getLogger(__name__)

CHANCE_TO_RECALL = 0.005
"""Chance that any earlier draft seems better than the serving one and is not. The gate allows more,
but looks are many, and what was learnt since the last release is lost with each recall. Requests
are few: the bootstrap, which the gate takes, would be ten times too sure of 8 (simulated)."""
NUM_BEFORE, NUM_LATELY = 16, 48
"""Held-out traces, and new ones of a round, among which its change of traffic is looked for."""


class Evaluator:
    """Loads drafts from their directories, in the dtype that would serve, and replays them.

    Holds no state that changes, so several threads may use it.
    """

    def __init__(
        self,
        config: TrainerConfig,
        gate: GateConfig,
        k: int,
        buffer: TraceBuffer,
        features: TargetFeatures | None = None,
        is_sampled: bool = False,
    ) -> None:
        """`is_sampled`: whether the engines draw draft tokens from the draft's distribution."""
        self._config, self._gate, self._k, self._buffer = config, gate, k, buffer
        self._features, self._is_sampled = features, is_sampled
        self._device = accelerator(config).device

    def judges_among(self, base: DraftRelease, new: Sequence[Trace]) -> Judges:
        """Those of a round's new traces that are to judge its candidate instead of teaching it:
        where too few are held out, as after a start or a recall, or too few since the traffic
        changed among them. As many at least are left to teach, else there are none; nor where
        nothing is replayed, as they would never be learnt. None has siblings (`n`), which may
        teach. Raises `ReleaseError`."""
        if not self._gate.judge_since_change or not self._config.replay_batches or not new:
            return NO_JUDGES
        model, least = self._load(base.path), max(self._gate.min_holdout_traces, LEAST_SIDE)
        held = [trace for trace in self._buffer.holdout(max(NUM_BEFORE, least)) if trace.num_rows]
        lately = [*held, *_by_time(new)[-max(NUM_LATELY, 2 * least) :]]
        lately = [trace for trace in lately if trace.finished_at >= base.judged_since]
        lately = _by_time(self._fit(lately, model.vocab_size))
        (counts,) = self._replay([model], lately)
        if not (start := change_of(counts, least)):
            return _judges(lately, self._gate.min_holdout_traces)
        return _judges(lately[start:], least, lately[start].finished_at)

    def compare(
        self, candidate: Path, base: DraftRelease, judges: Judges = NO_JUDGES
    ) -> EvalReport | None:
        """Replay both on the same traces, from `base.judged_since` on; None when they are too few.
        `judges`: further ones that the candidate has not learnt."""
        model = self._load(candidate)
        most, since = self._gate.max_holdout_traces, base.judged_since
        traces = self._holdout(most, model.vocab_size, since, judges.traces)
        if not traces:
            return None
        return compare(
            model,
            self._load(base.path),
            traces,
            self._k,
            self._gate,
            max_length=self._config.max_length,
            batch_size=self._config.batch_size,
            seed=self._config.seed,
            is_sampled=self._is_sampled,
            since=judges.since,
        )

    def alphas(self, releases: Sequence[DraftRelease], num_traces: int) -> dict[int, float]:
        """Version -> α on the same newest traces; {} when there are too few."""
        if not releases or len(self._buffer.holdout(num_traces)) < self._gate.min_holdout_traces:
            return {}  # loads no draft in vain
        models = {release.version: self._load(release.path) for release in releases}
        traces = self._holdout(num_traces, min(model.vocab_size for model in models.values()))
        if not traces:
            return {}
        counts = self._replay(list(models.values()), traces)
        alphas = {v: of_model.alpha for v, of_model in zip(models, counts, strict=True)}
        return {v: alpha for v, alpha in alphas.items() if alpha is not None}

    def compare_earlier(
        self,
        base: DraftRelease,
        earlier: Sequence[DraftRelease],
        traces: Sequence[Trace],
        num_traces: int,
    ) -> list[EarlierReport]:
        """Each of the earlier releases against `base` on the newest `num_traces` of these traces
        that can be replayed, or on those since one of them became better (`_surest`); [] when they
        are too few. One is loaded at a time, as there may be no memory for all. An earlier one that
        cannot be loaded, or has fewer tokens than `base`, is left out. Raises `ReleaseError`."""
        least = min(num_traces, self._gate.min_holdout_traces)
        if not earlier or len(traces) < least:
            return []  # loads no draft in vain
        model = self._load(base.path)
        vocab_size = model.vocab_size
        newest = _by_time(self._fit(traces, vocab_size))[-num_traces:]
        if len(newest) < least:
            return []
        (of_base,) = self._replay([model], newest)
        counts: dict[int, ReplayCounts] = {}
        for release in earlier:
            try:
                model = self._load(release.path)
            except ReleaseError as error:
                logger.warning("v%d is not compared: %s", release.version, error)
                continue
            if model.vocab_size >= vocab_size:
                (counts[release.version],) = self._replay([model], newest)
        return _surest(newest, of_base, counts, least)

    def _replay(self, models: Sequence[Draft], traces: Sequence[Trace]) -> list[ReplayCounts]:
        return replay_all(
            models,
            traces,
            self._k,
            max_length=self._config.max_length,
            batch_size=self._config.batch_size,
            is_sampled=self._is_sampled,
        )

    def _holdout(
        self, num: int, vocab_size: int, since: float = 0.0, judges: Sequence[Trace] = ()
    ) -> list[Trace]:
        """Those of the newest `num` held-out traces, and of the judges, that can be replayed and
        were finished since then; none when they are too few."""
        both = _by_time([*self._buffer.holdout(num), *judges])
        newest = [trace for trace in both if trace.finished_at >= since]
        traces = self._fit(newest, vocab_size)
        return traces if len(traces) >= self._gate.min_holdout_traces else []

    def _fit(self, traces: Sequence[Trace], vocab_size: int) -> list[Trace]:
        """Those that can be replayed."""
        return well_formed([t for t in traces if can_replay(t)], self._check, vocab_size)

    def _check(self, trace: Trace, vocab_size: int) -> None:
        (check_rows if self._is_sampled and trace.num_rows else check_tokens)(trace, vocab_size)

    def _load(self, path: str | Path) -> Draft:
        return load_draft(path, self._features).to(self._device)


def _judges(traces: Sequence[Trace], least: int, since: float = 0.0) -> Judges:
    """Those that judge beside the held-out ones of these, to be so many; none where there are
    enough, or too few."""
    num_missing = least - sum(trace.is_holdout for trace in traces)
    alone = [t for t in traces if not t.is_holdout and not t.is_one_of_several]
    if num_missing <= 0 or len(alone) < 2 * num_missing:
        return NO_JUDGES
    alone.sort(key=lambda trace: zlib.crc32(trace.trace_id.encode()))
    return Judges(alone[:num_missing], since)


def _surest(
    newest: Sequence[Trace], base: ReplayCounts, counts: Mapping[int, ReplayCounts], least: int
) -> list[EarlierReport]:
    """Reports of all releases on all of the newest traces, or on those since one of them became
    better than it was before, beyond doubt: where it is surer that any is better than `base`. The
    traffic has returned there, and a mean over both would tell nothing."""
    starts = {0, *(_start_of_return(each, base, least) for each in counts.values())}
    chance = CHANCE_TO_RECALL / max(1, len(counts) * len(starts))
    found = []
    for start in sorted(starts):
        is_since_R = np.arange(len(newest)) >= start
        of_base = base.of(is_since_R)
        reports = [
            EarlierReport(
                version=version,
                num_traces=len(newest) - start,
                alpha_base=of_base.alpha or 0.0,
                alpha=each.of(is_since_R).alpha or 0.0,
                diff_low=least_diff(each.of(is_since_R), of_base, chance),
                since=newest[start].finished_at,
            )
            for version, each in counts.items()
        ]
        found.append(reports)
    return max(found, key=lambda reports: max((one.diff_low for one in reports), default=0.0))


def _start_of_return(earlier: ReplayCounts, base: ReplayCounts, least: int) -> int:
    """Index of the first trace since which `earlier` is better, next to `base`, than before; 0
    where it is nowhere, or fewer than `least` came since."""
    alphas_R = [
        counts.accepted_RG.sum(1) / np.maximum(counts.tested_RG.sum(1), 1e-9)
        for counts in (earlier, base)
    ]
    start = start_of_change(alphas_R[0] - alphas_R[1], least_since=least)
    return start if start < len(alphas_R[0]) else 0


def _by_time(traces: Sequence[Trace]) -> list[Trace]:
    """The oldest first."""
    return sorted(traces, key=lambda trace: trace.finished_at)
