"""Muon's direction is orthogonal, its step is that of torch's own Muon, and it learns."""

from __future__ import annotations

import pytest
import torch

from osd.tiny.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_the_direction_is_about_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    found = orthogonalised(torch.randn(shape), 5)
    assert found.shape == shape
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.5 and singular.max() < 1.3


@pytest.mark.parametrize("shape", [(32, 24), (24, 32)])
def test_steps_are_those_of_torch_but_for_its_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(5)]
    found = []
    for kind, options in (
        (Muon, {}),
        (torch.optim.Muon, {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
    ):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.1, ns_steps=4, **options)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        found.append(parameter.detach() - start)
    ours, theirs = found
    assert (ours - theirs).norm() < 0.03 * theirs.norm()
