"""The working draft: the weights that the trainer carries from round to round, and their origin.

    checkpoints/N ────┐
                      ├─► begin_round ─► steps on the weights ─► finish_round ─► checkpoints/N+1
    base (a release) ─┘

A round is all or nothing: weights, moments and cursor reach the disk together, after it.

Candidates are not made of the weights themselves but of their exponential moving average over the
rounds, which begins with the base. Each round fits its own traces too closely, in a direction of
its own; the average keeps what the rounds agree on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from osd.config.schema import TrainerConfig
from osd.records import DraftRelease
from trainer import adapter
from trainer.checkpoint import Checkpoint, TrainerState, load_checkpoint, save_checkpoint
from trainer.distiller import Distiller
from trainer.draft import Draft, load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.replay import ReplayState

logger = logging.getLogger(__name__)

RECOVERY = 1.1
"""Factor by which a halved learning rate grows with every round that is kept, up to the configured
rate."""
LEAST_SCALE = 2.0**-10
"""Factor below which the learning rate is not halved again. Where every round fails for another
reason, as beside a draft that is damaged, it would take as many rounds to learn again."""


class WorkingDraft:
    """One line of weights, its optimizer, and what the trainer remembers beside them.

    Construction resumes from the newest checkpoint of the same draft and target.
    """

    def __init__(
        self,
        config: TrainerConfig,
        checkpoints: Path,
        draft: str,
        target_id: str,
        features: TargetFeatures | None = None,
    ) -> None:
        self._config, self._checkpoints, self._features = config, checkpoints, features
        self._distiller: Distiller | None = None
        self._average: dict[str, Tensor] = {}
        """float32, on the CPU; {} when nothing is averaged, or not yet."""
        self._is_mid_round = False
        self._is_from_base = False
        """Whether this round began with its base's weights, not with those of the last
        checkpoint."""
        self.state = TrainerState(draft=draft, target_id=target_id)
        self._resume()

    @property
    def distiller(self) -> Distiller:
        """The weights being trained. Exists from the first round on."""
        assert self._distiller is not None, "no round has begun"
        return self._distiller

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, as scaled now."""
        return self._config.learning_rate * self.state.rate_scale

    def begin_round(self, base: DraftRelease, line: int) -> Distiller:
        """Continue from the working weights if `base` belongs to them, else start from `base`.

        A round that began and never finished is forgotten first. Raises `ReleaseError` when `base`
        cannot be loaded.
        """
        if self._is_mid_round:
            self._resume()
        self._is_mid_round, self._is_from_base = True, False
        if self._distiller is None or line != self.state.line or not self._is_own(base):
            self.start_from(base)
        self.state = replace(
            self.state, round=self.state.round + 1, base_version=base.version, line=line
        )
        return self.distiller

    def finish_round(self, cursor: dict[str, int], seen: ReplayState) -> None:
        """Save the round. Raises `OSDError` when the disk does not take it."""
        self.state = replace(self.state, cursor=cursor, replay=seen)
        save_checkpoint(self._checkpoints, self.state, self.distiller, self._average)
        self._is_mid_round = False

    def start_from(self, base: DraftRelease) -> None:
        """Take the weights of a release, with a fresh optimizer."""
        model = load_draft(base.path, self._features)
        weights = adapter.below(model.hf)
        self._average = _on_cpu(weights) if self._config.averaging_rate < 1 else {}
        self._distiller_on(model).restart(weights, {})
        self._is_from_base = True
        self.state = replace(self.state, base_version=base.version, candidate_sha256="")

    def undo_round(self, base: DraftRelease, *, keeps_moments: bool = True) -> None:
        """Go back to the weights before this round, and to the optimizer's moments or to none."""
        found = None if self._is_from_base else self._load()
        if found is None:
            self.start_from(base)
        else:
            weights = adapter.below(found.model.hf)
            moments = found.moments if keeps_moments else {}
            self.distiller.restart(weights, moments, found.adapters)

    @torch.no_grad()
    def average(self) -> Mapping[str, Tensor]:
        """The weights of this round's candidate: the last one's, moved towards the trained ones.
        To be called once a round."""
        trained = adapter.merged(self.distiller.model.hf)
        if self._config.averaging_rate == 1:
            self._average = {}  # of a time when it was below 1, which is not to come back
            return trained
        trained = _on_cpu(trained)
        for name, value in self._average.items():
            if value.is_floating_point():
                trained[name] = value.lerp(trained[name], self._config.averaging_rate)
        self._average = trained
        return trained

    def note_candidate(self, sha256: str) -> None:
        """Remember the weights of this round's candidate: they may come back as a release."""
        self.state = replace(self.state, candidate_sha256=sha256)

    def adapt_rate(self, *, went_well: bool) -> None:
        """Halve the learning rate after a bad round; let it recover after a good one."""
        scale = self.state.rate_scale
        scale = min(1.0, scale * RECOVERY) if went_well else max(LEAST_SCALE, scale / 2)
        self.state = replace(self.state, rate_scale=scale)

    def note_change(self, changed_at: float) -> None:
        """The traffic is another since then (Unix time). The rate is as configured: what was too
        high for one traffic is not for another."""
        self.state = replace(self.state, rate_scale=1.0, changed_at=changed_at)

    def _resume(self) -> None:
        """Go to the newest checkpoint of this draft and target; without one, to the beginning. What
        fails on the way there, as for memory, leaves a round that began as one that began."""
        found = self._load()
        draft, target_id = self.state.draft, self.state.target_id
        self.state, self._average = TrainerState(draft=draft, target_id=target_id), {}
        if found is None or (found.state.draft, found.state.target_id) != (draft, target_id):
            return
        self.state, self._average = found.state, found.average
        weights = adapter.below(found.model.hf)
        distiller = self._distiller_on(found.model)
        try:
            distiller.restart(weights, found.moments, found.adapters)
        except ValueError as error:
            logger.warning(
                "the next round starts from the serving draft: the checkpoint is of other settings "
                "(%s)",
                error,
            )
            self.state = replace(self.state, base_version=None, candidate_sha256="")
        logger.info("trainer resumes after round %d", self.state.round)

    def _load(self) -> Checkpoint | None:
        return load_checkpoint(self._checkpoints, self._features)

    def _distiller_on(self, model: Draft) -> Distiller:
        """The distiller; the first call makes it of this model, which may get adapters."""
        self._distiller = self._distiller or Distiller(model, self._config)
        return self._distiller

    def _is_own(self, base: DraftRelease) -> bool:
        """Whether the weights grew from `base`, or `base` is their last candidate, published."""
        is_published = base.sha256 == self.state.candidate_sha256
        return base.version == self.state.base_version or is_published


def _on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no step changes."""
    return {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
