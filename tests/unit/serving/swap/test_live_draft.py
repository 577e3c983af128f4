"""New weights are built beside a live draft and put in place.

Whatever fails, the old weights can be put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from osd.errors import SwapError
from osd.records import DraftRelease
from serving.swap import live_draft as of_live_draft
from serving.swap import proof
from serving.swap.live_draft import LiveDraft, Weights, storage
from serving.swap.proof import SwapProof
from serving.swap.ranks import Ranks
from serving.swap.swap import DraftSwapper
from tests.support.draft_releases import written
from tests.support.ranks import ranks_of
from tests.support.starving import MemoryFor

V, H = 8, 4
IDS = torch.arange(V)
Checkpoint = dict[str, torch.Tensor]


class Linear(nn.Module):
    """Answers with a copy of its matrix that is packed for the purpose, as engines on CPUs do; the
    matrix is gone."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = parameter(rows, H)
        self.bias = parameter(rows)
        self.packed: torch.Tensor = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed + self.bias


class Head(nn.Module):
    """Its matrix is the embedding's own, of which it packs a copy."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.packed = torch.empty(0)


class Model(nn.Module):
    """An embedding, a matrix in two parts, a norm that checkpoints hold as a buffer, and a tied
    head."""

    def __init__(self, embed: nn.Parameter | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, H)
        self.embed_tokens.weight = parameter(V, H) if embed is None else embed
        self.qk = Linear(2 * H)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(2 * H))
        self.head = Head(self.embed_tokens.weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            into, _, part = name.partition(":")
            whole = own[into].data
            (whole.chunk(2)["qk".index(part)] if part else whole).copy_(tensor.clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.qk(self.embed_tokens(ids)) * self.scale
        return hidden.reshape(len(ids), 2, H).sum(1) @ self.head.packed


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


def unpacked(layer: nn.Module, twin: nn.Module) -> Checkpoint:
    return {"weight": parameter(layer.rows, H)} if isinstance(layer, Linear) else {}


def pack(layer: nn.Module) -> None:
    if isinstance(layer, (Linear, Head)):
        layer.packed = layer.weight.detach().T.contiguous()
    if isinstance(layer, Linear):
        layer.weight = parameter(0)


def checkpoint(seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens.weight": (V, H),
        "qk.weight:q": (H, H),
        "qk.weight:k": (H, H),
        "qk.bias": (2 * H,),
        "scale": (2 * H,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def started(seed: int, embed: nn.Parameter | None = None) -> Model:
    """As an engine has it after its start."""
    model = Model(embed)
    model.load_weights(checkpoint(seed).items())
    for layer in model.modules():
        pack(layer)
    return model


def live_draft(
    model: Model, target: nn.Module | None = None, pack: Callable[[nn.Module], None] = pack
) -> LiveDraft:
    return LiveDraft(model, target, unpacked, pack)


def test_what_is_put_serves_as_if_the_engine_had_started_with_it() -> None:
    model = started(1)
    live = live_draft(model)
    where = [
        tensor.data_ptr() for tensor in (model.embed_tokens.weight, model.qk.bias, model.scale)
    ]
    for seed in (2, 3):
        live.put(live.build(checkpoint(seed)))
        assert torch.equal(model(IDS), started(seed)(IDS))
    assert [
        tensor.data_ptr() for tensor in (model.embed_tokens.weight, model.qk.bias, model.scale)
    ] == where, "CUDA graphs"
    assert model.head.weight is model.embed_tokens.weight and not model.qk.weight.numel()


def test_the_live_draft_stays_as_it_is_while_weights_are_built() -> None:
    model = started(1)
    before, packed = model(IDS), model.qk.packed
    live = live_draft(model)
    live.build(checkpoint(2))
    assert torch.equal(model(IDS), before) and model.qk.packed is packed


def test_putting_in_and_back_takes_no_memory() -> None:
    model = started(1)
    live = live_draft(model)
    weights = live.build(checkpoint(2))
    with MemoryFor(0):
        live.put(weights)
    assert torch.equal(model(IDS), started(2)(IDS))
    with MemoryFor(0):
        live.put_back()
    assert torch.equal(model(IDS), started(1)(IDS))


@pytest.mark.parametrize("kind", ["values", "attributes"])
def test_what_was_put_in_half_is_taken_out_to_what_was_kept_last(kind: str) -> None:
    model = started(1)
    live = live_draft(model)
    good = live.build(checkpoint(2))
    live.put(good)
    live.keep(good)
    weights = live.build(checkpoint(3))
    half = {kind: getattr(weights, kind)}
    live.put(Weights(**{"values": {}, "attributes": {}, **half}))
    assert not torch.equal(model(IDS), started(2)(IDS))
    live.put_back()
    assert torch.equal(model(IDS), started(2)(IDS))


def test_weights_that_were_built_but_never_kept_are_not_what_is_put_back() -> None:
    model = started(1)
    live = live_draft(model)
    for seed in (2, 3):
        live.put(live.build(checkpoint(seed)))
    live.put_back()
    assert torch.equal(model(IDS), started(1)(IDS))


def test_what_a_checkpoint_lacks_stays() -> None:
    model = started(1)
    live = live_draft(model)
    lacking = {
        name: tensor for name, tensor in checkpoint(2).items() if name not in ("qk.bias", "scale")
    }
    live.put(live.build(lacking))
    assert torch.equal(model.qk.bias, checkpoint(1)["qk.bias"]) and torch.equal(
        model.scale, checkpoint(1)["scale"]
    )
    assert torch.equal(model.embed_tokens.weight, checkpoint(2)["embed_tokens.weight"])


def read_back(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    units = torch.eye(H)[proof.columns(H)]
    matrices = (units @ model.head.packed, units @ model.qk.packed)
    rows = model.embed_tokens.weight[proof.rows(V)]
    for part in (rows, *matrices, model.qk.bias, model.scale):
        yield proof.EVERY_RANK, part


def test_a_swap_that_runs_out_of_memory_anywhere_leaves_the_old_draft(tmp_path: Path) -> None:
    """The first of what a swap takes is refused, and all after it; then the second; until the swap
    succeeds."""
    releases = [
        written(tmp_path / f"v{version}", checkpoint(version), version=version)
        for version in (1, 2, 3)
    ]
    model = started(1)
    swapper = DraftSwapper(
        releases[0],
        live_draft(model),
        SwapProof(lambda: read_back(model), torch.float32),
        begin=lambda work: work(),
    )
    ranks = ranks_of(swapper)
    for release in releases[1:]:
        before = model(IDS)
        for room in range(300):
            error = swap_with_memory_for(room, ranks, release)
            if not error:
                break
            assert torch.equal(model(IDS), before), f"room for {room}: {error}"
            assert "could not be restored" not in error
            assert swapper.version == release.version - 1 and swapper.prove() == ""
        assert room > 30 and torch.equal(model(IDS), started(release.version)(IDS))


def swap_with_memory_for(room: int, ranks: Ranks, release: DraftRelease) -> str:
    with MemoryFor(room):
        _, committed = asyncio.run(ranks.swap(release))
    return committed.error


class Target(nn.Module):
    """Calls its embedding by another name, and has a packed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, H)
        self.wte.weight = parameter(V, H)
        self.lm_head = Linear(2 * H)


