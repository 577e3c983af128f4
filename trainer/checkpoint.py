"""The trainer's memory on disk: weights, optimizer, buffer cursor, and what it knows of releases.

checkpoints/latest            name of the newest complete one, written last
checkpoints/12/state.json     TrainerState
checkpoints/12/model.safetensors, config.json     working weights, float32
checkpoints/12/optimizer.safetensors              AdamW's moments, "3.exp_avg"
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from osd.errors import ReleaseError
from osd.records import decode, encode
from trainer.draft import RowModel, load_draft
from trainer.files import numbered, point_to, prune, write_aside

logger = logging.getLogger(__name__)

KEEP = 2
"""Checkpoints kept: the newest, and one to fall back on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Everything but tensors.

    Example:
        TrainerState(draft="default", target_id="9f2c", round=12, base_version=3,
                     candidate_sha256="ab12...", cursor={"": 812})
    """

    draft: str
    target_id: str
    round: int = 0
    """Rounds finished, discarded ones included."""
    base_version: int | None = None
    """Release that the working weights grew from; None before the first round."""
    candidate_sha256: str = ""
    """Of the last candidate's weights, which may come back as a release."""
    cursor: dict[str, int] = field(default_factory=dict)
    """Traces read so far, in the buffer's terms."""


def save_checkpoint(directory: Path, state: TrainerState, model: RowModel, optimizer: torch.optim.Optimizer) -> None:
    """Write the state after round `state.round`. Raises `OSDError` when the disk does not take it."""
    moments = {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    with write_aside(directory / str(state.round)) as aside:
        model.hf.save_pretrained(aside)
        save_file(moments, aside / "optimizer.safetensors")
        (aside / "state.json").write_bytes(encode(state))
    point_to(directory / "latest", str(state.round))
    prune(directory, state.round, KEEP)


def load_checkpoint(directory: Path) -> tuple[TrainerState, RowModel, dict[str, torch.Tensor]] | None:
    """State, weights and optimizer moments of the newest readable checkpoint; None when there is none."""
    for path in _candidates(directory):
        try:
            state = decode((path / "state.json").read_bytes(), TrainerState)
            return state, load_draft(path), load_file(path / "optimizer.safetensors")
        except (OSError, ValueError, SafetensorError, ReleaseError) as error:
            logger.warning("checkpoint %s cannot be used (%s)", path, error)
    return None


def restore_moments(optimizer: torch.optim.Optimizer, moments: Mapping[str, torch.Tensor]) -> None:
    """Give the optimizer its moments back; learning rate and the like stay as configured now."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _candidates(directory: Path) -> list[Path]:
    """The one pointed to first, then older ones. Newer ones than the pointer were never finished."""
    try:
        latest = int((directory / "latest").read_text())
    except (OSError, ValueError):
        return []
    return [path for path in reversed(numbered(directory)) if int(path.name) <= latest]
