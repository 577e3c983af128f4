"""How a draft makes a tree: ⟨k1, …, km⟩ says how many children the nodes of each depth get.

    ⟨2, 2, 1⟩:  1 ─► 2 ─► 4 ─► 4 nodes, the paths of four sequences of three tokens

| children | how | verified as | exact with `multi_step` |
|---|---|---|---|
| sampled | independent draws from q; one drawn twice is one node, tried twice | p / q | yes |
| distinct | draws without replacement | p / q', q' being q over what was left at that draw | yes |
| top | the k likeliest tokens | chosen, not drawn: accepted with p | yes |

The k likeliest tokens verified with p / q, as the paper's text can be read, are not exact.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import numpy as np

from osd.errors import ConfigError
from serving.trees.dice import Dice
from serving.trees.tree import Tree

Children = Iterator[tuple[int, np.ndarray | None]]
"""Tokens, each with what it was drawn from."""


def check(widths: Sequence[int]) -> tuple[int, ...]:
    """The widths as they are. Raises `ConfigError` unless there is one, and all are at least 1."""
    if not widths or min(widths) < 1:
        raise ConfigError(
            f"expansion {text(widths)}: every depth needs a width of at least 1, as in ⟨2, 2, 1⟩"
        )
    return tuple(widths)


def text(widths: Sequence[int]) -> str:
    """As the paper writes it."""
    return f"⟨{', '.join(map(str, widths))}⟩"


def num_drafted(widths: Sequence[int]) -> int:
    """Proposed tokens of a whole tree; where a token is drawn twice there are fewer."""
    return sum(prod(widths[:depth]) for depth in range(1, len(widths) + 1))


def sampled(probs_V: np.ndarray, width: int, dice: Dice) -> Children:
    """`width` independent draws."""
    for _ in range(width):
        yield dice.draw(probs_V), probs_V


def distinct(probs_V: np.ndarray, width: int, dice: Dice) -> Children:
    """`width` draws without replacement, fewer where the distribution has fewer tokens."""
    for _ in range(min(width, int(np.count_nonzero(probs_V)))):
        token = dice.draw(probs_V)
        yield token, probs_V
        left_V = probs_V.copy()
        left_V[token] = 0.0
        probs_V = left_V / (left_V.sum() or 1.0)


def top(probs_V: np.ndarray, width: int, dice: Dice) -> Children:
    """The `width` likeliest tokens, the likeliest first."""
    for token in np.argsort(-probs_V, kind="stable")[:width]:
        yield int(token), None


CHILDREN: dict[str, Callable[[np.ndarray, int, Dice], Children]] = {
    "sampled": sampled,
    "distinct": distinct,
    "top": top,
}


def grow(
    tree: Tree, nodes: Sequence[int], rows: Iterable[np.ndarray], width: int, how: str, dice: Dice
) -> list[int]:
    """Give each of `nodes` children from its row (the draft's distribution, [V]). Returns the new
    nodes, each once."""
    children = [
        tree.add(node, token, drawn_from_V)
        for node, probs_V in zip(nodes, rows, strict=True)
        for token, drawn_from_V in CHILDREN[how](probs_V, width, dice)
    ]
    return list(dict.fromkeys(children))