@pytest.mark.parametrize("is_one_object", [True, False])
def test_a_load_that_would_write_into_the_target_is_refused_whatever_the_names(
    is_one_object: bool,
) -> None:
    target = Target()
    shared = target.wte.weight
    model = started(
        1, shared if is_one_object else nn.Parameter(shared.data[:], requires_grad=False)
    )
    before, bits = model(IDS), shared.clone()
    live = live_draft(model, target)
    with pytest.raises(SwapError, match=r"it would write into the target's wte\.weight"):
        live.build(checkpoint(2))
    others = {
        name: tensor for name, tensor in checkpoint(2).items() if name != "embed_tokens.weight"
    }
    live.put(live.build(others))
    assert torch.equal(shared, bits) and not torch.equal(model(IDS), before)
    live.put_back()
    assert torch.equal(model(IDS), before)


@pytest.mark.parametrize("at_once", [1, 3, 10**6])
def test_what_the_target_holds_already_is_left_as_it_is(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's checkpoint may hold a copy of the target's embedding, in another precision too."""
    monkeypatch.setattr(of_live_draft, "VALUES_AT_ONCE", at_once)
    target = Target()
    shared = target.wte.weight
    model = started(1, shared)
    live, release = live_draft(model, target), checkpoint(2)
    release["embed_tokens.weight"] = shared.detach().double()
    before, version = shared.clone(), shared._version
    live.put(live.build(release))
    assert torch.equal(shared, before) and shared._version == version
    assert torch.equal(model.qk.bias, started(2).qk.bias)
    release["embed_tokens.weight"][-1, -1] += 0.5
    with pytest.raises(SwapError, match="it carries another embedding than the target's"):
        live.build(release)


def test_layers_of_the_target_are_not_packed_again() -> None:
    target, model = Target(), started(1)
    model.qk = target.lm_head
    pack(model.qk)
    packed = model.qk.packed
    live = live_draft(model, target)
    live.put(live.build({"embed_tokens.weight": checkpoint(2)["embed_tokens.weight"]}))
    assert model.qk.packed is packed
    with pytest.raises(SwapError, match=r"the target's lm_head\.bias"):
        live.build({"qk.bias": torch.ones(2 * H)})


def gives_up(layer: nn.Module) -> None:
    """vLLM does so where it gets no memory for a packed matrix: it goes on with a plain one."""
    if isinstance(layer, Linear):
        layer.packed = torch.empty(0)


def loses(layer: nn.Module) -> None:
    pack(layer)
    if isinstance(layer, Linear):
        del layer.bias


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        (
            gives_up,
            r"Linear\.weight is kept as shape \(8, 4\), the engine serves with shape \(0,\)",
        ),
        (loses, r"Linear\.bias is kept as nothing, the engine serves with shape \(8,\)"),
    ],
)
def test_a_layer_that_is_packed_in_another_way_is_refused(
    packs: Callable[[nn.Module], None], message: str
) -> None:
    with pytest.raises(SwapError, match=message):
        live_draft(started(1), pack=packs).build(checkpoint(2))


def into_a_part(into: torch.Tensor) -> None:
    into[1, 1:] = 5.0


def into_out(into: torch.Tensor) -> None:
    torch.add(torch.ones(V, H), 1, out=into)


def into_several(into: torch.Tensor) -> None:
    torch._foreach_add_([torch.zeros(1), into], 1.0)


@pytest.mark.parametrize("write", [into_a_part, into_out, into_several])
def test_every_way_of_writing_is_noticed(write: Callable[[torch.Tensor], Any]) -> None:
    class Odd(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            write(self.embed_tokens.weight)

    model, target = Odd(), Target()
    live = live_draft(model)
    expected = model.embed_tokens.weight.clone()
    write(expected)
    live.put(live.build({}))
    assert torch.equal(model.embed_tokens.weight, expected)
    target.wte.weight = model.embed_tokens.weight
    target.wte.weight.data.zero_()
    with pytest.raises(SwapError, match="would write into the target"):
        live_draft(model, target).build({})


def test_storage_tells_views_of_one_tensor_from_others() -> None:
    whole = torch.zeros(V, H)
    assert storage(whole[3:]) == storage(whole.T) == storage(whole) != storage(whole.clone())
    assert storage(torch.empty(0)) == 0
