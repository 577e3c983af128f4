"""A draft model that proposes a tree for each request of a batch, a pass for each depth.

    what is new in the context ─► q at node 0 ─► children ─► pass ─► q at each ─► children ─► ...

The last depth needs no pass. Of the tree, what was accepted stays in the draft's KV cache.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from serving.trees.dice import Dice
from serving.trees.expand import grow
from serving.trees.passes import Passes
from serving.trees.tree import Tree


class Drafting:
    """A draft model in a batch of requests.

    widths, how: as in `expand.py`
    temperature: of its distributions; the likeliest tokens do not depend on it
    """

    def __init__(
        self, model: Any, widths: Sequence[int], how: str, temperature: float, dice: Dice
    ) -> None:
        self._model, self._widths, self._how, self._dice = model, widths, how, dice
        self._temperature = temperature

    def begin(self, prompts: Sequence[Sequence[int]], num_slots: int) -> None:
        """Requests of their own, with room for contexts and one tree in `num_slots`."""
        self.passes = Passes(self._model, len(prompts), num_slots)
        feed_prompts(self.passes, prompts)
        self._new = [[prompt[-1]] for prompt in prompts]

    def propose(self) -> list[Tree]:
        """A tree for each request."""
        chains = [list(range(-1, len(new) - 1)) for new in self._new]
        logits = self.passes.feed(self._new, chains)
        self.passes.keep([range(len(new)) for new in self._new])
        self._trees = [Tree(new[-1]) for new in self._new]
        frontiers = [[0] for _ in self._trees]
        rows = [probabilities(one[-1:], self._temperature) for one in logits]
        for depth, width in enumerate(self._widths, 1):
            frontiers = [
                grow(tree, nodes, of, width, self._how, self._dice)
                for tree, nodes, of in zip(self._trees, frontiers, rows, strict=True)
            ]
            if depth < len(self._widths):
                rows = self._read(frontiers)
        return self._trees

    def _read(self, frontiers: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The distributions at nodes. Node 0 is in the context, so node n is open as number
        n - 1."""
        pairs = list(zip(self._trees, frontiers, strict=True))
        logits = self.passes.feed(
            [[tree.tokens[node] for node in nodes] for tree, nodes in pairs],
            [[tree.parents[node] - 1 for node in nodes] for tree, nodes in pairs],
        )
        return [probabilities(one, self._temperature) for one in logits]

    def accept(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each context is continued by, at least one token: what was proposed by this draft
        and computed stays, the rest is fed before the next tree; so is the last token always."""
        kept = [
            [node - 1 for node in tree.follow(new[:-1]) if tree.depths[node] < len(self._widths)]
            for tree, new in zip(self._trees, tokens, strict=True)
        ]
        self.passes.keep(kept)
        self._new = [list(new[len(path) :]) for new, path in zip(tokens, kept, strict=True)]

    def select(self, requests: Sequence[int]) -> None:
        """Go on with these requests alone."""
        self.passes.select(requests)
        self._new = [self._new[request] for request in requests]


def feed_prompts(passes: Passes, prompts: Sequence[Sequence[int]]) -> None:
    """All but the last token of each, which is node 0 of its first tree."""
    before = [prompt[:-1] for prompt in prompts]
    if any(before):
        passes.feed(before, [range(-1, len(one) - 1) for one in before], last_alone=True)
        passes.keep([range(len(one)) for one in before])


def probabilities(logits_NV: Tensor, temperature: float) -> np.ndarray:
    """float64 [N, V]: softmax of logits / temperature."""
    probs_NV: np.ndarray = (logits_NV.double() / temperature).softmax(-1).numpy()
    return probs_NV
