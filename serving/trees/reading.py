"""What the target says at every node of a batch of trees: in one pass, or branch by branch.

Both return, for each request, the logits [N, V] of its nodes, and where each node's keys and values
lie among the open ones (`Passes.keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from serving.trees.passes import Passes
from serving.trees.tree import Tree

Read = tuple[list[Tensor], list[list[int]]]
Reading = Callable[[Passes, Sequence[Tree]], Read]


def tree_attention(passes: Passes, trees: Sequence[Tree]) -> Read:
    """One pass; every node is computed once (arXiv 2305.09781, section 4.2)."""
    logits = passes.feed([tree.tokens for tree in trees], [tree.parents for tree in trees])
    return logits, [list(range(len(tree))) for tree in trees]


def sequence_based(passes: Passes, trees: Sequence[Tree]) -> Read:
    """One pass a branch, as without trees: what branches share is computed for each anew."""
    places: list[dict[int, int]] = [{} for _ in trees]
    rows: list[dict[int, Tensor]] = [{} for _ in trees]
    num_open = [0] * len(trees)
    for turn in zip_longest(*(tree.branches() for tree in trees), fillvalue=()):
        tokens = [[tree.tokens[n] for n in path] for tree, path in zip(trees, turn, strict=True)]
        chains = [_chain(start, len(path)) for start, path in zip(num_open, turn, strict=True)]
        logits = passes.feed(tokens, chains)
        for request, path in enumerate(turn):
            for i, node in enumerate(path):
                rows[request].setdefault(node, logits[request][i])
                places[request].setdefault(node, num_open[request] + i)
            num_open[request] += len(path)
    return (
        [torch.stack([of[node] for node in range(len(of))]) for of in rows],
        [[of[node] for node in range(len(of))] for of in places],
    )


def _chain(start: int, length: int) -> list[int]:
    """Parents of a branch that begins at the context and is fed behind `start` open nodes."""
    return [-1, *range(start, start + length - 1)][:length]
