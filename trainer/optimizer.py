"""The optimizer's state as named tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def moments_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments, "3.exp_avg" for the fourth parameter."""
    return {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def restore_moments(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Restore the moments. Learning rate and other settings stay as configured."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
