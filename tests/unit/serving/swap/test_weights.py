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
from serving.swap import weights
from serving.swap.proof import EVERY_RANK, digest, digests, of_release, problem
from serving.swap.weights import read_back, sample_of_target
from serving.vllm.heads import check_method


def worker(
    method: str = "draft_model", draft: nn.Module | None = None, target: nn.Module | None = None
) -> Any:
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(method=method)),
        get_draft_model=lambda: draft,
        model_runner=SimpleNamespace(get_model=lambda: target),
    )


@pytest.mark.parametrize("method", ["eagle", "medusa", "mtp", "dflash", "ngram", "mlp_speculator"])
def test_only_draft_models_of_their_own_and_eagle_3_heads_are_served(method: str) -> None:
    check_method(worker())
    check_method(worker("eagle3"))
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


@pytest.mark.parametrize("carries", [True, False])
def test_an_embedding_of_the_targets_is_read_back_where_the_release_carries_it(
    carries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As heads of speculators do, which copy it."""
    monkeypatch.setattr(weights, "_is_head", lambda m: hasattr(m, "quant_method"))
    release = {"norm.weight": torch.arange(3.0), "d2t": torch.tensor([2, 2, 3])}
    rows = torch.randn(40, 6)
    release["lm_head.weight"] = torch.randn(3, 6)
    target = nn.Module()
    target.wte = Table(rows, 0, 1)
    draft = nn.Module()
    draft.embed_tokens = target.wte
    draft.lm_head = Table(release["lm_head.weight"], 0, 1, is_head=True)
    draft.norm = nn.Parameter(release["norm.weight"].clone())
    draft.draft_id_to_target_id = nn.Parameter(release["d2t"].clone(), requires_grad=False)
    if carries:
        release["embed_tokens.weight"] = rows
    live = worker(draft=draft, target=target)
    expected = digest(of_release(release, torch.float32))
    assert problem([digests(read_back(live, release.keys()))], expected) == ""
    draft.draft_id_to_target_id[1] += 1
    assert problem([digests(read_back(live, release.keys()))], expected) != ""


class Linear(nn.Module):
    """A rank's part of a linear layer, with the attributes of vLLM's."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        rank: int,
        num_ranks: int,
        num_inputs: int,
        is_split: bool = True,
        **more: Any,
    ) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.tp_rank, self.tp_size = rank, num_ranks
        self.input_size = num_inputs
        if is_split:
            self.input_size_per_partition = weight.shape[1]
        self.quant_method = SimpleNamespace(apply=lambda layer, x: x @ layer.weight.T)
        vars(self).update(more)


class Table(nn.Module):
    """A rank's part of an embedding."""

    def __init__(
        self, whole: torch.Tensor, rank: int, num_ranks: int, *, is_head: bool = False
    ) -> None:
        super().__init__()
        size = len(whole) // num_ranks
        first = rank * size
        self.weight = nn.Parameter(whole[first : first + size].clone())
        self.embedding_dim, self.org_vocab_size = whole.shape[1], len(whole)
        self.tp_rank, self.tp_size = rank, num_ranks
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=first, org_vocab_end_index=first + size
        )
        if is_head:
            self.quant_method = SimpleNamespace(apply=lambda layer, x: x @ layer.weight.T)


HEADS, HEAD_SIZE, INPUTS = 4, 3, 8


def tensors(num_kv_heads: int) -> dict[str, torch.Tensor]:
    """A checkpoint; a head is told from any other by its values."""
    random = torch.Generator().manual_seed(num_kv_heads)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    sizes = {"q": HEADS * HEAD_SIZE, "k": num_kv_heads * HEAD_SIZE, "v": num_kv_heads * HEAD_SIZE}
    attention = {f"{name}.weight": some(size, INPUTS) for name, size in sizes.items()}
    biases = {f"{name}.bias": some(size) for name, size in sizes.items()}
    rest = {"o.weight": some(INPUTS, sizes["q"]), "o.bias": some(INPUTS), "norm.weight": some(5)}
    rest["fc.weight"] = some(6, INPUTS)
    heads = {"embed_tokens.weight": some(40, 6), "lm_head.weight": some(40, 6)}
    return attention | biases | rest | heads


def part(whole: dict[str, torch.Tensor], rank: int, num_ranks: int) -> nn.Module:
    """What one rank has of it. Where ranks outnumber the heads of keys and values, some share
    one."""
    num_kv_heads = len(whole["k.bias"]) // HEAD_SIZE
    copies = max(1, num_ranks // num_kv_heads)
    own = {"q": (num_ranks, rank), "k": (num_ranks // copies, rank // copies)}
    own["v"] = own["k"]

    def stacked(kind: str) -> torch.Tensor:
        return torch.cat([whole[f"{n}.{kind}"].chunk(of)[i] for n, (of, i) in own.items()])

    made = nn.Module()
    made.qkv = Linear(
        stacked("weight"),
        stacked("bias"),
        rank,
        num_ranks,
        INPUTS,
        num_kv_head_replicas=copies,
        num_heads=HEADS // num_ranks,
        head_size=HEAD_SIZE,
    )
    made.o = Linear(
        whole["o.weight"].chunk(num_ranks, 1)[rank],
        whole["o.bias"],
        rank,
        num_ranks,
        HEADS * HEAD_SIZE,
    )
    made.fc = Linear(
        whole["fc.weight"].clone(), torch.empty(0), rank, num_ranks, INPUTS, is_split=False
    )
    made.norm = nn.ParameterList([whole["norm.weight"].clone()])
    made.embed_tokens = Table(whole["embed_tokens.weight"], rank, num_ranks)
    made.lm_head = Table(whole["lm_head.weight"], rank, num_ranks, is_head=True)
    return made


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_all_ranks_read_back_is_the_release(
    num_kv_heads: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of keys and values that several ranks hold, and what all hold, count once."""
    monkeypatch.setattr(weights, "_is_head", lambda m: hasattr(m, "quant_method"))
    release = tensors(num_kv_heads)
    target = nn.LayerNorm(2)
    drafts = [part(release, rank, num_ranks) for rank in range(num_ranks)]
    held = [digests(read_back(worker(draft=draft, target=target))) for draft in drafts]
    expected = digest(of_release(release, torch.float32))
    assert problem(held, expected) == ""
    for draft in drafts:
        for name, value in draft.named_parameters():
            if name.startswith("qkv.bias") or name == "norm.0":
                value.data[-1] += 0.5
                held = [digests(read_back(worker(draft=d, target=target))) for d in drafts]
                assert problem(held, expected) != "", f"{name} of one rank is another"
                value.data[-1] -= 0.5
