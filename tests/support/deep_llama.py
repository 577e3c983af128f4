"""A random Llama with as many layers as an EAGLE-3 head reads from, and the tests' tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.pairs import VOCABULARY, tokenizer


def deep_llama(directory: Path, *, num_layers: int = 8, seed: int = 0, **config: Any) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes | config, num_hidden_layers=num_layers))
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
