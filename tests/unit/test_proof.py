"""What a checksum of weights must not care about, and what it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from serving.proof import NUM_COLUMNS, NUM_ROWS, SwapProof, columns, digest, of_release, rows

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


def live(release: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """As an engine answers: matrices stacked, vocabulary padded, by unit vectors, in an order of its own."""
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
def test_the_same_weights_in_another_form_are_the_same(release: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
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


def test_one_bit_shows(release: dict[str, torch.Tensor]) -> None:
    parts = list(of_release(release, torch.float32))
    before = digest(parts)
    parts[0].view(torch.int32).view(-1)[0] ^= 1
    assert digest(parts) != before


def test_changes_that_cancel_out_show(release: dict[str, torch.Tensor]) -> None:
    a = torch.tensor([1.5, 2.5, -3.0])
    b = torch.tensor([2.5, 2.5, -4.0])
    assert a.sum() == b.sum()
    assert digest([a]) != digest([b])


def test_order_zeros_and_their_sign_do_not_matter() -> None:
    a = torch.tensor([1.0, -2.0, 3.0])
    assert digest([a]) == digest([a[[2, 0]], a[1:2]]) == digest([torch.tensor([-0.0, 3.0, 0.0, 1.0, -2.0, 1e-38])])
    assert digest([]) == 0


def test_a_tied_head_is_looked_at_as_well(release: dict[str, torch.Tensor]) -> None:
    del release["lm_head.weight"]
    tied = sum(part.numel() for part in of_release(release, torch.float32))
    release["lm_head.weight"] = torch.zeros(V, H)
    assert sum(part.numel() for part in of_release(release, torch.float32)) == tied


def test_little_is_looked_at() -> None:
    assert len(columns(4096)) == NUM_COLUMNS and len(rows(150_000)) == NUM_ROWS
    assert len(columns(3)) == 3
    assert torch.equal(columns(4096), columns(4096)) and len(set(columns(4096).tolist())) == NUM_COLUMNS


class Engine:
    def __init__(self, release: dict[str, torch.Tensor]) -> None:
        self.weights = release

    def read_back(self) -> Iterator[torch.Tensor]:
        return live(self.weights)


def test_a_swap_that_did_not_land_is_a_problem(release: dict[str, torch.Tensor]) -> None:
    engine = Engine(release)
    proof = SwapProof(engine.read_back, torch.float32, release)
    assert proof.why_not == "" and proof.problem(proof.expected(release)) == ""
    newer = {name: tensor * 1.5 if tensor.is_floating_point() else tensor for name, tensor in release.items()}
    assert proof.problem(proof.expected(newer)).startswith("the engine holds other weights: checksum ")
    engine.weights = newer
    assert proof.problem(proof.expected(newer)) == ""


def test_an_engine_that_cannot_be_read_back_is_trusted(
    release: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Iterator[torch.Tensor]:
        raise AttributeError("no attribute 'quant_method'")

    proof = SwapProof(fails, torch.float32, release)
    assert proof.why_not == "AttributeError: no attribute 'quant_method'"
    assert proof.problem(0) == ""
    other = SwapProof(lambda: [torch.ones(3)], torch.float32, release)
    assert other.why_not == "its layers hold the first draft in a form of their own"
    assert other.problem(0) == ""
    assert [r.message for r in caplog.records if "swaps are not proved in this engine" in r.message]


def test_a_swap_that_reaches_the_target_is_a_problem(release: dict[str, torch.Tensor]) -> None:
    target = torch.randn(8)
    proof = SwapProof(Engine(release).read_back, torch.float32, release, lambda: [target])
    assert proof.problem(proof.expected(release)) == ""
    target[3] += 1e-6
    assert proof.problem(proof.expected(release)).startswith("the target's weights are no longer those of the start")


def test_a_checksum_does_not_depend_on_how_much_is_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(n) for n in (3, 50, 7)] + [torch.randn(4, 5).to(torch.bfloat16)]
    whole = digest(parts)
    monkeypatch.setattr("serving.proof.VALUES_AT_ONCE", 8)
    assert digest(parts) == digest(parts[::-1]) == whole
    parts[1][49] += 1
    assert digest(parts) != whole
