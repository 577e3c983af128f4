"""How often one of k children of a node is accepted, by the rules of greedy and of stochastic
verification: *success by k* (SpecInfer, arXiv 2305.09781, table 1).

Legend: S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.record import Row
from benchmarks.trees.trees import GREEDY, MULTI_STEP, NAIVE
from serving.trees.dice import Dice, RandomDice
from serving.trees.drafting import probabilities
from serving.trees.expand import grow
from serving.trees.tree import Tree
from serving.trees.verify import multi_step

DRAWS = 4
"""Trees drawn at each position, where what is accepted is not known by arithmetic."""
DISTINCT, CHOSEN = "multi-step, distinct", "chosen"
Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its answer."""


def successes(
    target: Any, draft: Any, texts: Sequence[Text], temperature: float, ks: Sequence[int]
) -> list[Row]:
    """How often the next token of the target is among k that the draft proposes: rows {"rule", "k",
    "success"}, with a mean over the positions of each text that has any."""
    found: dict[tuple[str, int], list[float]] = {}
    by_rule = rules(temperature)
    for prompt, answer in texts:
        pairs = list(_distributions(target, draft, prompt, answer, temperature))
        for k in ks:
            for rule, success in by_rule.items():
                mean = float(np.mean([success(p_V, q_V, k) for p_V, q_V in pairs]))
                found.setdefault((rule, k), []).append(mean)
    return [{"rule": rule, "k": k, "success": means} for (rule, k), means in found.items()]


@torch.no_grad()
def _distributions(
    target: Any, draft: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """p and q at each token of an answer."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = [model(ids).logits[0, len(prompt) - 1 : -1] for model in (target, draft)]
    rows = [probabilities(one, temperature or 1.0) for one in logits]
    yield from zip(*rows, strict=True)


Success = Callable[[np.ndarray, np.ndarray, int], float]
"""p, q and k -> the probability that one of k children of a node is accepted."""


def likeliest_among_top(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Greedy: whether the target's likeliest token is among the draft's k likeliest."""
    return float(p_V.argmax() in np.argsort(-q_V, kind="stable")[:k])


def mass_of_top(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Of the draft's k likeliest under the target: chosen children, and naive sampling of them."""
    return float(p_V[np.argsort(-q_V, kind="stable")[:k]].sum())


def multi_step_of_drawn(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Of k independent draws: each trial accepts sum min(p, q), and what is left of p after a
    rejection does not depend on which token was rejected."""
    rejected = 1.0
    for _ in range(k):
        accepted = float(np.minimum(p_V, q_V).sum())
        rejected *= 1.0 - accepted
        left_V = np.maximum(p_V - q_V, 0.0)
        if left_V.sum() <= 0:
            return 1.0
        p_V = left_V / left_V.sum()
    return 1.0 - rejected


def naive_of_drawn(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """The target's own draw is one of k independent draws."""
    return float(p_V @ (1.0 - (1.0 - q_V) ** k))


def multi_step_of_distinct(dice: Dice, p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Of k draws without replacement: the mean of `DRAWS` trees."""
    found = []
    for _ in range(DRAWS):
        tree = Tree(0)
        grow(tree, [0], [q_V], k, "distinct", dice)
        found.append(multi_step(tree, lambda node: p_V, dice).num_accepted > 0)
    return float(np.mean(found))


def rules(temperature: float) -> dict[str, Success]:
    """Those of greedy and of stochastic decoding."""
    if not temperature:
        return {GREEDY: likeliest_among_top}
    return {
        MULTI_STEP: multi_step_of_drawn,
        DISTINCT: partial(multi_step_of_distinct, RandomDice()),
        NAIVE: naive_of_drawn,
        CHOSEN: mass_of_top,
    }
