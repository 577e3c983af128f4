"""What an EAGLE-3 head costs the trainer, by arithmetic alone: no model is loaded.

    target's shape ─► head of the same layer ─► parameters ─► memory, FLOPs, bytes of features

A matrix of P parameters takes 2 P FLOPs a token forward, and 6 P with its gradients. Attention
takes 4 x heads x head size FLOPs for each pair of tokens, and half of all pairs are seen (causal).

Legend: H hidden size, F inner size of the feed-forward, V vocabulary, D draft vocabulary, S tokens
of a trace, A heads x head size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from osd.models.eagle3 import LM_HEAD, TAPS, HeadSpec, default_taps, shapes, spec_of

BF16, FP32 = 2, 4
"""Bytes of a number."""
ADAMW = 4 * FP32
"""Bytes of a trained parameter: weight, gradient, two moments."""
COPIES = 3
"""Of logits and attention scores, kept for the gradients: as they are, as float32 for the softmax,
and its result. An estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a Llama-like target, named as in its `config.json`."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def attended(self) -> int:
        """A"""
        return self.num_attention_heads * self.head_dim

    @property
    def num_taps(self) -> int:
        return len(default_taps(self.num_hidden_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step computes at once. Every token counts as one with a row, the most there can be."""

    num_traces: int
    length: int
    depths: int

    @property
    def num_tokens(self) -> int:
        return self.num_traces * self.length


# Parameters


def layer_parameters(shape: Shape) -> int:
    """One layer of the target: q and o (H x A each), k and v, three of the feed-forward (H x F),
    and two norms."""
    keys = shape.num_key_value_heads * shape.head_dim
    attention = 2 * shape.hidden_size * (shape.attended + keys)
    return attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size


def target_parameters(shape: Shape) -> int:
    """All layers, the embedding and the output layer (V x H each), and the last norm."""
    layers = shape.num_hidden_layers * layer_parameters(shape)
    return layers + 2 * shape.vocab_size * shape.hidden_size + shape.hidden_size


def head_of(shape: Shape, draft_vocab_size: int) -> HeadSpec:
    """A head whose layer is shaped as the target's."""
    taps = list(default_taps(shape.num_hidden_layers))
    config = asdict(shape) | {"draft_vocab_size": draft_vocab_size, TAPS: taps}
    return spec_of(config | {"num_hidden_layers": 1}, Path("head"))


def parameters(spec: HeadSpec, part: str = "") -> int:
    """Of all tensors of a head, or of those whose name begins with `part`."""
    return sum(prod(size) for name, size in shapes(spec).items() if name.startswith(part))


# FLOPs per token


def attention_flops(shape: Shape, length: int) -> float:
    """Of one layer: 4 A for each of the S / 2 tokens that a token sees on average."""
    return 4 * shape.attended * length / 2


def recomputation_flops(shape: Shape, spec: HeadSpec, length: int) -> float:
    """The target's layers before the last tap, forward: the trainer stops there."""
    return max(spec.taps) * (2 * layer_parameters(shape) + attention_flops(shape, length))


def training_flops(shape: Shape, spec: HeadSpec, batch: Batch) -> float:
    """The head with its gradients: `fc` once, layer and `lm_head` at every depth."""
    at_a_depth = parameters(spec, "layers.0.") + parameters(spec, LM_HEAD)
    once = parameters(spec, "fc")
    attention = 3 * attention_flops(shape, batch.length)
    return 6 * once + batch.depths * (6 * at_a_depth + attention)


# Memory of the trainer


def state_bytes(spec: HeadSpec) -> int:
    """Weights, gradients and AdamW's moments of a head."""
    return ADAMW * parameters(spec)


def embedding_bytes(shape: Shape) -> int:
    """The target's embedding in float32, which a head in the trainer reads."""
    return FP32 * shape.vocab_size * shape.hidden_size


def target_activation_bytes(shape: Shape, batch: Batch) -> int:
    """The hidden states at the taps, one by one and side by side, and as float32 features."""
    return batch.num_tokens * shape.num_taps * shape.hidden_size * (2 * BF16 + FP32)


def head_activation_bytes(shape: Shape, spec: HeadSpec, batch: Batch) -> int:
    """What the gradients need of each depth, in float32: about 12 H and 3 F of the layer, the
    logits, and the scores of all heads over the trace."""
    layer = 12 * shape.hidden_size + 3 * shape.intermediate_size
    scores = shape.num_attention_heads * batch.length
    return (
        batch.depths * batch.num_tokens * FP32 * (layer + COPIES * (spec.draft_vocab_size + scores))
    )


def gate_bytes(shape: Shape, spec: HeadSpec) -> int:
    """The two heads that are compared after a round, each with its embedding."""
    return 2 * (FP32 * parameters(spec) + embedding_bytes(shape))


def trainer_bytes(shape: Shape, spec: HeadSpec, batch: Batch, *, has_target: bool = True) -> int:
    """Target in bf16, head with optimizer, embedding; and the most of what is there in turn: the
    activations of target and head in a step, the gate's heads. `has_target`: else features come
    from elsewhere."""
    held = state_bytes(spec) + embedding_bytes(shape)
    in_turn = [head_activation_bytes(shape, spec, batch), gate_bytes(shape, spec)]
    if has_target:
        held += BF16 * target_parameters(shape)
        in_turn.append(target_activation_bytes(shape, batch))
    return held + max(in_turn)


# Bytes per token that capture would store


def feature_bytes(shape: Shape, *, with_last: bool = False) -> int:
    """Of bf16 hidden states at the taps. `with_last`: the last hidden state, too, from which logits
    are computed anew."""
    return (shape.num_taps + with_last) * shape.hidden_size * BF16


def trace_bytes(top_k: int) -> int:
    """What a trace holds of a token with a row (`osd.records.Trace`): the id; position, kind, draft
    id, tail, keep_prob, version; and K ids with their float16 log-probabilities."""
    return 4 + (4 + 1 + 4 + 4 + 4 + 4) + top_k * (4 + 2)
