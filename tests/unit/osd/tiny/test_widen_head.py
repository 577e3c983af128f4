"""A widened head proposes what the small one proposes, from the hidden states of the widened
target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from osd.models import eagle3
from osd.tiny.widen import widen
from osd.tiny.widen_head import widen_head
from tests.support.eagle3_reference import Head
from tests.support.heads import write_head

SMALL, WIDE, VOCABULARY, TAPS = 64, 160, 96, (2, 4, 5)
IDS = torch.randint(0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SMALL,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("models") / "target"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wide_target(target: Path) -> Path:
    """With idle layers behind the small target's."""
    return widen(
        target, target.parent / "wide", hidden_size=WIDE, num_layers=10, intermediate_size=128
    )


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ("specforge", {}),
        ("specforge", {"draft_vocab_size": 40, "target_hidden_size": SMALL, "fc_norm": True}),
        ("specforge", {"attention_bias": True, "num_key_value_heads": 1, "norm_output": True}),
        ("specforge", {"eagle_config": {"norm_before_fc": True}, "rms_norm_eps": 0.1}),
        ("specforge", {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 4}),
        ("speculators", {"norm_before_residual": True, "draft_vocab_size": 40}),
    ],
)
def test_logits_and_hidden_states_stay(
    target: Path, wide_target: Path, tmp_path: Path, form: eagle3.Form, keys: dict[str, Any]
) -> None:
    small_dir = write_head(tmp_path / "small", target, form=form, taps=TAPS, **keys)
    wide_dir = widen_head(small_dir, wide_target, tmp_path / "wide")
    small, wide = _proposals(small_dir, target), _proposals(wide_dir, wide_target)
    for (logits, hidden), (wide_logits, wide_hidden) in zip(small, wide, strict=True):
        assert wide_hidden.shape == (len(IDS) - 1, WIDE)
        assert (wide_logits - logits).abs().max() < 1e-4
        assert (wide_hidden[:, :SMALL] - hidden).abs().max() < 1e-4
        assert not wide_hidden[:, SMALL:].any()


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_it_is_a_head_of_the_widened_target_in_the_same_form(
    target: Path, wide_target: Path, tmp_path: Path, form: eagle3.Form
) -> None:
    small_dir = write_head(tmp_path / "small", target, form=form, draft_vocab_size=40)
    (small_dir / "README.md").write_text("a head")
    wide_dir = widen_head(small_dir, wide_target, tmp_path / "wide")
    spec, small = eagle3.read_spec(wide_dir), eagle3.read_spec(small_dir)
    assert (spec.form, spec.taps) == (small.form, small.taps)
    assert spec.hidden_size == spec.target_hidden_size == WIDE
    tensors, before = (load_file(d / "model.safetensors") for d in (wide_dir, small_dir))
    assert list(tensors) == list(before)
    shapes = {eagle3.canonical(name): tuple(t.shape) for name, t in tensors.items()}
    assert shapes.items() >= eagle3.shapes(spec).items()
    for name in eagle3.MAPS:
        assert torch.equal(tensors[name], before[name])
    assert (wide_dir / "README.md").read_text() == "a head"
    keys = [json.loads((d / "config.json").read_text()) for d in (wide_dir, small_dir)]
    assert set(keys[0]) == set(keys[1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"taps": ()}, "names no eagle_aux_hidden_state_layer_ids"),
        ({"target_hidden_size": 128}, "hidden_size 64: must be the target's 128"),
        ({"hidden_size": 192, "head_dim": 32}, "hidden_size 192: must not be above .* 160"),
    ],
)
def test_other_heads_are_refused(
    target: Path, wide_target: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    head = write_head(tmp_path / "small", target, **keys)
    with pytest.raises(ValueError, match=message):
        widen_head(head, wide_target, tmp_path / "wide")


def _proposals(head_dir: Path, target: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(logits [T, D], hidden states to feed back [T, H]) of three steps: from the target's hidden
    states, then twice from the head's own."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(input_ids=IDS[None], output_hidden_states=True).hidden_states
        taps = torch.cat([hidden[tap][0, :-1] for tap in TAPS], -1)
        head = Head(head_dir, model.model.embed_tokens.weight)
        fed, found = head.combine(taps), []
        for _ in range(3):
            logits, fed = head.forward(IDS[1:], fed)
            found.append((logits, fed))
    return found
