"""Drafts whose checkpoints have other names than transformers gives their parameters.

Older checkpoints also hold masks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from osd.errors import SwapError
from serving.swap.shape import DraftShape, check_tensors
from tests.support.shapes import add_old_masks
from trainer.draft import export_draft, load_draft

MASK = "gpt_neox.layers.0.attention.bias"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A GPT-NeoX draft as Pythia's are stored: `embed_out.weight`, masks, rotary frequencies."""
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "base")
    add_old_masks(tmp_path / "base")
    assert "embed_out.weight" in load_file(tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def test_an_export_bears_the_checkpoints_names_and_every_change(base: Path, tmp_path: Path) -> None:
    model = load_draft(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    export_draft(model, base, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    kept = {name for name in before if name.endswith(("attention.bias", "masked_bias", "inv_freq"))}
    assert len(kept) == 3
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name in kept else tensor + 1.0), name


def test_a_head_that_is_missing_is_still_noticed(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    del tensors["embed_out.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match="lm_head.weight"):
        load_draft(base)


def test_masks_may_be_swapped_in_but_nothing_else_may_become_one(base: Path) -> None:
    expected, tensors = DraftShape.of(base), load_file(base / "model.safetensors")
    assert expected.masks == {MASK}
    check_tensors(tensors, expected)
    with pytest.raises(
        SwapError, match=r"embed_out.weight is torch.int32, expected floating point"
    ):
        check_tensors({**tensors, "embed_out.weight": tensors["embed_out.weight"].int()}, expected)
    with pytest.raises(SwapError, match=r"attention.bias is torch.bool, expected floating point"):
        check_tensors(tensors, replace(expected, masks=frozenset()))
