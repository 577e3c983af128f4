"""A random target of several layers, and random heads that are accepted now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.support.heads import write_head
from tests.support.pairs import Pair, config_of, tokenizer
from tests.support.ways import COMPILED, V1_ASYNC, V1_SYNC, Way

NUM_LAYERS = 7
TAPS = (1, 3, 6)
"""Not vLLM's own, which are 2, 3 and 4."""
DRAFT_VOCABULARY = 64
FREQUENT, OFTEN = 4, 3.0
"""Ids from 2 on that target and heads choose far more often than others, and the factor of their
rows."""
WEIGHTS = "model.safetensors"


FORMS: dict[Way, dict[str, Any]] = {
    V1_SYNC: {"form": "specforge", "has_embedding": True},
    V1_ASYNC: {"form": "specforge", "has_embedding": False},
    COMPILED: {"form": "specforge", "has_embedding": False},
}
"""Of the heads in one way; in all others they are as speculators saves them, with an embedding."""


def form_of_heads(way: Way) -> dict[str, Any]:
    return FORMS.get(way, {"form": "speculators"})


def build_headed(directory: Path, **of_head: Any) -> Pair:
    """A target and two heads for it, in the form that `of_head` says."""
    torch.manual_seed(3)
    config = config_of(tied=False)
    config.num_hidden_layers = NUM_LAYERS
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        target.lm_head.weight[2 : 2 + FREQUENT].mul_(OFTEN)
    target.save_pretrained(directory / "target")
    tokenizer().save_pretrained(directory / "target")
    heads = [
        build_head(directory / name, directory / "target", seed, **of_head)
        for seed, name in enumerate(("head", "other"))
    ]
    return Pair(directory / "target", *heads)


def build_head(directory: Path, target: Path, seed: int, **of_head: Any) -> Path:
    """With a draft vocabulary smaller than the target's."""
    keys: dict[str, Any] = {"taps": TAPS, "draft_vocab_size": DRAFT_VOCABULARY, **of_head}
    write_head(directory, target, seed=seed, **keys)
    tensors = load_file(directory / WEIGHTS)
    tensors["lm_head.weight"][:FREQUENT] *= OFTEN
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory
