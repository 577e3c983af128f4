"""Drafts are read from and written to Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from osd.common.files import sha256
from osd.common.model_directory import digests
from osd.errors import OSDError, ReleaseError
from tests.support.tiny_drafts import files_of_at_most, save_draft, tiny_llama, write_over
from trainer.draft import RowModel, export_draft, load_draft


def layout(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor name -> shape and dtype over all safetensors files."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                found[name] = (tuple(part.get_shape()), part.get_dtype())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_an_export_has_the_tensors_of_its_base(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    base = save_draft(tmp_path / "base", dtype=dtype, tied=tied)
    assert ("lm_head.weight" in layout(base)) is not tied
    model = load_draft(base)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    written = export_draft(model, base, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(base)
    assert written == digests(tmp_path / "out")
    before, now = (
        load_file(base / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    for name in before:
        torch.testing.assert_close(
            now[name].float(), before[name].float() + 0.01, atol=2e-3, rtol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_draft_does_not_depend_on_its_files(tmp_path: Path, dtype: torch.dtype) -> None:
    base = save_draft(tmp_path / "base", dtype=dtype)
    before = {n: t.float() for n, t in layer_copies(base).items()}
    model = load_draft(base)
    write_over(base)
    found = model.hf.state_dict()
    assert all(torch.equal(found[name], before[name]) for name in before)


def layer_copies(base: Path) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in load_file(base / "model.safetensors").items()}


def test_untrained_weights_survive_the_round_trip_bit_by_bit(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base", dtype=torch.bfloat16)
    written = export_draft(load_draft(base), base, tmp_path / "out")
    assert written["model.safetensors"] == sha256(base / "model.safetensors")


def test_a_tied_head_that_is_stored_twice_stays_stored_twice(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base", tied=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    # Old checkpoints hold this tensor.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    model = load_draft(base)
    with torch.no_grad():
        model.hf.get_input_embeddings().weight += 1
    export_draft(model, base, tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert layout(tmp_path / "out") == layout(base)
    assert torch.equal(out["lm_head.weight"], out["model.embed_tokens.weight"])
    assert torch.equal(out["lm_head.weight"], tensors["lm_head.weight"] + 1)
    assert torch.equal(out["model.layers.0.self_attn.rotary_emb.inv_freq"], torch.ones(8))


def test_a_sharded_base_becomes_one_file(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    export_draft(load_draft(tmp_path / "base"), tmp_path / "base", tmp_path / "out")
    assert layout(tmp_path / "out") == layout(tmp_path / "base")
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if "safetensors" in p.name) == [
        "model.safetensors"
    ]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_everything_but_weights_and_the_release_record_is_copied(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "release.json",
        "pytorch_model.bin",
    ):
        (base / name).write_text(f"{{}} {name}")
    export_draft(load_draft(base), base, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {p.name for p in base.iterdir()} - {"release.json", "pytorch_model.bin"}
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize(
    "hf",
    [
        tiny_llama(scale=0.3),
        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)),
        Gemma2ForCausalLM(
            Gemma2Config(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                final_logit_softcapping=0.5,
                initializer_range=0.3,
            )
        ),
    ],
    ids=["llama", "gpt2", "gemma2 with a soft cap"],
)
def test_rows_of_logits_are_those_of_the_whole_model(hf: torch.nn.Module) -> None:
    model = RowModel(hf.eval())
    ids_BS = torch.arange(20).reshape(2, 10)
    position_ids_BS = torch.arange(10).repeat(2, 1)
    row_b_N, row_s_N = torch.tensor([0, 1, 1]), torch.tensor([4, 0, 9])
    with torch.no_grad():
        rows_NV = model(ids_BS, position_ids_BS, row_b_N, row_s_N)
        torch.testing.assert_close(rows_NV, hf(ids_BS).logits[row_b_N, row_s_N])


def test_a_directory_without_a_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="holds no safetensors file"):
        load_draft(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReleaseError, match=r"no model\.norm\.weight \(1 such\)"):
        load_draft(base)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ReleaseError, match="not a draft model that can be loaded"):
        load_draft(base)


@pytest.mark.parametrize(
    "keys",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},  # needs a package
        {"hidden_act": "nonsense"},
        {"vocab_size": "96"},
        {"num_attention_heads": 0},
    ],
)
def test_whatever_transformers_raises_is_one_line(keys: dict[str, Any], tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ReleaseError, match="not a draft model that can be loaded") as error:
        load_draft(base)
    assert "\n" not in str(error.value)


def test_code_that_comes_with_a_draft_never_runs_whoever_would_say_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_draft(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (base / "config.json").write_text(json.dumps(config | {"model_type": "own"} | own))
    ran = tmp_path / "ran"
    (base / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: ...\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ReleaseError, match="contains custom code"):
        load_draft(base)
    assert not ran.exists()


def test_a_draft_in_eight_bits_is_refused(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReleaseError, match=f"{name} is F8_E4M3, which the trainer cannot read"):
        load_draft(base)


def test_a_full_disk_is_one_clear_line_and_leaves_what_was_there(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    model = load_draft(base)
    export_draft(model, base, tmp_path / "out")
    with (
        files_of_at_most(10_000),
        pytest.raises(OSDError, match="out: cannot be written .*free space"),
    ):
        export_draft(model, base, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]
    assert layout(tmp_path / "out") == layout(base)


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    base = save_draft(tmp_path / "base")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSDError, match="cannot be written"):
        export_draft(load_draft(base), base, tmp_path / "file" / "out")
