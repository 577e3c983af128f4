"""LoRA: only adapters move, and what leaves is a plain model.

Restarts of any kind begin where they should.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from osd.config.schema import GateConfig
from osd.records import DraftRelease
from tests.support.tiny_drafts import (
    TARGET_ID,
    VOCAB_SIZE,
    chain_traces,
    release_of,
    save_draft,
    tiny_llama,
)
from tests.support.tiny_rounds import (
    GATE,
    alpha,
    buffer_with,
    config,
    same_weights,
    trainer_at,
    weights,
)
from trainer import adapter
from trainer.distiller import Distiller
from trainer.draft import RowModel, export_draft, load_draft
from trainer.evaluate import replay
from trainer.loop import Trainer

HELD_OUT = chain_traces(16, start=500, holdout=True)
UNSEEN = chain_traces(8, start=900)


@pytest.fixture
def base(tmp_path: Path) -> DraftRelease:
    return release_of(save_draft(tmp_path / "base"))


def save_neox(directory: Path) -> Path:
    """Pythia's architecture: query, key and value are one layer."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
        )
    )
    model.save_pretrained(directory)
    return directory


def save_gpt2(directory: Path) -> Path:
    """Its layers keep their weights transposed; output and embedding are one tensor."""
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    ).save_pretrained(directory)
    return directory


DRAFTS: dict[str, Any] = {
    "llama": save_draft,
    "llama, tied": lambda directory: save_draft(directory, tied=True),
    "llama, bfloat16": lambda directory: save_draft(directory, dtype=torch.bfloat16),
    "gpt_neox": save_neox,
    "gpt2": save_gpt2,
}


def trained(path: Path, num_steps: int = 3) -> Distiller:
    """A distiller with adapters that do something."""
    distiller = Distiller(load_draft(path), config(method="lora"))
    for index in range(num_steps):
        batch = distiller.collate(chain_traces(8, start=8 * index))
        assert distiller.step(batch, index) is not None
    return distiller


# What moves, and what leaves


@pytest.mark.parametrize("draft", DRAFTS)
def test_adapters_move_and_nothing_below_them(tmp_path: Path, draft: str) -> None:
    path = DRAFTS[draft](tmp_path / "base")
    plain = {name: value.clone() for name, value in load_draft(path).hf.state_dict().items()}
    hf = trained(path).model.hf
    below = adapter.below(hf)
    assert below.keys() == plain.keys()
    assert all(torch.equal(below[name], plain[name]) for name in plain)
    moved = {name: value for name, value in adapter.adapters(hf).items() if ".lora_" in name}
    assert len(moved) >= 8 and all(value.abs().max() > 0 for value in moved.values())
    # All linear layers have them, but for embedding and output.
    merged = adapter.merged(hf)
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    linear = {name for name, value in plain.items() if value.ndim == 2} - {
        name for name in plain if any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
    }
    assert changed == linear
    if draft == "gpt_neox":
        assert "gpt_neox.layers.0.attention.query_key_value.weight" in changed


def test_new_adapters_change_nothing(tmp_path: Path) -> None:
    path = save_draft(tmp_path / "base", scale=0.3)
    plain, adapted = load_draft(path), Distiller(load_draft(path), config(method="lora")).model
    ids_BS = torch.arange(20)[None]
    assert torch.equal(plain.hf(ids_BS).logits, adapted.hf(ids_BS).logits)


def test_the_merged_weight_by_hand() -> None:
    hf = tiny_llama()
    adapter.add_lora(hf, rank=2, alpha=6)
    layer = hf.model.layers[0].mlp.down_proj
    before = layer.base_layer.weight.clone()
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(0.5)  # [2, 64]
        layer.lora_B["default"].weight.fill_(0.1)  # [32, 2]
    # (6 / 2) * B A: each entry 3 * (0.1 * 0.5 + 0.1 * 0.5) = 0.3
    merged = adapter.merged(hf)["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(merged, before + 0.3)


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_leaves_is_a_plain_draft_that_says_the_same(tmp_path: Path, draft: str) -> None:
    path = DRAFTS[draft](tmp_path / "base")
    distiller = trained(path, num_steps=40)
    export_draft(distiller.model, path, tmp_path / "out")
    stored, plain = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(path / "model.safetensors"),
    )
    assert {n: (t.shape, t.dtype) for n, t in stored.items()} == {
        n: (t.shape, t.dtype) for n, t in plain.items()
    }
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in path.iterdir()}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids_BS = torch.arange(30).reshape(2, 15)
    tolerance = 0.1 if "bfloat16" in draft else 1e-4
    with torch.no_grad():
        expected = distiller.model.hf(ids_BS).logits
        torch.testing.assert_close(
            exported(ids_BS).logits, expected, atol=tolerance, rtol=tolerance
        )
        assert (expected - load_draft(path).hf(ids_BS).logits).abs().max() > 0.5
    if "bfloat16" not in draft:
        counts, working = (
            replay(model, UNSEEN, 4, max_length=64)
            for model in (RowModel(exported), distiller.model)
        )
        assert counts.accepted_RG.tolist() == working.accepted_RG.tolist()
        assert counts.tested_RG.tolist() == working.tested_RG.tolist()


