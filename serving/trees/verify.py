"""Which path of a tree is accepted, and the token after it.

greedy       the target's likeliest token at each node
multi_step   multi-step speculative sampling (arXiv 2305.09781, algorithm 2): siblings are tried in
             turn, and a rejected one is taken out of what the next is held against
naive        the target draws, and the tree may have foreseen it: the control

The output of the last two follows the target's distribution, whatever the tree.

Legend: V vocabulary. p is the target's distribution at a node, q what a child was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serving.trees.dice import Dice
from serving.trees.tree import Tree, Trial

Probs = Callable[[int], np.ndarray]
"""Node -> p, float64 [V]. Asked along the accepted path alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What a step brings.

    Example:
        Verified(path=(0, 2, 5), token=17)
        Two tokens are accepted, and 17 follows them.
    """

    path: tuple[int, ...]
    """Accepted nodes, node 0 first."""
    token: int
    """The target's own, which no node stands for."""

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


Rule = Callable[[Tree, Probs, Dice], Verified]


def greedy(tree: Tree, probs: Probs, dice: Dice) -> Verified:
    """No chance in it: `dice` is not asked."""
    return _walk(tree, lambda node: int(probs(node).argmax()))


def naive(tree: Tree, probs: Probs, dice: Dice) -> Verified:
    """A child is accepted with the probability that the target draws it."""
    return _walk(tree, lambda node: dice.draw(probs(node)))


def _walk(tree: Tree, next_of: Callable[[int], int]) -> Verified:
    """As long as the target's own next token is in the tree."""
    path = [0]
    while True:
        token = next_of(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Verified(path=tuple(path), token=token)
        path.append(child)


def multi_step(tree: Tree, probs: Probs, dice: Dice) -> Verified:
    """A child x is accepted with probability p(x) / q(x); after a rejection p becomes the residual,
    which the next sibling is held against, and which the step's own token is drawn from."""
    path = [0]
    while True:
        p_V = probs(path[-1])
        for trial in tree.trials[path[-1]]:
            q_V = _drawn_from(tree, trial, len(p_V))
            token = tree.tokens[trial.child]
            if dice.accepts(float(p_V[token] / q_V[token])):
                path.append(trial.child)
                break
            p_V = residual(p_V, q_V)
        else:
            return Verified(path=tuple(path), token=dice.draw(p_V))


def _drawn_from(tree: Tree, trial: Trial, vocab_size: int) -> np.ndarray:
    """q. All mass on a child that was chosen: it is accepted with p, and p without it is left."""
    if trial.probs_V is not None:
        return trial.probs_V
    q_V = np.zeros(vocab_size)
    q_V[tree.tokens[trial.child]] = 1.0
    return q_V


def residual(p_V: np.ndarray, q_V: np.ndarray) -> np.ndarray:
    """norm(max(0, p − q)): the distribution after a rejection (arXiv 2211.17192, section 2.3)."""
    left_V = np.maximum(p_V - q_V, 0.0)
    mass = left_V.sum()
    # p = q up to rounding: a rejection has probability zero, and any draw is as good.
    return np.asarray(left_V / mass) if mass > 0 else p_V


RULES: dict[str, Rule] = {"multi-step": multi_step, "naive": naive}
