"""The EAGLE-3 head of a small target, made the head of its widened copy: it proposes the same.

The widened target's hidden states are the small one's, padded with zeros from h to H (`widen`), so
each place where the head reads or writes one is padded likewise. Its RMSNorms take their mean over
H instead of h elements: their weight is scaled by sqrt(h/H), their eps by h/H. Its attention heads,
its neurons and its draft vocabulary stay.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = "model.safetensors"
_LAYER = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_READ = ("fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
"""Matrices whose columns are hidden states, one or more side by side: `fc` reads one of each tap,
attention an embedding and a hidden state."""
_WRITE = ("fc", "o_proj", "down_proj")
"""Matrices whose rows are a hidden state."""
_LLAMA_EPS = 1e-6
"""What a configuration without `rms_norm_eps` means."""


def widen_head(head: Path, wide_target: Path, out: Path) -> Path:
    """Write the head in `head` as a head of the widened target in `wide_target`. Returns `out`.

    Names of keys and tensors, and files beside them, stay. Raises `ValueError` for a head that
    names no taps, or whose hidden states have another size than its target's or a larger one than
    the widened target's.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((head / "config.json").read_text())
    wide = json.loads((wide_target / "config.json").read_text())["hidden_size"]
    wide_config = _wide_config(config, wide)
    small = config.get(_LAYER, config)["hidden_size"]
    tensors = {
        name: _wide_tensor(name, tensor, small, wide)
        for name, tensor in load_file(head / _WEIGHTS).items()
    }
    out.mkdir(parents=True, exist_ok=True)
    for file in head.iterdir():
        if file.name not in ("config.json", _WEIGHTS):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(wide_config, indent=2) + "\n")
    save_file(tensors, out / _WEIGHTS, metadata={"format": "pt"})
    return out


def _wide_config(config: dict[str, Any], wide: int) -> dict[str, Any]:
    layer = config.get(_LAYER, config)
    small = layer["hidden_size"]
    if not (config.get(_TAPS) or (config.get("eagle_config") or {}).get(_TAPS)):
        raise ValueError(f"the head names no {_TAPS}; the widened target may have other layers")
    if (config.get("target_hidden_size") or small) != small:
        raise ValueError(
            f"hidden_size {small}: must be the target's {config['target_hidden_size']}"
        )
    if wide < small:
        raise ValueError(f"hidden_size {small}: must not be above the widened target's {wide}")
    wide_layer = {
        "hidden_size": wide,
        "head_dim": layer.get("head_dim") or small // layer["num_attention_heads"],
        "rms_norm_eps": layer.get("rms_norm_eps", _LLAMA_EPS) * small / wide,
    }
    of_target = {"target_hidden_size": wide} if config.get("target_hidden_size") else {}
    if _LAYER in config:
        return config | {_LAYER: layer | wide_layer} | of_target
    return config | wide_layer | of_target


def _wide_tensor(name: str, tensor: Tensor, small: int, wide: int) -> Tensor:
    """`tensor` with each hidden state in it padded. Maps stay, and biases of what is no hidden
    state."""
    module, _, kind = name.rpartition(".")
    if kind != "weight":
        is_state = kind == "bias" and module.endswith(_WRITE)
        return _padded(tensor, 0, small, wide) if is_state else tensor
    if tensor.ndim == 1:
        return _padded(tensor * (small / wide) ** 0.5, 0, small, wide)
    if module.endswith(_WRITE):
        tensor = _padded(tensor, 0, small, wide)
    return _padded(tensor, 1, small, wide) if module.endswith(_READ) else tensor


def _padded(tensor: Tensor, axis: int, small: int, wide: int) -> Tensor:
    """Zeros behind each `small` elements of an axis, up to `wide`."""
    import torch

    blocks = tensor.unflatten(axis, (-1, small))
    shape = list(blocks.shape)
    shape[axis + 1] = wide - small
    return torch.cat([blocks, blocks.new_zeros(shape)], axis + 1).flatten(axis, axis + 1)
