"""Muon in float32. torch's own works in bfloat16, which most CPUs emulate, ten times slower.

    gradient ─► momentum (Nesterov) ─► nearest orthogonal matrix (Newton-Schulz) ─► step

Jordan et al. 2024; the step is scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial that pushes all singular values towards 1."""


class Muon(torch.optim.Optimizer):
    """For matrices only; `ns_steps` Newton-Schulz steps each."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, ns_steps: int = 4
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault(
                    "momentum_buffer", torch.zeros_like(parameter)
                )
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                direction = orthogonalised(
                    parameter.grad.lerp(buffer, group["momentum"]), group["ns_steps"]
                )
                parameter.add_(
                    direction, alpha=-0.2 * math.sqrt(max(parameter.shape)) * group["lr"]
                )


def orthogonalised(matrix: Tensor, num_steps: int) -> Tensor:
    """Approximately the nearest orthogonal matrix, with singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    found = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = found @ found.mT
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if matrix.shape[0] > matrix.shape[1] else found