def test_fewer_numbers_are_trained_and_remembered(tmp_path: Path) -> None:
    path = save_draft(tmp_path / "base")
    full, lora = (
        Distiller(load_draft(path), config()),
        Distiller(load_draft(path), config(method="lora", lora_rank=2)),
    )
    sizes = [
        sum(p.numel() for g in d.optimizer.param_groups for p in g["params"]) for d in (full, lora)
    ]
    # r (in + out) of q 32→32, k and v 32→16, o 32→32, gate and up 32→64, down 64→32
    assert sizes[1] == 2 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert sizes[1] < sizes[0] / 10


# Rounds


@pytest.mark.parametrize("draft", ["llama", "llama, tied", "gpt_neox"])
def test_rounds_with_adapters_make_a_better_draft(tmp_path: Path, draft: str) -> None:
    base = release_of(DRAFTS[draft](tmp_path / "base"))
    buffer = buffer_with(*HELD_OUT)
    trainer = trainer_at(tmp_path / "t", buffer, method="lora")
    for index in range(3):
        buffer.put(chain_traces(64, start=64 * index))
        outcome = trainer.run_round(base)
        assert (outcome.discarded, outcome.kind) == ("", "lora")
    assert outcome.eval is not None
    assert outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.3
    assert outcome.eval.diff_low > 0.2
    assert alpha(outcome.path, UNSEEN) > 0.3
    # Over three rounds, what is below the adapters stayed the base.
    merged, plain = weights(outcome.path), weights(base.path)
    embeddings = [name for name in plain if "embed" in name or "lm_head" in name]
    assert embeddings and all(torch.equal(merged[name], plain[name]) for name in embeddings)
    checkpoint = weights(tmp_path / "t" / "checkpoints" / "3")
    assert all(torch.equal(checkpoint[name], plain[name]) for name in checkpoint)


def test_adapters_go_on_growing_beside_a_candidate_that_was_published(
    tmp_path: Path, base: DraftRelease
) -> None:
    buffer = buffer_with(*chain_traces(64), *HELD_OUT)
    trainer = trainer_at(tmp_path / "t", buffer, method="lora")
    first = trainer.run_round(base)
    buffer.put(chain_traces(64, start=64))
    second = trainer.run_round(release_of(Path(first.path), version=2))
    assert second.loss_first == pytest.approx(first.loss_last, abs=0.25)
    assert first.loss_last < first.loss_first - 0.4
    # and beside another release they begin anew, on its weights
    other = release_of(save_draft(tmp_path / "other", seed=3), version=7)
    buffer.put(chain_traces(64, start=128))
    third = trainer.run_round(other)
    assert third.loss_first == pytest.approx(first.loss_first, rel=0.05)
    name = "model.embed_tokens.weight"
    assert torch.equal(weights(third.path)[name], weights(other.path)[name])


# Settings that change between two starts


@pytest.mark.parametrize(
    "then, now",
    [
        ({"method": "full"}, {"method": "lora"}),
        ({"method": "lora"}, {"method": "full"}),
        ({"method": "lora", "lora_rank": 4}, {"method": "lora", "lora_rank": 8}),
        ({"method": "lora", "lora_alpha": 32}, {"method": "lora", "lora_alpha": 8}),
    ],
)
def test_after_a_change_of_method_learning_starts_cleanly_from_the_serving_draft(
    tmp_path: Path,
    base: DraftRelease,
    then: dict[str, Any],
    now: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = buffer_with(*chain_traces(16), *HELD_OUT)
    first = trainer_at(tmp_path / "t", buffer, **then).run_round(base)
    serving = release_of(Path(first.path), version=2)
    trainer = trainer_at(tmp_path / "t", buffer, replay_batches=0, **now)
    assert "starts from the serving draft: the checkpoint is of other settings" in caplog.text
    assert trainer.num_new_traces() == 0, "what was read stays read"
    buffer.put(chain_traces(16, start=64))
    outcome = trainer.run_round(serving)
    assert (outcome.discarded, outcome.kind) == ("", now["method"])
    # As a trainer that never knew anything else (in its second round, too).
    idle_buffer = buffer_with(*HELD_OUT)
    idle = trainer_at(tmp_path / "idle", idle_buffer, replay_batches=0, **now)
    idle.run_round(serving)
    idle_buffer.put(chain_traces(16, start=64))
    assert same_weights(outcome.path, idle.run_round(serving).path)


def test_a_checkpoint_with_adapters_of_another_model_is_refused(tmp_path: Path) -> None:
    one, other = trained(save_draft(tmp_path / "a")), trained(save_neox(tmp_path / "b"))
    with pytest.raises(ValueError, match="adapters of another rank, or of another model"):
        adapter.restore(one.model.hf, adapter.adapters(other.model.hf))


def test_the_gate_can_compare_candidates_with_adapters(tmp_path: Path, base: DraftRelease) -> None:
    """Every evaluator reads the merged weights on disk."""
    buffer = buffer_with(*chain_traces(64), *HELD_OUT)
    first = trainer_at(tmp_path / "t", buffer, method="lora").run_round(base)
    other = Trainer(
        config(), GateConfig(min_holdout_traces=4), 4, buffer, tmp_path / "other", TARGET_ID
    )
    alphas = other.evaluate_releases([base, release_of(Path(first.path), version=2)], 16)
    assert first.eval is not None and GATE.max_holdout_traces == 16
    assert alphas == {1: first.eval.alpha_base, 2: first.eval.alpha_candidate}
