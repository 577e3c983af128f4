"""The output of verification is the target's own: every outcome is gone through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest

from serving.trees import expand, verify
from serving.trees.dice import Dice, RandomDice
from serving.trees.expand import CHILDREN, Children, grow
from serving.trees.tree import Tree, merge
from serving.trees.verify import Rule, Verified, greedy, multi_step, naive
from tests.support.all_outcomes import all_outcomes

Model = Callable[[tuple[int, ...]], np.ndarray]
"""What follows the tokens since the context, [V]."""
Case = tuple[int, int, tuple[int, ...]]
"""Tokens of the vocabulary, drafts, widths."""

EXACT, NOTICED = 1e-6, 1e-3
CASES: list[Case] = [
    (4, 1, (1,)),
    (4, 1, (3,)),
    (3, 1, (4,)),
    (3, 1, (1, 1, 1)),
    (4, 1, (2, 1)),
    (3, 1, (2, 2)),
    (2, 1, (2, 1, 1)),
    (2, 1, (2, 2, 1)),
    (5, 2, (1,)),
    (4, 2, (2,)),
    (2, 2, (2, 1)),
    (2, 3, (1, 1)),
]
"""With fewer than four tokens two drafts are exact even where a shared child is tried only once."""


def model(seed: int, vocab_size: int) -> Model:
    """Random distributions, some of them without one of the tokens."""

    @cache
    def after(tokens: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng((seed, *tokens))
        probs_V = rng.dirichlet(np.ones(vocab_size))
        if vocab_size > 2 and rng.random() < 0.3:
            probs_V[rng.integers(vocab_size)] = 0.0
        return np.asarray(probs_V / probs_V.sum())

    return after


def tokens_to(tree: Tree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[n] for n in tree.path(node)[1:])


def propose(drafts: Sequence[Model], widths: Sequence[int], how: str, dice: Dice) -> Tree:
    """A tree of each draft, merged."""
    trees = []
    for draft in drafts:
        tree, nodes = Tree(0), [0]
        for width in widths:
            rows = [draft(tokens_to(tree, node)) for node in nodes]
            nodes = grow(tree, nodes, rows, width, how, dice)
        trees.append(tree)
    return merge(trees)


def outputs(case: Case, how: str, rule: Rule) -> dict[tuple[int, ...], float]:
    """Probability of what a step brings."""
    vocab_size, num_drafts, widths = case
    target, *drafts = [model(seed, vocab_size) for seed in range(1 + num_drafts)]

    def step(dice: Dice) -> tuple[int, ...]:
        tree = propose(drafts, widths, how, dice)
        found = rule(tree, lambda node: target(tokens_to(tree, node)), dice)
        return (*tokens_to(tree, found.path[-1]), found.token)

    law = Counter[tuple[int, ...]]()
    for output, probability in all_outcomes(step):
        law[output] += probability  # type: ignore[assignment]  # of floats
    return dict(law)


def error(case: Case, how: str, rule: Rule = multi_step) -> float:
    """Largest error of the probability of any text as long as the longest output, shorter outputs
    being continued by the target alone."""
    target, law = model(0, case[0]), outputs(case, how, rule)

    def alone(text: tuple[int, ...], start: int) -> float:
        return prod(float(target(text[:i])[text[i]]) for i in range(start, len(text)))

    length = len(case[2]) + 1
    texts = list(product(range(case[0]), repeat=length))
    found = [
        sum(law.get(text[:i], 0.0) * alone(text, i) for i in range(1, length + 1)) for text in texts
    ]
    return max(abs(p - alone(text, 0)) for p, text in zip(found, texts, strict=True))


def accepted(case: Case, how: str, rule: Rule) -> float:
    """Expected number of accepted tokens."""
    return sum(p * (len(output) - 1) for output, p in outputs(case, how, rule).items())


@pytest.mark.parametrize("rule", [multi_step, naive])
@pytest.mark.parametrize("how", CHILDREN)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_output_follows_the_target(case: Case, how: str, rule: Rule) -> None:
    assert error(case, how, rule) < EXACT


@pytest.mark.parametrize("how", CHILDREN)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_multi_step_accepts_at_least_as_much_as_naive(case: Case, how: str) -> None:
    assert accepted(case, how, multi_step) > accepted(case, how, naive) - 1e-12


def test_multi_step_accepts_more_of_what_was_drawn() -> None:
    case = (3, 1, (1, 1, 1))
    assert accepted(case, "sampled", multi_step) > 1.2 * accepted(case, "sampled", naive)


def test_chosen_children_gain_nothing_by_multi_step() -> None:
    """They are accepted with p, which is what naive sampling does."""
    case = (3, 1, (2, 2))
    assert accepted(case, "top", multi_step) == pytest.approx(accepted(case, "top", naive))


def test_a_rejection_that_leaves_p_as_it_was_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p_V, q_V: p_V)
    assert error((3, 1, (2, 2)), "sampled") > NOTICED


def test_siblings_without_replacement_held_against_the_whole_q_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistaken(probs_V: np.ndarray, width: int, dice: Dice) -> Children:
        for token, _ in expand.distinct(probs_V, width, dice):
            yield token, probs_V

    monkeypatch.setitem(CHILDREN, "distinct", mistaken)
    assert error((3, 1, (2, 2)), "distinct") > NOTICED


def test_the_likeliest_tokens_held_against_q_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(probs_V: np.ndarray, width: int, dice: Dice) -> Children:
        for token, _ in expand.top(probs_V, width, dice):
            yield token, probs_V + 1e-12

    monkeypatch.setitem(CHILDREN, "top", mistaken)
    assert error((3, 1, (2, 2)), "top") > NOTICED


def test_a_child_of_two_drafts_that_is_tried_once_is_noticed() -> None:
    def once(tree: Tree, probs: verify.Probs, dice: Dice) -> Verified:
        for trials in tree.trials:
            trials[:] = {trial.child: trial for trial in reversed(trials)}.values()
            trials.reverse()
        return multi_step(tree, probs, dice)

    assert error((5, 2, (1,)), "sampled", once) > NOTICED


def test_greedy_goes_where_the_target_would() -> None:
    tree = Tree(0)
    wrong, right = tree.add(0, 1), tree.add(0, 2)
    tree.add(wrong, 2)
    last = tree.add(right, 1)
    rows = {0: [0.1, 0.4, 0.5], right: [0.2, 0.5, 0.3], last: [0.7, 0.2, 0.1]}
    found = greedy(tree, lambda node: np.array(rows[node]), RandomDice())
    assert found == Verified(path=(0, right, last), token=0)
    assert found.num_accepted == 2
