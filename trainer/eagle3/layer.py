"""The weights of an EAGLE-3 head, and one step of it (arXiv 2503.01840; vLLM's `llama_eagle3.py`).

    features of the taps ─► norms ─► fc ─┐                        ┌─► norm ─► lm_head (draft ids)
    embedding of the next token ─► norm ─┴► attention, MLP ──► g ─┴─► the next depth's input

Depth 0 reads the target's features. Depth j begins with what depth j − 1 gave (g), and its
attention sees the keys of depth 0 up to where the chain began, and those of its own chain.

Legend: B lines, S tokens, C chains of a line, A attention heads, K key-value heads, E head size,
H hidden size of the head, F features of all taps, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from osd.models.eagle3 import HeadSpec


class Context(NamedTuple):
    """What the first depth leaves for all later ones."""

    keys_BASE: Tensor
    """with the rotary embedding of their positions"""
    values_BASE: Tensor
    is_seen_BCS: Tensor
    """bool; which tokens a chain's attention sees"""


@dataclass(slots=True)
class Chain:
    """The keys and values of depths 1, 2, ... of each chain, [B, A, C, E] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Step(NamedTuple):
    """What one depth gives at every chain."""

    normed_BCH: Tensor
    """`lm_head` reads it."""
    fed_back_BCH: Tensor
    """The next depth begins with it."""


class Eagle3Head(nn.Module):
    """The trained tensors of a head, under their canonical names (`osd.models.eagle3.canonical`).

    `get_output_embeddings` names the layer that gets no adapters.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.config = _llama_config(spec)
        width = spec.target_hidden_size * spec.num_taps
        epsilon = self.config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(width, epsilon) if spec.norm_before_fc else None
        norms = [LlamaRMSNorm(spec.target_hidden_size, epsilon) for _ in range(spec.num_taps)]
        self.fc_norm = nn.ModuleList(norms) if spec.has_fc_norm else None
        self.fc = nn.Linear(width, spec.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(self.config)])
        self.norm = LlamaRMSNorm(spec.hidden_size, epsilon)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(self.config)

    @property
    def layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def combine(self, features_BSF: Tensor) -> Tensor:
        """The target's features as the hidden states that depth 0 begins with, [B, S, H]."""
        if self.input_norm is not None:
            features_BSF = self.input_norm(features_BSF)
        if self.fc_norm is not None:
            taps = features_BSF.chunk(self.spec.num_taps, -1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
            features_BSF = torch.cat(normed, -1)
        hidden_BSH: Tensor = self.fc(features_BSF)
        return hidden_BSH

    def context(
        self, embedded_BSH: Tensor, hidden_BSH: Tensor, position_ids_BS: Tensor, seen_BCS: Tensor
    ) -> Context:
        """Keys and values of depth 0 at every token."""
        inputs, _ = self._inputs(embedded_BSH, hidden_BSH)
        keys, values = self.layer.self_attn.keys_values(
            inputs, self.rotary(hidden_BSH, position_ids_BS)
        )
        return Context(keys, values, seen_BCS)

    def step(
        self,
        embedded_BCH: Tensor,
        hidden_BCH: Tensor,
        position_ids_BC: Tensor,
        context: Context,
        chain: Chain,
        *,
        is_first: bool,
    ) -> Step:
        """One depth at every chain. All but the first add their keys and values to the chain."""
        inputs, residual_BCH = self._inputs(embedded_BCH, hidden_BCH)
        rotary = self.rotary(hidden_BCH, position_ids_BC)
        if not is_first:
            keys, values = self.layer.self_attn.keys_values(inputs, rotary)
            chain.keys.append(keys)
            chain.values.append(values)
        residual_BCH = residual_BCH + self.layer.self_attn(inputs, rotary, context, chain)
        before_BCH = residual_BCH + self.layer.mlp(
            self.layer.post_attention_layernorm(residual_BCH)
        )
        normed_BCH = self.norm(before_BCH)
        return Step(normed_BCH, normed_BCH if self.spec.norm_output else before_BCH)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, [..., 2H], and the residual."""
        normed = self.layer.hidden_norm(hidden)
        inputs = torch.cat([self.layer.input_layernorm(embedded), normed], -1)
        return inputs, normed if self.spec.norm_before_residual else hidden


class _Layer(nn.Module):
    """A Llama layer whose attention reads 2H."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.input_layernorm = LlamaRMSNorm(size, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)


class _Attention(nn.Module):
    """Attention of chains over the tokens of depth 0 and over their own depths."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num_heads, num_keys = config.num_attention_heads, config.num_key_value_heads or 0
        self._size = int(config.head_dim or 0)
        self._repeats = num_heads // num_keys
        wide, has_bias = 2 * config.hidden_size, bool(config.attention_bias)
        self.q_proj = nn.Linear(wide, num_heads * self._size, bias=has_bias)
        self.k_proj = nn.Linear(wide, num_keys * self._size, bias=has_bias)
        self.v_proj = nn.Linear(wide, num_keys * self._size, bias=has_bias)
        self.o_proj = nn.Linear(num_heads * self._size, config.hidden_size, bias=has_bias)

    def keys_values(self, inputs: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """[B, A, S, E] each, those of grouped queries repeated."""
        keys, values = self._heads(self.k_proj(inputs)), self._heads(self.v_proj(inputs))
        _, keys = apply_rotary_pos_emb(keys, keys, *rotary)
        return (
            keys.repeat_interleave(self._repeats, 1),
            values.repeat_interleave(self._repeats, 1),
        )

    def forward(self, inputs: Tensor, rotary: Any, context: Context, chain: Chain) -> Tensor:
        """[B, C, H]"""
        queries = self._heads(self.q_proj(inputs))
        queries, _ = apply_rotary_pos_emb(queries, queries, *rotary)
        queries = queries * self._size**-0.5
        scores_BACS = queries @ context.keys_BASE.transpose(2, 3)
        scores_BACS = scores_BACS.masked_fill(~context.is_seen_BCS[:, None], -torch.inf)
        own = [(queries * keys).sum(-1, keepdim=True) for keys in chain.keys]
        share = torch.cat([scores_BACS, *own], -1).float().softmax(-1).to(queries.dtype)
        num_tokens = scores_BACS.shape[-1]
        found = share[..., :num_tokens] @ context.values_BASE
        for depth, values in enumerate(chain.values):
            found = found + share[..., num_tokens + depth, None] * values
        attended: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return attended

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, S, heads * E] -> [B, heads, S, E]"""
        return projected.unflatten(-1, (-1, self._size)).transpose(1, 2)


def _llama_config(spec: HeadSpec) -> LlamaConfig:
    return LlamaConfig(**{key: v for key, v in spec.layer.items() if key != "model_type"})
