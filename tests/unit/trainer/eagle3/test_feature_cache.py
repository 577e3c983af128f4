"""What is kept of features, and that it is what would be computed."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.eagle3.feature_cache import FeatureCache, texts_of
from trainer.pack import one_a_line

IDS = torch.tensor([[5, 6, 7, 8, 9, 0], [5, 6, 7, 1, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0]])
"""Texts 5 6 7 and 8 9, padding; the first again, a text of one token, padding."""
BYTES = 4 * 2
"""Of a token."""


class Target:
    """Features of a token: its id, and where it stands. Notes what it was asked."""

    def __init__(self) -> None:
        self.lines: list[list[int]] = []

    def __call__(self, ids_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        self.lines += ids_BS.tolist()
        return torch.stack([ids_BS, position_ids_BS], -1).float()


def test_texts_begin_where_positions_do() -> None:
    assert [tuple(text) for text in texts_of(POSITIONS)] == [(0, 0, 3), (0, 3, 5), (1, 0, 3)]


def test_a_text_is_computed_once_and_lies_where_it_lay() -> None:
    target, cache = Target(), FeatureCache(2, 1000)
    for _ in range(2):
        found = cache.features(IDS, POSITIONS, target)
        expected = torch.stack([IDS, POSITIONS], -1).float()
        expected[0, 5] = expected[1, 3:] = 0
        assert torch.equal(found, expected)
    assert sorted(id_ for line in target.lines for id_ in line if id_) == [5, 6, 7, 8, 9]
    assert cache.num_bytes == 5 * BYTES


def test_the_text_used_longest_ago_goes_first() -> None:
    target, cache = Target(), FeatureCache(2, 5 * BYTES, one_a_line)

    def ask(*ids: int) -> int:
        before = len(target.lines)
        cache.features(torch.tensor([ids]), torch.arange(len(ids))[None], target)
        return len(target.lines) - before

    assert [ask(1, 2), ask(3, 4, 5), ask(1, 2)] == [1, 1, 0]
    assert ask(6, 7) == 1, "three tokens go, two stay"
    assert [ask(1, 2), ask(6, 7), ask(3, 4, 5)] == [0, 0, 1]
    assert cache.num_bytes <= 5 * BYTES


def test_without_room_nothing_is_kept_and_all_is_there() -> None:
    target, cache = Target(), FeatureCache(2, 0)
    for _ in range(2):
        assert cache.features(IDS, POSITIONS, target)[0, 4].tolist() == [9, 1]
    assert cache.num_bytes == 0
    assert len(target.lines) >= 2


def test_a_batch_of_nothing_but_single_tokens_has_features_too() -> None:
    target, cache = Target(), FeatureCache(2, 1000)
    found = cache.features(torch.tensor([[5], [6]]), torch.zeros(2, 1, dtype=torch.int64), target)
    assert found.tolist() == [[[0, 0]], [[0, 0]]]
    assert target.lines == []
