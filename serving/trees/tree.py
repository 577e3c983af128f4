"""A token tree: continuations of one context, which share as nodes what they have in common.

    0 ─┬─ 1 ─┬─ 3      node 0: the last token of the context, known but not yet in the KV cache
       │     └─ 4      all others: proposed tokens, each seeing its ancestors alone
       └─ 2 ─── 5

A parent stands before its children. No two children of a node are the same token; a token that was
proposed twice is one node with two trials.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A child as it was proposed."""

    child: int
    """Its node."""
    probs_V: np.ndarray | None = None
    """float64: the distribution it was drawn from; None where it was chosen, not drawn."""


class Tree:
    """A tree that grows by `add`."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.trials: list[list[Trial]] = [[]]
        """Of each node, in the order in which verification tries them."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Proposed tokens."""
        return len(self) - 1

    def add(self, parent: int, token: int, probs_V: np.ndarray | None = None) -> int:
        """The node of `token` under `parent`, with one more trial."""
        node = self.child(parent, token)
        if node is None:
            node = len(self)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.trials.append([])
        self.trials[parent].append(Trial(child=node, probs_V=probs_V))
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child with this token."""
        children = (trial.child for trial in self.trials[node])
        return next((child for child in children if self.tokens[child] == token), None)

    def path(self, node: int) -> list[int]:
        """The nodes from 0 to `node`."""
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes along `tokens`, as far as they are in the tree; node 0 is not among them."""
        nodes: list[int] = []
        for token in tokens:
            child = self.child(nodes[-1] if nodes else 0, token)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def branches(self) -> list[list[int]]:
        """The path to each leaf."""
        return [self.path(node) for node in range(len(self)) if not self.trials[node]]

    def mask_NN(self) -> np.ndarray:
        """bool: whether the row's node sees the column's."""
        return ancestry(self.parents)


def ancestry(parents: Sequence[int]) -> np.ndarray:
    """bool [N, N]: each node sees its ancestors and itself. A parent below 0 lies outside."""
    mask_NN = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask_NN[node] |= mask_NN[parent]
    return mask_NN


def merge(trees: Sequence[Tree]) -> Tree:
    """The union of trees of one context (arXiv 2305.09781, section 3): equal paths become one node.

    A node keeps the trials of all trees, one after the other. Were a child that two drafts propose
    tried only once, the output would not follow the target's distribution.
    """
    merged = Tree(trees[0].tokens[0])
    for tree in trees:
        if tree.tokens[0] != merged.tokens[0]:
            raise ValueError(f"trees of token {merged.tokens[0]} and of token {tree.tokens[0]}")
        nodes = {0: 0}
        for node in range(len(tree)):
            for trial in tree.trials[node]:
                token = tree.tokens[trial.child]
                nodes[trial.child] = merged.add(nodes[node], token, trial.probs_V)
    return merged
