"""The evaluator: compares drafts on disk by replaying them on the newest held-out traces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from osd.config.schema import GateConfig, TrainerConfig
from osd.errors import ReleaseError
from osd.records import DraftRelease, EarlierReport, EvalReport, Trace
from trainer.batch import check_rows, check_tokens, well_formed
from trainer.distiller import accelerator
from trainer.draft import Draft, load_draft
from trainer.evaluate import ReplayCounts, can_replay, change_of, compare, least_diff, replay_all

if TYPE_CHECKING:
    from buffers.base import TraceBuffer
    from trainer.eagle3.features import TargetFeatures


logger = logging.getLogger(__name__)

CHANCE_TO_RECALL = 0.01
"""Chance that any earlier draft seems better than the serving one and is not. The gate allows more,
but looks are many, and what was learnt since the last release is lost with each recall. Requests
are few: the bootstrap, which the gate takes, would be ten times too sure of 8 (simulated)."""
WITH_BEFORE = 2
"""Times as many requests on which the serving draft alone is replayed, to see whether the traffic
has changed among them."""


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

    def compare(self, candidate: Path, base: DraftRelease) -> EvalReport | None:
        """Replay both on the same traces, from `base.judged_since` on; None when they are too
        few."""
        model = self._load(candidate)
        most, since = self._gate.max_holdout_traces, base.judged_since
        traces = self._holdout(most, model.vocab_size, since)
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
        that can be replayed, where the traffic has changed on those since; [] when they are too
        few. One is loaded at a time, as there may be no memory for all. An earlier one that cannot
        be loaded, or has fewer tokens than `base`, is left out. Raises `ReleaseError`."""
        least = min(num_traces, self._gate.min_holdout_traces)
        if not earlier or len(traces) < least:
            return []  # loads no draft in vain
        model = self._load(base.path)
        vocab_size = model.vocab_size
        fit = self._fit(traces, vocab_size)
        newest = sorted(fit, key=lambda trace: trace.finished_at)[-WITH_BEFORE * num_traces :]
        if len(newest) < least:
            return []
        (of_base,) = self._replay([model], newest)
        start = max(change_of(of_base, least), len(newest) - num_traces)
        newest, of_base = newest[start:], of_base.of(np.arange(len(newest)) >= start)
        counts: dict[int, ReplayCounts] = {}
        for release in earlier:
            try:
                model = self._load(release.path)
            except ReleaseError as error:
                logger.warning("v%d is not compared: %s", release.version, error)
                continue
            if model.vocab_size >= vocab_size:
                (counts[release.version],) = self._replay([model], newest)
        chance = CHANCE_TO_RECALL / max(1, len(counts))  # that any seems better
        found = []
        for version, of_earlier in counts.items():
            report = EarlierReport(
                version=version,
                num_traces=len(newest),
                alpha_base=of_base.alpha or 0.0,
                alpha=of_earlier.alpha or 0.0,
                diff_low=least_diff(of_earlier, of_base, chance),
                since=newest[0].finished_at,
            )
            found.append(report)
        return found

    def _replay(self, models: Sequence[Draft], traces: Sequence[Trace]) -> list[ReplayCounts]:
        return replay_all(
            models,
            traces,
            self._k,
            max_length=self._config.max_length,
            batch_size=self._config.batch_size,
            is_sampled=self._is_sampled,
        )

    def _holdout(self, num: int, vocab_size: int, since: float = 0.0) -> list[Trace]:
        """Those of the newest `num` held-out traces that can be replayed and were finished since
        then; none when they are too few."""
        newest = [trace for trace in self._buffer.holdout(num) if trace.finished_at >= since]
        traces = self._fit(newest, vocab_size)
        return traces if len(traces) >= self._gate.min_holdout_traces else []

    def _fit(self, traces: Sequence[Trace], vocab_size: int) -> list[Trace]:
        """Those that can be replayed."""
        return well_formed([t for t in traces if can_replay(t)], self._check, vocab_size)

    def _check(self, trace: Trace, vocab_size: int) -> None:
        (check_rows if self._is_sampled and trace.num_rows else check_tokens)(trace, vocab_size)

    def _load(self, path: str | Path) -> Draft:
        return load_draft(path, self._features).to(self._device)
