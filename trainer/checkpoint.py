"""The trainer's memory on disk: weights, optimizer, buffer cursor, and what it knows of releases.

checkpoints/latest                     name of the newest complete one, written last
checkpoints/12/state.json              TrainerState
checkpoints/12/model.safetensors       working weights, float32; with LoRA without the adapters
checkpoints/12/config.json             the model's configuration
checkpoints/12/adapter.safetensors     A and B of every adapter; empty without LoRA
checkpoints/12/optimizer.safetensors   AdamW's moments, "3.exp_avg"
checkpoints/12/average.safetensors     the weights averaged over rounds, float32; empty without
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from osd.common.memory import has_run_out
from osd.errors import ReleaseError
from osd.records import decode, encode
from trainer import adapter
from trainer.distiller import Distiller
from trainer.draft import Draft, load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.files import numbered, point_to, prune, read_tensors, write_aside
from trainer.optimizer import moments_of
from trainer.replay import ReplayState

logger = logging.getLogger(__name__)

KEEP = 2
"""Checkpoints kept: the newest, and one to fall back on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Everything but tensors.

    Example:
        TrainerState(draft="default", target_id="9f2c", round=12, base_version=3, line=1,
                     candidate_sha256="ab12...", cursor={"": 812})
    """

    draft: str
    target_id: str
    round: int = 0
    """Rounds finished, discarded ones included."""
    base_version: int | None = None
    """Release that the working weights were trained from; None before the first round."""
    line: int = 0
    """Line of releases (`ReleaseStore.line`) that the base belongs to."""
    candidate_sha256: str = ""
    """Of the weights of the last candidate, which may be published as a release."""
    cursor: dict[str, int] = field(default_factory=dict)
    """How far the buffer was read."""
    replay: ReplayState = field(default_factory=ReplayState)
    rate_scale: float = 1.0
    """Factor on the configured learning rate; below 1 after rounds that raised the loss."""
    changed_at: float = 0.0
    """Since when the traffic is as it is (Unix time, `trainer.guard`); 0 = no change was seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a finished round left on disk."""

    state: TrainerState
    model: Draft
    """A plain model, without the adapters."""
    moments: dict[str, Tensor]
    adapters: dict[str, Tensor]
    average: dict[str, Tensor]


def save_checkpoint(
    directory: Path,
    state: TrainerState,
    distiller: Distiller,
    average: dict[str, Tensor] | None = None,
) -> None:
    """Write the state after round `state.round`. Raises `OSDError` when the disk is full or
    read-only."""
    hf = distiller.model.hf
    with write_aside(directory / str(state.round)) as aside:
        distiller.model.save(aside, adapter.below(hf))
        save_file(adapter.adapters(hf), aside / "adapter.safetensors")
        save_file(moments_of(distiller.optimizer), aside / "optimizer.safetensors")
        save_file(average or {}, aside / "average.safetensors")
        (aside / "state.json").write_bytes(encode(state))
    point_to(directory / "latest", str(state.round))
    prune(directory, state.round, KEEP)


def load_checkpoint(directory: Path, features: TargetFeatures | None = None) -> Checkpoint | None:
    """The newest readable checkpoint; None when there is none. `features`: for heads, of their
    target."""
    for path in _candidates(directory):
        try:
            state = decode((path / "state.json").read_bytes(), TrainerState)
            return Checkpoint(
                state=state,
                model=load_draft(path, features),
                moments=read_tensors(path / "optimizer.safetensors"),
                adapters=read_tensors(path / "adapter.safetensors"),
                average=read_tensors(path / "average.safetensors"),
            )
        except (OSError, ValueError, SafetensorError, ReleaseError) as error:
            if has_run_out(error):
                raise
            logger.warning("checkpoint %s cannot be used (%s)", path, error)
    return None


def _candidates(directory: Path) -> list[Path]:
    """The one that `latest` names, then older ones. Newer ones were never finished."""
    try:
        latest = int((directory / "latest").read_text())
    except (OSError, ValueError):
        return []
    return [path for path in reversed(numbered(directory)) if int(path.name) <= latest]
