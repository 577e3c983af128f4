"""Where an interrupted training goes on: one file with weights, optimizers and the number of
steps."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

MODEL = "model"
"""Before the names of weights; those of an optimizer's state begin with its number."""


def save(
    path: Path,
    model: torch.nn.Module,
    optimizers: Sequence[Any],
    step: int,
    losses: Sequence[float],
) -> None:
    """Write the state after `step` steps. The file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{MODEL}/{name}": value.detach() for name, value in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"{number}/{index}/{name}"] = value
    aside = path.with_suffix(".tmp")
    save_file(tensors, aside, metadata={"step": str(step), "losses": json.dumps(list(losses))})
    os.replace(aside, path)


def resume(
    path: Path, model: torch.nn.Module, optimizers: Sequence[Any]
) -> tuple[int, list[float]]:
    """(steps done, last losses) after taking over what `save` wrote; (0, []) without a file."""
    if not path.exists():
        return 0, []
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(tensors.pop(f"{MODEL}/{name}"))
    for number, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        optimizer.load_state_dict({**whole, "state": _of_one(tensors, number)})
    return int(metadata["step"]), json.loads(metadata["losses"])


def _of_one(tensors: dict[str, Tensor], number: int) -> dict[int, dict[str, Tensor]]:
    """The state of one optimizer, by the number of the weight."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        owner, index, name = key.split("/")
        if owner == str(number):
            found.setdefault(int(index), {})[name] = value
    return found
