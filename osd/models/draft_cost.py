"""What a draft costs the engine, by the models' files: its weights, and its share of the KV cache.

vLLM keeps the keys and values of target and draft in the same blocks. The draft's share of the
bytes per token is therefore its share of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from osd.errors import ConfigError
from osd.models.checkpoint_files import Described, stored_tensors
from osd.models.compatibility import read_config
from osd.models.eagle3 import EMBEDDING, T2D, is_eagle3
from osd.models.head_files import has_targets_embedding, head_tensors

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
STORED_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that are converted to the served dtype on loading. Others (quantised) stay as stored."""
AUTO_BYTES = 2
"""Under `dtype: auto` vLLM serves in a type of two bytes, float32 models too."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Bytes of the draft's weights as served, and of one token's keys and values in each model."""

    weights: int
    draft_kv: int
    target_kv: int

    @property
    def share(self) -> float:
        """The draft's part of the KV cache, 0 to 1."""
        return self.draft_kv / (self.draft_kv + self.target_kv)


def draft_cost(target: Path, draft: Path, vllm: dict[str, Any]) -> DraftCost:
    """The cost of `draft` beside `target`, under these `serving.vllm` settings. Raises
    `ConfigError`."""
    settings = {key.replace("-", "_"): value for key, value in vllm.items()}
    configs = read_config(target), read_config(draft)
    # vLLM serves the draft in the target's dtype.
    served = DTYPE_BYTES.get(str(settings.get("dtype", "auto")), AUTO_BYTES)
    cache = str(settings.get("kv_cache_dtype", "auto"))
    cached = 1 if "8" in cache and "fp" in cache else DTYPE_BYTES.get(cache, served)
    return DraftCost(
        weights=_weight_bytes(_held(target, draft, configs[1]), served),
        draft_kv=kv_bytes_per_token(configs[1], draft, cached),
        target_kv=kv_bytes_per_token(configs[0], target, cached),
    )


def kv_bytes_per_token(config: dict[str, Any], where: Path, dtype_bytes: int) -> int:
    """2 (keys, values) x layers x key-value heads x head size x bytes per number.

    Latent attention (DeepSeek) keeps one compressed vector per layer: layers x (its rank + the
    rotary part) x bytes. Every layer counts as full attention; sliding windows cost less. Raises
    `ConfigError` when `config.json` does not say.

    Example: Llama-3.1-8B in bfloat16, 2 * 32 * 8 * 128 * 2 = 131072.
    """
    layers = _number(config, where, "num_hidden_layers", "n_layer", "n_layers")
    if "kv_lora_rank" in config:
        return (
            layers
            * (_number(config, where, "kv_lora_rank") + config.get("qk_rope_head_dim", 0))
            * dtype_bytes
        )
    heads = _number(config, where, "num_attention_heads", "n_head", "n_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = (
        config.get("head_dim")
        or _number(config, where, "hidden_size", "n_embd", "d_model") // heads
    )
    return int(2 * layers * kv_heads * head_dim * dtype_bytes)


def _held(target: Path, draft: Path, config: dict[str, Any]) -> list[Described]:
    """The tensors that an engine keeps for a draft: of a head, what it does not share with the
    target. Raises `ConfigError` for a damaged checkpoint."""
    if not is_eagle3(config):
        return list(stored_tensors(draft).values())
    tensors = head_tensors(draft)
    left_out = {T2D} | ({EMBEDDING} if has_targets_embedding(target, tensors) else set())
    return [tensor for name, tensor in tensors.items() if name not in left_out]


def _weight_bytes(tensors: Iterable[Described], dtype_bytes: int) -> int:
    """Bytes of tensors once loaded."""
    return sum(
        prod(t.shape) * dtype_bytes if t.dtype in STORED_FLOATS else t.num_bytes for t in tensors
    )


def _number(config: dict[str, Any], where: Path, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ConfigError(
        f"{where / 'config.json'}: has no {names[0]}; give a text model in Hugging Face format"
    )
