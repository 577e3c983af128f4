"""Which drafts vLLM can run, and how the weights of a live draft are read back.

Stand-ins take the place of vLLM's worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from osd.errors import SwapError
from serving.swap.proof import EVERY_RANK
from serving.swap.weights import check_method, read_back, sample_of_target


def worker(
    method: str = "draft_model", draft: nn.Module | None = None, target: nn.Module | None = None
) -> Any:
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(method=method)),
        get_draft_model=lambda: draft,
        model_runner=SimpleNamespace(get_model=lambda: target),
    )


@pytest.mark.parametrize(
    "method", ["eagle", "eagle3", "medusa", "mtp", "dflash", "ngram", "mlp_speculator"]
)
def test_only_draft_models_of_their_own_are_served(method: str) -> None:
    check_method(worker())
    with pytest.raises(
        SwapError, match=f"vLLM would draft by the method '{method}', which is not served"
    ):
        check_method(worker(method))


class Norms(nn.Module):
    """Vectors of its own, and one by another name that lies in the memory of another model."""

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.arange(3.0))
        self.borrowed = nn.Parameter(shared)


def test_what_lies_in_the_targets_memory_is_not_read_back_as_the_drafts() -> None:
    target = nn.LayerNorm(4)
    draft = nn.Sequential(Norms(target.weight.data), target)
    held = read_back(worker(draft=draft, target=target))
    assert [(holder, part.tolist()) for holder, part in held] == [(EVERY_RANK, [0.0, 1.0, 2.0])]


def test_of_the_target_vectors_and_rows_are_looked_at() -> None:
    target = nn.ParameterList(
        [
            torch.ones(5),
            torch.ones(200, 3),
            torch.ones(2, 2, 2),
            torch.ones(0),
            torch.ones(9, dtype=torch.float8_e5m2),
        ]
    )
    assert [tuple(part.shape) for part in sample_of_target(worker(target=target))] == [
        (5,),
        (64, 3),
    ]
