"""A draft is written with as many rows as its target has.

Nothing else changes, and the padding rows are never chosen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.models.compatibility import read_config, vocab_size
from osd.models.vocab_padding import _set_vocab_size, write_fitting
from osd.releases.store import ReleaseStore
from osd.service.plan import first_release
from tests.unit.osd.releases.test_store import make_outcome

NUM_TOKENS = 80
SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(*, tied: bool) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=tied))


def gpt_neox(*, tied: bool) -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, tie_word_embeddings=tied))


def phi() -> PreTrainedModel:
    """Its head has a bias."""
    model = PhiForCausalLM(PhiConfig(**SIZES))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


MODELS = {
    "llama-tied": lambda: llama(tied=True),
    "llama-untied": lambda: llama(tied=False),
    "gpt-neox-tied": lambda: gpt_neox(tied=True),
    "gpt-neox-untied": lambda: gpt_neox(tied=False),
    "phi-with-bias": phi,
}


@pytest.fixture(params=list(MODELS))
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    MODELS[request.param]().save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def fit(draft: Path, num_tokens: int) -> Path:
    fitted = draft.with_name(f"fitted-{num_tokens}")
    fitted.mkdir()
    write_fitting(draft, fitted, num_tokens)
    return fitted


@torch.no_grad()
def logits_of(path: Path) -> torch.Tensor:
    """[many, V], far from the origin and close to it, of tokens that both models have."""
    ids_BS = torch.randint(NUM_TOKENS - 16, (64, 32), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model(input_ids=ids_BS).logits.flatten(0, 1)


def test_logits_stay_and_rows_that_pad_are_never_the_largest(draft: Path) -> None:
    before_NV, after_NV = logits_of(draft), logits_of(fit(draft, 96))
    assert after_NV.shape[-1] == 96
    torch.testing.assert_close(after_NV[:, :NUM_TOKENS], before_NV)
    assert (after_NV.argmax(-1) == before_NV.argmax(-1)).all()
    # Not by luck: every padding logit is the mean of the real ones.
    torch.testing.assert_close(
        after_NV[:, NUM_TOKENS:], before_NV.mean(-1, keepdim=True).expand(-1, 16)
    )
    assert (after_NV[:, NUM_TOKENS:].amax(-1) > 0).any(), (
        "zeros would have done, and this tests nothing"
    )
    assert (before_NV.amax(-1) > after_NV[:, NUM_TOKENS:].amax(-1)).all()


def test_rows_beyond_the_targets_are_cut_off(draft: Path) -> None:
    fitted = fit(draft, 64)
    torch.testing.assert_close(logits_of(fitted), logits_of(draft)[:, :64])


def test_everything_else_is_as_it_was(draft: Path) -> None:
    (draft / "notes.txt").write_text("kept")
    (draft / "pytorch_model.bin").write_bytes(b"not kept")
    (draft / "release.json").write_text("{}")
    fitted = fit(draft, 96)
    before, after = load_file(draft / "model.safetensors"), load_file(fitted / "model.safetensors")
    assert before.keys() == after.keys()
    grown = {name for name in before if before[name].shape != after[name].shape}
    assert grown and all(torch.equal(before[name], after[name][:NUM_TOKENS]) for name in grown)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - grown)
    configs = [json.loads((path / "config.json").read_text()) for path in (draft, fitted)]
    assert configs[1] == {**configs[0], "vocab_size": 96}
    names = {path.name for path in draft.iterdir()} - {"pytorch_model.bin", "release.json"}
    assert {path.name for path in fitted.iterdir()} == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 96])
def test_shards_become_one_file_in_their_own_dtype(
    tmp_path: Path, dtype: torch.dtype, num_tokens: int
) -> None:
    torch.manual_seed(0)
    model = llama(tied=False).to(dtype)  # type: ignore[arg-type]  # transformers' decorator confuses mypy
    model.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    assert len(list((tmp_path / "draft").glob("*.safetensors"))) > 2
    tensors = load_file(fit(tmp_path / "draft", num_tokens) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert not (tmp_path / f"fitted-{num_tokens}" / "model.safetensors.index.json").exists()
    for name, expected in model.state_dict().items():
        assert torch.equal(tensors[name][: len(expected)], expected)
    if num_tokens > NUM_TOKENS:
        mean_H = model.lm_head.weight.double().mean(0).to(dtype)
        assert torch.equal(tensors["lm_head.weight"][-1], mean_H.detach())


def test_an_odd_mixture_of_dtypes_stays_aligned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama(tied=True).save_pretrained(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = {
        **load_file(file),
        "a.mask": torch.ones(3, dtype=torch.bool),
        "a.scale": torch.tensor(2.0).half(),
        "a.none": torch.zeros(0, 3),
    }
    save_file(tensors, file)
    fitted = load_file(fit(tmp_path / "draft", 96) / "model.safetensors")
    assert all(
        torch.equal(fitted[n], t) for n, t in tensors.items() if n != "model.embed_tokens.weight"
    )


def test_what_cannot_be_padded_is_refused(tmp_path: Path) -> None:
    llama(tied=True).save_pretrained(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {
            **tensors,
            "model.embed_tokens.weight": tensors["model.embed_tokens.weight"].to(torch.int8),
        },
        file,
    )
    with pytest.raises(ConfigError, match="model.embed_tokens.weight is I8"):
        fit(tmp_path / "draft", 96)
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(79, 32)}, file)
    with pytest.raises(ConfigError, match="says vocab_size 80, but no embedding has so many rows"):
        fit(tmp_path / "draft", 97)
    file.write_bytes(file.read_bytes()[:-100])
    for num_tokens in (98, 80):
        with pytest.raises(ConfigError, match="shorter than its header says"):
            fit(tmp_path / "draft", num_tokens)


def test_a_config_with_the_size_in_two_places_is_changed_in_both(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"vocab_size": 8, "text_config": {"vocab_size": 8, "hidden_size": 4}})
    )
    _set_vocab_size(file, 10)
    assert json.loads(file.read_text()) == {
        "vocab_size": 10,
        "text_config": {"vocab_size": 10, "hidden_size": 4},
    }
    assert vocab_size(read_config(tmp_path), tmp_path) == 10


def test_a_first_release_is_padded_once(draft: Path, tmp_path: Path) -> None:
    config = Config(data_dir=str(tmp_path / "data"))
    first = first_release(config, draft, "target-a", 96)
    assert json.loads((Path(first.path) / "config.json").read_text())["vocab_size"] == 96
    ReleaseStore(config.releases_path).verify(first)
    assert first_release(config, draft, "target-a", 96) == first
    assert len(ReleaseStore(config.releases_path).list()) == 1


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_draft_that_is_not_used_is_told_of(
    draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_pinned: bool
) -> None:
    """Also where the release that serves was trained, and nothing of a running service is changed
    by asking."""
    config = Config(data_dir=str(tmp_path / "data"))
    shutil.copytree(draft, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text((draft / "config.json").read_text() + " ")
    first = first_release(config, draft, "target-a", 96)
    store = ReleaseStore(config.releases_path)
    learnt = store.publish(
        first.path, parent=1, target_id="target-a", outcome=make_outcome(), origin=first.origin
    )
    if is_pinned:
        store.pin(2)
    assert first_release(config, draft, "target-a", 96) == learnt and caplog.messages == []
    assert first_release(config, tmp_path / "other", "target-a", 96) == learnt
    assert caplog.messages == [
        f"v2 serves, which comes of another draft: {tmp_path / 'other'} is not used; to begin with "
        "it, name another "
        "deployment=NAME"
    ]
    assert [release.version for release in store.list()] == [1, 2]


def test_a_pinned_draft_that_is_damaged_keeps_no_service_from_starting(
    draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(data_dir=str(tmp_path / "data"))
    first = first_release(config, draft, "target-a", 96)
    store = ReleaseStore(config.releases_path)
    for _ in range(2):
        store.publish(first.path, parent=1, target_id="target-a", outcome=make_outcome())
    store.pin(2)
    assert first_release(config, draft, "target-a", 96).version == 2
    (Path(store.get(2).path) / "model.safetensors").write_bytes(b"rubbish")
    assert first_release(config, draft, "target-a", 96) == first
    assert "draft v2" in caplog.text and "was damaged or changed" in caplog.text
    assert store.is_bad(2) and store.pinned("target-a") is None


def test_a_release_of_unknown_origin_stays(draft: Path, tmp_path: Path) -> None:
    """As those of the version before are."""
    config = Config(data_dir=str(tmp_path / "data"))
    before = ReleaseStore(config.releases_path).publish(draft, parent=0, target_id="target-a")
    assert before.origin == "" and first_release(config, draft, "target-a", 80) == before


def test_memory_does_not_grow_with_the_draft(tmp_path: Path) -> None:
    """A draft of 160 MB, half of it embedding, in much less memory."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"vocab_size": 40_000}))
    layer = torch.from_numpy(np.zeros((20_000, 1024), np.float32))
    embedding = torch.ones(40_000, 512)
    save_file(
        {"model.embed_tokens.weight": embedding, "model.layers.0.w": layer},
        tmp_path / "draft/model.safetensors",
    )
    (tmp_path / "fitted").mkdir()
    code = (
        "import resource, sys; from pathlib import Path; from osd.models.vocab_padding import "
        "write_fitting\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_fitting(Path(sys.argv[1]), Path(sys.argv[2]), 40_064)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "draft"), str(tmp_path / "fitted")]
    kilobytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kilobytes < 80_000
    assert (tmp_path / "fitted/model.safetensors").stat().st_size > 160_000_000
