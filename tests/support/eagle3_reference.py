"""An EAGLE-3 head's forward pass in plain torch, after vLLM's `llama_eagle3.py`.

Legend: T positions, H hidden size, A attention heads, K key-value heads, N head size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from osd.models import eagle3


class Head:
    """The head in a directory over the target's embedding [V, H]; its own stands first."""

    def __init__(self, directory: Path, embedding: Tensor) -> None:
        self.spec = eagle3.read_spec(directory)
        tensors = load_file(directory / "model.safetensors")
        self._tensors = {eagle3.canonical(name): tensor for name, tensor in tensors.items()}
        self._embedding = self._tensors.get(eagle3.EMBEDDING, embedding)

    def combine(self, taps: Tensor) -> Tensor:
        """Hidden states [T, H] from the target's, side by side."""
        if self.spec.norm_before_fc:
            taps = self._norm(taps, "input_norm")
        if self.spec.has_fc_norm:
            chunks = taps.chunk(self.spec.num_taps, -1)
            taps = torch.cat([self._norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], -1)
        return self._linear(taps, "fc")

    def forward(self, next_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [T, D], hidden states to feed back [T, H]) of one causal pass. `next_ids` [T]:
        the token after each position."""
        embedded = self._norm(self._embedding[next_ids], "layers.0.input_layernorm")
        normed = self._norm(hidden, "layers.0.hidden_norm")
        residual = normed if self.spec.norm_before_residual else hidden
        residual = residual + self._attention(torch.cat([embedded, normed], -1))
        residual = residual + self._mlp(self._norm(residual, "layers.0.post_attention_layernorm"))
        output = self._norm(residual, "norm")
        return self._linear(output, "lm_head"), output if self.spec.norm_output else residual

    def _attention(self, states: Tensor) -> Tensor:
        layer = self.spec.layer
        num_heads = layer["num_attention_heads"]
        size = layer.get("head_dim") or self.spec.hidden_size // num_heads
        q, k, v = (
            self._linear(states, f"layers.0.self_attn.{p}_proj").unflatten(-1, (-1, size))
            for p in "qkv"
        )
        q, k, v = (_rotated(q, layer), _rotated(k, layer), v)
        k, v = (t.repeat_interleave(num_heads // t.shape[1], 1) for t in (k, v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._linear(out.transpose(0, 1).flatten(1), "layers.0.self_attn.o_proj")

    def _mlp(self, states: Tensor) -> Tensor:
        gate = F.silu(self._linear(states, "layers.0.mlp.gate_proj"))
        return self._linear(
            gate * self._linear(states, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj"
        )

    def _linear(self, states: Tensor, name: str) -> Tensor:
        return F.linear(states, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, states: Tensor, name: str) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return F.rms_norm(states, weight.shape, weight, self.spec.layer["rms_norm_eps"])


def _rotated(states: Tensor, layer: Mapping[str, Any]) -> Tensor:
    """RoPE on [T, heads, N], halves of the head turned against each other."""
    size = states.shape[-1]
    parameters = layer.get("rope_parameters") or layer
    theta = parameters["rope_theta"]
    angle = torch.arange(len(states))[:, None] / theta ** (torch.arange(0, size, 2) / size)
    cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin
