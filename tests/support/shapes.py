"""Tiny pairs of several architectures.

A target is taught which token follows which, and a draft is taught much less of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 96
PADDED = 104
"""Rows of the targets; the drafts have none but those of the vocabulary."""
NUM_STEPS, LEARNING_RATE = 60, 3e-3
"""Of the target's lesson: enough for it to be sure of every successor."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.05,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 32}


@dataclass(frozen=True)
class Shape:
    """An architecture with or without an output head of its own."""

    model: type[PreTrainedModel]
    config: type[Any]
    is_tied: bool
    options: dict[str, Any]
    num_steps: int
    """Of the draft's lesson: enough to be right now and then."""

    def build(self, num_layers: int, **changes: Any) -> PreTrainedModel:
        options = {
            **_SIZES,
            **self.options,
            "tie_word_embeddings": self.is_tied,
            "num_hidden_layers": num_layers,
        }
        return self.model(self.config(**(options | changes))).eval()


SHAPES = {
    "llama-tied": Shape(LlamaForCausalLM, LlamaConfig, True, _GROUPED, 4),
    "qwen2-untied": Shape(Qwen2ForCausalLM, Qwen2Config, False, {"num_key_value_heads": 1}, 1),
    "qwen3-tied": Shape(Qwen3ForCausalLM, Qwen3Config, True, _GROUPED, 3),
    "gpt-neox-untied": Shape(GPTNeoXForCausalLM, GPTNeoXConfig, False, {"rotary_pct": 0.25}, 1),
}


def build_pair(directory: Path, shape: Shape, seed: int = 0) -> tuple[Path, Path]:
    """Directories of a padded two-layer target, well taught, and of a one-layer draft."""
    torch.manual_seed(seed)
    target, draft = shape.build(2, vocab_size=PADDED), shape.build(1)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith(".bias"):
                # Those of Qwen2 would otherwise be zero, and loading them would show nothing.
                parameter.normal_(std=0.02)
    teach(target, NUM_STEPS)
    teach(draft, shape.num_steps)
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(directory / name)
    return directory / "target", directory / "draft"


def teach(model: PreTrainedModel, num_steps: int) -> None:
    """Trains the model to follow each token with its `successor`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for _ in range(num_steps):
        ids_BS = torch.randint(VOCABULARY, (16, 1))
        while ids_BS.shape[1] < 24:
            ids_BS = torch.cat([ids_BS, successor(ids_BS[:, -1:])], 1)
        optimizer.zero_grad()
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
        optimizer.step()
    model.eval()


def successor(token: Any) -> Any:
    """What the target says after `token`: a few cycles through all of the vocabulary."""
    return (token * 5 + 7) % VOCABULARY


def add_old_masks(draft: Path) -> None:
    """Adds masks and rotary frequencies to a GPT-NeoX checkpoint, as in older ones (Pythia)."""
    tensors = load_file(draft / "model.safetensors")
    prefix = "gpt_neox.layers.0.attention"
    tensors[f"{prefix}.bias"] = torch.tril(torch.ones(1, 1, 256, 256, dtype=torch.bool))
    tensors[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
    tensors[f"{prefix}.rotary_emb.inv_freq"] = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
