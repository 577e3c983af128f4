"""Random Llamas of eight layers, whose taps differ, for heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
TAPS = (2, 4, 5)


def deep_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Eight layers of hidden size 32, sharp enough that another tap gives other numbers."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | options))).eval()


def save_target(directory: Path, seed: int = 0, **options: Any) -> Path:
    deep_llama(seed, **options).save_pretrained(directory)
    return directory
