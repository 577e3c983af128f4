"""A copy of a small Llama that computes the same function at the cost of a large one.

Hidden states are padded with zeros from h to H. RMSNorm then takes its mean over H instead of h
elements, so its weight is scaled by sqrt(h/H) and its eps by h/H. New heads, neurons and layers
have output projections of zero, so they write nothing to the residual; their other weights are
random and dense. The head size stays, and with it RoPE and the scale of attention.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator, Tensor

NOISE = 0.02
"""Standard deviation of weights that do not change the result."""

_WEIGHTS = "model.safetensors"


def widen(
    source: Path,
    out: Path,
    *,
    hidden_size: int,
    num_layers: int,
    intermediate_size: int,
    seed: int = 0,
) -> Path:
    """Write the widened copy of the model in `source` to `out`, tokenizer included. Returns `out`.

    Raises `ValueError` when a size is below the source's, or `hidden_size` is not a multiple of its
    head size.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    wide_config = _wide_config(config, hidden_size, num_layers, intermediate_size)
    small = load_file(source / _WEIGHTS)
    generator = torch.Generator().manual_seed(seed)
    wide = dict(_wide_tensors(small, config, wide_config, generator))
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", _WEIGHTS):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(wide_config, indent=2) + "\n")
    save_file(wide, out / _WEIGHTS, metadata={"format": "pt"})
    return out


def _wide_config(
    config: dict[str, Any], hidden: int, layers: int, intermediate: int
) -> dict[str, Any]:
    head_dim, small = config["head_dim"], config["hidden_size"]
    if (
        config["num_key_value_heads"] != config["num_attention_heads"]
        or not config["tie_word_embeddings"]
    ):
        raise ValueError(
            "only models with tied embeddings and without grouped queries can be widened"
        )
    if hidden % head_dim:
        raise ValueError(f"hidden_size {hidden}: must be a multiple of the head size {head_dim}")
    wanted = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    for key, value in wanted.items():
        if value < config[key]:
            raise ValueError(f"{key} {value}: must not be below the source's {config[key]}")
    heads = hidden // head_dim
    return (
        config
        | wanted
        | {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "rms_norm_eps": config["rms_norm_eps"] * small / hidden,
        }
    )


def _wide_tensors(
    small: dict[str, Tensor], config: dict[str, Any], wide: dict[str, Any], generator: Generator
) -> list[tuple[str, Tensor]]:
    """All tensors of the wide model, by name."""
    hidden = wide["hidden_size"]
    norm_scale = (config["hidden_size"] / hidden) ** 0.5
    tensors = [
        (
            "model.embed_tokens.weight",
            _pad(small["model.embed_tokens.weight"], (config["vocab_size"], hidden)),
        ),
        ("model.norm.weight", _pad(small["model.norm.weight"] * norm_scale, (hidden,))),
    ]
    for layer in range(wide["num_hidden_layers"]):
        for part, shape in _layer_shapes(hidden, wide["intermediate_size"]).items():
            name = f"model.layers.{layer}.{part}.weight"
            tensors.append((name, _wide_part(part, shape, small.get(name), norm_scale, generator)))
    return tensors


def _layer_shapes(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def _wide_part(
    part: str, shape: tuple[int, ...], small: Tensor | None, norm_scale: float, generator: Generator
) -> Tensor:
    """One tensor of a layer. `small` is the source's, or None in a new layer.

    Weights that read the padded part of the hidden state read zeros, so they are noise. Weights
    that write from new heads or neurons are zero. The source's heads and neurons come first.
    """
    import torch

    if part.endswith("layernorm"):
        return torch.full(shape, norm_scale) if small is None else _pad(small * norm_scale, shape)
    if part.endswith(("o_proj", "down_proj")):
        return torch.zeros(shape) if small is None else _pad(small, shape)
    wide = torch.randn(shape, generator=generator) * NOISE
    if small is not None:
        wide[: small.shape[0], : small.shape[1]] = small
    return wide


def _pad(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of `shape` with `tensor` in the first places."""
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return padded
