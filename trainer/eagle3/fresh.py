"""A first head for a target, not yet trained: it takes the target's own output layer along.

    counts of tokens ─► draft vocabulary ─► lm_head: those rows of the target's ─┐
    the target's sizes ─► one Llama layer and fc, random ────────────────────────┴► directory

Each tap is normed by itself (`fc_norm`): hidden states grow from layer to layer, and without it the
largest tap drowns the others. The directory is as SpecForge saves a head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from osd.common.model_directory import WEIGHTS
from osd.models import eagle3

LLAMA_KEYS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""What the head's layer takes over of the target's configuration."""
SPREAD = 0.02
"""Standard deviation of random weights, as Llama's."""


def write_fresh_head(
    out: Path,
    target: PreTrainedModel,
    counts_V: Tensor,
    *,
    draft_vocab_size: int,
    taps: tuple[int, ...] = (),
) -> Path:
    """Write a head of one layer with the sizes of `target`. Returns `out`.

    counts_V: how often the target said each token; the head gets the most frequent ones
    draft_vocab_size: at most so many tokens
    taps: layers of the target before which the head reads; () = vLLM's default
    """
    output: Any = target.get_output_embeddings()
    return write_head(
        out,
        target.config.get_text_config().to_dict(),
        output.weight.detach(),
        most_frequent(counts_V, draft_vocab_size),
        taps=taps,
    )


def most_frequent(counts_V: Tensor, num: int) -> Tensor:
    """int64 [D], ascending: the `num` tokens with the highest counts; of equal ones those with the
    lower ids."""
    return counts_V.argsort(descending=True, stable=True)[:num].sort().values


def write_head(
    out: Path,
    of_target: Mapping[str, Any],
    output_VH: Tensor,
    ids_D: Tensor,
    *,
    taps: tuple[int, ...] = (),
    seed: int = 0,
) -> Path:
    """Write a head whose draft vocabulary is `ids_D`, without the target's model. Returns `out`.

    of_target: the target's configuration, of its text model
    output_VH: the weights of its output layer
    """
    config = _config(of_target, len(ids_D), taps)
    spec = eagle3.spec_of(config, out)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1  # a norm
        else torch.randn(shape, generator=generator) * SPREAD
        for name, shape in eagle3.shapes(spec).items()
        if name != eagle3.LM_HEAD
    }
    tensors[eagle3.LM_HEAD] = output_VH[ids_D].float().cpu().clone()
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    if len(ids_D) < len(output_VH):
        tensors |= _maps(ids_D, len(output_VH))
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    return out


def _config(of_target: Mapping[str, Any], num_draft: int, taps: tuple[int, ...]) -> dict[str, Any]:
    num_layers = int(of_target["num_hidden_layers"])
    return {key: of_target[key] for key in LLAMA_KEYS if of_target.get(key) is not None} | {
        "architectures": [eagle3.ARCHITECTURES[0]],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "draft_vocab_size": num_draft,
        "fc_norm": True,
        eagle3.TAPS: list(taps or eagle3.default_taps(num_layers)),
    }


def _maps(ids_D: Tensor, num_target: int) -> dict[str, Tensor]:
    is_known_V = torch.zeros(num_target, dtype=torch.bool)
    is_known_V[ids_D] = True
    return {eagle3.D2T: ids_D - torch.arange(len(ids_D)), eagle3.T2D: is_known_V}
