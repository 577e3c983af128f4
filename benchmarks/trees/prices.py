"""What a step with a tree takes, as measured and as published, what the tree brings, and from which
batch on a chain brings more. Arithmetic alone.

    tokens per step x batch / seconds of a step  =  tokens per second
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.heads import costs
from benchmarks.heads.costs import BF16, Shape
from benchmarks.heads.sizes import SHAPES
from benchmarks.record import Row
from benchmarks.replays.step_times import published_draft_s, published_step_s
from serving.trees.expand import num_drafted

Widths = tuple[int, ...]

NONE: Widths = ()
"""No tree: no speculation."""
MAX_BATCH = 1024
"""Up to which it is looked where the chain overtakes."""
CONTEXT = 1024
"""Tokens of a request in the KV cache, for what is computed."""


def num_nodes(widths: Widths) -> int:
    """That the target computes of a request: node 0, and all proposed."""
    return 1 + num_drafted(widths)


def num_read(widths: Widths) -> int:
    """That the draft computes of a request: all but the last depth."""
    return num_nodes(widths[:-1]) if widths else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Seconds of a step, linear in the nodes of all requests; those of the draft in its passes,
    too.

    Example:
        Price(target_s=0.03, per_node_s=0.001, draft_s=0.002, per_read_s=0.0001)
    """

    target_s: float
    per_node_s: float
    draft_s: float
    """Of a pass, of which there is one for each depth."""
    per_read_s: float

    def step(self, widths: Widths, batch: int) -> float:
        draft = len(widths) * self.draft_s + batch * num_read(widths) * self.per_read_s
        return self.target_s + batch * num_nodes(widths) * self.per_node_s + draft

    @classmethod
    def fitted(cls, rows: Iterable[Row]) -> Price:
        """To rows {"widths", "batch", "target_s", "draft_s"}: least squares of relative errors, so
        that short steps count as much as long ones. No term is negative."""
        rows = list(rows)
        target = _fit(
            [(1.0, row["batch"] * num_nodes(tuple(row["widths"]))) for row in rows],
            [row["target_s"] for row in rows],
        )
        drafted = [row for row in rows if row["widths"]]
        draft = _fit(
            [
                (float(len(row["widths"])), row["batch"] * num_read(tuple(row["widths"])))
                for row in drafted
            ],
            [row["draft_s"] for row in drafted],
        )
        return cls(target_s=target[0], per_node_s=target[1], draft_s=draft[0], per_read_s=draft[1])


def _fit(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    from scipy.optimize import nnls

    relative = np.array(terms) / np.array(seconds)[:, None]
    found, _ = nnls(relative, np.ones(len(relative)))
    return float(found[0]), float(found[1])


class Published:
    """Of Llama-3.1-8B with EAGLE on an H100 (`benchmarks/replays/step_times.py`), which charges a
    step's drafts the same at any depth. It was fitted to chains: a node is charged as a token
    is."""

    def step(self, widths: Widths, batch: int) -> float:
        kv = CONTEXT * batch
        verifying = published_step_s(kv, batch * num_nodes(widths))
        if not widths:
            return verifying
        return verifying + published_draft_s(kv, batch * num_read(widths))


AnyPrice = Price | Published


def speed(price: AnyPrice, widths: Widths, batch: int, tokens_per_step: float) -> float:
    """Tokens per second of a batch."""
    return batch * tokens_per_step / price.step(widths, batch)


def overtaken(price: AnyPrice, tree: Widths, of_tree: float, chain: Widths, of_chain: float) -> int:
    """The smallest batch at which the chain is at least as fast; `MAX_BATCH` = none below it."""
    batches = range(1, MAX_BATCH)
    return next(
        (
            batch
            for batch in batches
            if speed(price, chain, batch, of_chain) >= speed(price, tree, batch, of_tree)
        ),
        MAX_BATCH,
    )


LLAMA_8B = SHAPES["8 B"]
LLAMA_1B = Shape(
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=8192,
    vocab_size=128256,
)
"""Llama-3.1-8B, and Llama-3.2-1B as its draft (counted with an output layer of its own)."""


def kv_bytes(shape: Shape) -> int:
    """Of a token, in bf16: keys and values of all layers."""
    width = shape.num_key_value_heads * shape.head_dim
    return 2 * BF16 * shape.num_hidden_layers * width


def pool_costs(target: Shape, draft: Shape, pool: int, widths: Widths, batch: int) -> Row:
    """Memory in bytes and FLOPs of a step for a pool of drafts, whose trees share no path: the most
    there can be. A parameter takes 2 FLOPs a node; attention is left out."""
    nodes = 1 + pool * (num_nodes(widths) - 1)
    of_target, of_draft = costs.target_parameters(target), costs.target_parameters(draft)
    return {
        "weights of the drafts": BF16 * pool * of_draft,
        "context of the drafts": pool * kv_bytes(draft) * batch * CONTEXT,
        "trees in the target's KV": kv_bytes(target) * batch * nodes,
        "FLOPs of the target": 2 * of_target * batch * nodes,
        "FLOPs of the drafts": 2 * pool * of_draft * batch * num_read(widths),
        "FLOPs over no speculation": nodes + pool * num_read(widths) * of_draft / of_target,
    }
