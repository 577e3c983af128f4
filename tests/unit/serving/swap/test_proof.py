"""Which changes of weights alter their checksum, and which do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from osd.errors import SwapError
from serving.swap.proof import (
    EVERY_RANK,
    VALUES_AT_ONCE,
    SwapProof,
    columns,
    digest,
    digests,
    of_release,
    problem,
    rows,
)

H, V = 24, 200


@pytest.fixture
def release() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model.embed_tokens.weight": random(V, H),
        "model.layers.0.self_attn.q_proj.weight": random(H, H),
        "model.layers.0.self_attn.k_proj.weight": random(12, H),
        "model.layers.0.self_attn.q_proj.bias": random(H),
        "model.layers.0.self_attn.rotary_emb.inv_freq": random(6),
        "model.layers.0.self_attn.mask": torch.ones(4, 4, dtype=torch.bool),
        "model.norm.weight": random(H),
        "lm_head.weight": random(V, H),
    }


def live(
    release: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> Iterator[torch.Tensor]:
    """As an engine answers: matrices stacked, vocabulary padded, by unit vectors, in an order of
    its own."""
    given = {name: tensor.to(dtype) for name, tensor in release.items()}
    prefix = "model.layers.0.self_attn"
    stacked = torch.cat([given[f"{prefix}.k_proj.weight"], given[f"{prefix}.q_proj.weight"]])
    head = torch.cat([given["lm_head.weight"], torch.zeros(56, H, dtype=dtype)])
    yield given["model.norm.weight"]
    units = torch.eye(H, dtype=dtype)[columns(H)]
    yield units @ head.T
    yield units @ stacked.T
    yield given[f"{prefix}.q_proj.bias"]
    yield given["model.embed_tokens.weight"][rows(V)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_form_are_the_same(
    release: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    assert digest(live(release, dtype)) == digest(of_release(release, dtype))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_tensor_that_was_not_loaded_shows(release: dict[str, torch.Tensor], name: str) -> None:
    """By the smallest change a training step makes of it: all of it moves a little."""
    stale = {**release, name: release[name] * (1 + 1e-6)}
    assert digest(live(stale)) != digest(of_release(release, torch.float32))


INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_one_bit_of_any_tensor_shows(release: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    parts = list(of_release(release, dtype))
    assert len(parts) == 6 and all(part.dtype == dtype for part in parts)
    before = digest(parts)
    for part in parts:
        for bit in (0, 9):
            bits = part.view(INTEGERS[dtype]).view(-1)
            bits[-1] ^= 1 << bit
            assert digest(parts) != before
            bits[-1] ^= 1 << bit
    assert digest(parts) == before


def test_changes_that_cancel_out_show(release: dict[str, torch.Tensor]) -> None:
    a = torch.tensor([1.5, 2.5, -3.0])
    b = torch.tensor([2.5, 2.5, -4.0])
    assert a.sum() == b.sum()
    assert digest([a]) != digest([b])


def test_bits_that_cancel_out_show() -> None:
    """What one value loses in its bits and another wins: a last place, a sign."""
    one, two = torch.tensor(1.5), torch.tensor(2.5)
    up, down = torch.nextafter(one, torch.tensor(9.0)), torch.nextafter(two, torch.tensor(0.0))
    assert digest([torch.stack([one, two])]) != digest([torch.stack([up, down])])
    assert digest([torch.tensor([1.5, -2.5])]) != digest([torch.tensor([-1.5, 2.5])])


def test_order_zeros_and_their_sign_do_not_matter() -> None:
    a = torch.tensor([1.0, -2.0, 3.0])
    flat = torch.tensor([-0.0, 3.0, 0.0, 1.0, -2.0, 1e-38])
    assert digest([a]) == digest([a[[2, 0]], a[1:2]]) == digest([flat])
    assert digest([]) == 0


def test_a_sign_and_a_small_number_do_matter() -> None:
    """What kernels may flush to 0 is far below what a weight may be."""
    assert digest([torch.tensor([2.0])]) != digest([torch.tensor([-2.0])])
    for small in (2e-30, -2e-30):
        assert digest([torch.tensor([small])]) != 0
    assert digest([torch.tensor([5e-31, -5e-31])]) == 0


def test_a_digest_is_a_number_of_64_bits() -> None:
    found = [
        digest([torch.randn(50, generator=torch.Generator().manual_seed(seed))])
        for seed in range(20)
    ]
    assert all(0 <= number < 1 << 64 for number in found) and max(found) > 1 << 63 > min(found)


@pytest.mark.parametrize(
    "embedding", ["model.embed_tokens", "gpt_neox.embed_in", "transformer.wte", "word_embeddings"]
)
@pytest.mark.parametrize("head", ["lm_head", "embed_out", ""])
def test_of_each_kind_of_tensor_what_is_looked_at(embedding: str, head: str) -> None:
    """Of an embedding rows; of a matrix columns; of an embedding that is the output head too,
    both."""
    release = {
        f"{embedding}.weight": torch.randn(V, H),
        "layers.0.up.weight": torch.randn(12, H),
        "layers.0.up.bias": torch.randn(12),
        "layers.0.conv.weight": torch.randn(2, 3, 4),
        "layers.0.rotary_emb.inv_freq": torch.randn(6),
        "layers.0.masked_bias": torch.randn(1),
        "layers.0.bias": torch.ones(3, 3, dtype=torch.uint8),
        **({f"{head}.weight": torch.randn(V, H)} if head else {}),
    }
    first, *parts = of_release(release, torch.float32)
    assert torch.equal(first, release[f"{embedding}.weight"][rows(V)])
    if not head:
        assert torch.equal(parts.pop(0), release[f"{embedding}.weight"][:, columns(H)])
    else:
        assert torch.equal(parts.pop(), release[f"{head}.weight"][:, columns(H)])
    assert torch.equal(parts[0], release["layers.0.up.weight"][:, columns(H)])
    assert torch.equal(parts[1], release["layers.0.up.bias"]) and len(parts) == 2


def test_little_is_looked_at_and_always_the_same() -> None:
    assert len(columns(4096)) == 4 and len(rows(150_000)) == 64
    assert sorted(columns(3).tolist()) == [0, 1, 2]
    chosen = columns(4096), rows(150_000)
    torch.manual_seed(5)
    assert torch.equal(columns(4096), chosen[0]) and torch.equal(rows(150_000), chosen[1])
    assert len(set(chosen[0].tolist())) == 4 and len(set(chosen[1].tolist())) == 64


class Engine:
    def __init__(self, release: dict[str, torch.Tensor]) -> None:
        self.weights = release

    def read_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((EVERY_RANK, part) for part in live(self.weights))


def test_a_swap_that_did_not_land_is_a_problem(release: dict[str, torch.Tensor]) -> None:
    engine = Engine(release)
    proof = SwapProof(engine.read_back, torch.float32)
    assert problem([proof.held()], proof.expected(release)) == ""
    newer = {
        name: tensor * 1.5 if tensor.is_floating_point() else tensor
        for name, tensor in release.items()
    }
    found, expected = proof.expected(release), proof.expected(newer)
    why = f"checksum {found:016x}, not {expected:016x}"
    assert problem([proof.held()], expected) == f"the engine holds other weights: {why}"
    engine.weights = newer
    assert problem([proof.held()], expected) == ""


def split(release: dict[str, torch.Tensor]) -> list[list[tuple[str, torch.Tensor]]]:
    """What four ranks hold: columns or rows of each matrix, one of two halves of another, and a
    copy of every vector."""
    whole = list(of_release(release, torch.float32))
    matrices = [part for part in whole if part.dim() == 2]
    vectors = [(EVERY_RANK, part) for part in whole if part.dim() == 1]
    halves, *rest = matrices
    ranks = []
    for rank in range(4):
        own = [(f"rank {rank}", part.chunk(4, i % 2)[rank]) for i, part in enumerate(rest)]
        first = rank // 2 * 2
        half = (f"ranks {first} to {first + 1}", halves.chunk(2, 1)[rank // 2])
        ranks.append([*own, half, *vectors])
    return ranks


def test_what_ranks_hold_adds_up_to_the_release(release: dict[str, torch.Tensor]) -> None:
    expected = digest(of_release(release, torch.float32))
    held = [digests(parts) for parts in split(release)]
    assert problem(held, expected) == "" and problem(held[::-1], expected) == ""
    assert problem(held[:3], expected).startswith("the engine holds other weights")
    assert problem([*held[:3], held[2]], expected).startswith("the engine holds other weights")


@pytest.mark.parametrize("rank", range(4))
def test_a_stale_part_shows_on_any_rank(release: dict[str, torch.Tensor], rank: int) -> None:
    """Of what is copied too, although copies count once."""
    expected = digest(of_release(release, torch.float32))
    for i, (holder, part) in enumerate(split(release)[rank]):
        parts = split(release)
        parts[rank][i] = (holder, part * (1 + 1e-6))
        found = problem([digests(each) for each in parts], expected)
        is_own = holder.startswith("rank ")
        assert found.startswith("the engine holds" if is_own else f"the copies on {holder} differ")


def test_a_swap_that_reaches_the_target_is_a_problem(release: dict[str, torch.Tensor]) -> None:
    target = torch.randn(8)
    proof = SwapProof(Engine(release).read_back, torch.float32, lambda: [target])
    held = proof.held()
    for place in range(8):  # a checksum may become larger or smaller
        before = target.clone()
        target[place] *= 1 + 1e-6
        with pytest.raises(SwapError) as changed:
            proof.held()
        assert str(changed.value) == (
            "the target's weights are no longer those of the start: restart this replica"
        )
        target.copy_(before)
    assert proof.held() == held


def test_a_checksum_does_not_depend_on_how_much_is_summed_at_once() -> None:
    """A million values are summed together, whatever parts they come in."""
    large, half = torch.randn(VALUES_AT_ONCE), torch.randn(4, 5).to(torch.bfloat16)
    parts = [large[:-50], half, large[-50:], large[:7], large[7:9]]
    assert digest(parts) == digest(parts[::-1]) == sum(digest([part]) for part in parts) % (1 << 64)
    before = digest(parts)
    large[-1] += 1
    assert digest(parts) != before
