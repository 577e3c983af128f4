"""Trees as they grow and merge, and how drafts expand them."""

from __future__ import annotations

import numpy as np
import pytest

from osd.errors import ConfigError
from serving.trees import expand
from serving.trees.dice import RandomDice
from serving.trees.expand import grow
from serving.trees.tree import Tree, merge

EIGHT = {2: 0, 3: 2, 4: 3, 5: 4, 6: 4, 7: 6, 8: 3, 9: 8}
"""Token -> its parent: three branches of the tokens 2 to 9, which share 2 and 3, and two of which
share 4."""


def tree_of(parents: dict[int, int]) -> Tree:
    """A tree in which each token stands once; the root's parent is none."""
    root, *others = parents
    tree, nodes = Tree(root), {root: 0}
    for token in others:
        nodes[token] = tree.add(nodes[parents[token]], token)
    return tree


def expanded(widths: tuple[int, ...], how: str, probs_V: np.ndarray, seed: int = 0) -> Tree:
    """A tree of a draft that says the same after every token."""
    tree, nodes, dice = Tree(0), [0], RandomDice(seed)
    for width in widths:
        nodes = grow(tree, nodes, [probs_V] * len(nodes), width, how, dice)
    return tree


def test_the_published_expansion_gives_four_sequences_of_three() -> None:
    """⟨2, 2, 1⟩ of arXiv 2305.09781, figure 3."""
    tree = expanded((2, 2, 1), "top", np.array([0.1, 0.4, 0.3, 0.2]))
    assert tree.tokens[1:3] == [1, 2]
    assert [len(path) - 1 for path in tree.branches()] == [3, 3, 3, 3]
    assert tree.num_drafted == expand.num_drafted((2, 2, 1)) == 2 + 4 + 4


def test_the_mask_of_eight_tokens() -> None:
    """Rows and columns are the tokens 2 to 9; the mask is written by hand."""
    by_hand = [
        "1.......",
        "11......",
        "111.....",
        "1111....",
        "111.1...",
        "111.11..",
        "11....1.",
        "11....11",
    ]
    mask_NN = tree_of(EIGHT).mask_NN()
    assert ["".join(".1"[int(sees)] for sees in row) for row in mask_NN] == by_hand


@pytest.mark.parametrize("widths", [(), (0,), (2, 0, 1), (-1,)])
def test_a_width_below_one_is_refused_in_one_line(widths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        expand.check(widths)
    assert expand.text(widths) in str(caught.value) and "\n" not in str(caught.value)


def test_top_takes_the_likeliest_and_says_they_were_chosen() -> None:
    tree = expanded((3,), "top", np.array([0.1, 0.4, 0.3, 0.2]))
    assert tree.tokens[1:] == [1, 2, 3]
    assert all(trial.probs_V is None for trial in tree.trials[0])


def test_a_token_drawn_twice_is_one_node_tried_twice() -> None:
    tree = expanded((4, 1), "sampled", np.array([0.0, 1.0]))
    assert tree.tokens == [0, 1, 1]
    assert [trial.child for trial in tree.trials[0]] == [1, 1, 1, 1]
    assert [trial.child for trial in tree.trials[1]] == [2]


def test_distinct_children_are_held_against_what_was_left() -> None:
    probs_V = np.array([0.1, 0.4, 0.3, 0.2])
    tree = expanded((9,), "distinct", probs_V)
    drawn = tree.tokens[1:]
    assert sorted(drawn) == [0, 1, 2, 3]
    for i, trial in enumerate(tree.trials[0]):
        left_V = probs_V.copy()
        left_V[drawn[:i]] = 0.0
        assert trial.probs_V is not None
        np.testing.assert_allclose(trial.probs_V, left_V / left_V.sum())


@pytest.mark.parametrize("how", ["sampled", "distinct"])
def test_drawn_children_come_as_often_as_their_draft_says(how: str) -> None:
    probs_V = np.array([0.1, 0.4, 0.3, 0.2])
    firsts = [expanded((2,), how, probs_V, seed).tokens[1] for seed in range(4000)]
    np.testing.assert_allclose(np.bincount(firsts) / 4000, probs_V, atol=0.03)


def test_equal_paths_of_two_drafts_are_one_node_with_the_trials_of_both() -> None:
    q_V, r_V = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    one, other = Tree(7), Tree(7)
    one.add(one.add(0, 1, q_V), 0, q_V)
    other.add(other.add(0, 0, r_V), 1, r_V)
    other.add(other.add(0, 1, r_V), 0, r_V)
    merged = merge([one, other])
    assert {tuple(merged.tokens[n] for n in path) for path in merged.branches()} == {
        (7, 1, 0),
        (7, 0, 1),
    }
    tried = [(merged.tokens[trial.child], trial.probs_V) for trial in merged.trials[0]]
    assert tried == [(1, q_V), (0, r_V), (1, r_V)]
    below = merged.trials[merged.follow([1])[-1]]
    assert [trial.probs_V for trial in below] == [q_V, r_V]


def test_trees_of_two_contexts_are_not_merged() -> None:
    with pytest.raises(ValueError, match="token 1 and of token 2"):
        merge([Tree(1), Tree(2)])


def test_a_path_is_followed_as_far_as_it_goes() -> None:
    tree = tree_of(EIGHT)
    assert [tree.tokens[node] for node in tree.follow([3, 4, 9])] == [3, 4]
    assert tree.follow([5]) == []
