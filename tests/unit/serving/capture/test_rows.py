"""Kinds of rows, their top-k with the rest of the mass, and the memory they are copied to."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from osd.records import ACCEPTED, PLAIN, REJECTED
from serving.capture.rows import Logits, RowPool, TopK, kinds_of, summarise, top_of


@pytest.mark.parametrize(
    ("sampled", "num_drafts", "kinds"),
    [
        ([7, -1, -1, -1], 0, [PLAIN, -1, -1, -1]),
        ([7, -1, -1, -1], 1, [REJECTED, -1, -1, -1]),
        ([7, -1, -1, -1], 3, [REJECTED, -1, -1, -1]),
        ([7, 0, -1, -1], 1, [ACCEPTED, PLAIN, -1, -1]),
        ([7, 0, -1, -1], 2, [ACCEPTED, REJECTED, -1, -1]),
        ([7, 8, 9, 0], 3, [ACCEPTED, ACCEPTED, ACCEPTED, PLAIN]),
        ([7, 8, 9, -1], 3, [ACCEPTED, ACCEPTED, REJECTED, -1]),
        ([-1, -1, -1, -1], 0, [-1, -1, -1, -1]),
        ([-1, -1, -1, -1], 3, [-1, -1, -1, -1]),
    ],
)
def test_all_tokens_but_the_last_were_accepted(
    sampled: list[int], num_drafts: int, kinds: list[int]
) -> None:
    others = np.array([[5, 6, -1, -1], sampled, [5, -1, -1, -1]])
    found = kinds_of(others, np.array([1, num_drafts, 0]))
    assert found.dtype == np.int8
    assert found.tolist() == [[ACCEPTED, PLAIN, -1, -1], kinds, [PLAIN, -1, -1, -1]]


def test_a_summary_worked_out_by_hand() -> None:
    """Four tokens with 1/2, 1/4, 1/8 and 1/8 of the mass: the two likeliest are kept, a quarter is
    left."""
    mass = torch.tensor([[0.125, 0.5, 0.125, 0.25], [0.25, 0.125, 0.5, 0.125]])
    ids, logprobs, tail = summarise(mass.log() + torch.tensor([[3.0], [-70.0]]), 2)
    assert ids.tolist() == [[1, 3], [2, 0]]
    torch.testing.assert_close(
        logprobs.exp(), torch.tensor([[0.5, 0.25]] * 2).half(), rtol=2e-3, atol=0
    )
    torch.testing.assert_close(tail.exp(), torch.tensor([0.25, 0.25]))


def test_all_of_a_small_vocabulary_may_be_kept_and_nothing_is_left() -> None:
    ids, logprobs, tail = summarise(torch.zeros(1, 3), 9)
    assert sorted(ids[0].tolist()) == [0, 1, 2] and tail.tolist() == [-torch.inf]
    torch.testing.assert_close(logprobs.float().exp(), torch.full((1, 3), 1 / 3), rtol=1e-3, atol=0)


def test_some_rows_of_a_top_are_copies_in_the_order_asked_for() -> None:
    top = TopK(
        np.arange(6, dtype=np.int32).reshape(3, 2),
        np.zeros((3, 2), np.float16),
        np.arange(3, dtype=np.float32),
    )
    some = top.of(np.array([2, 0]))
    assert some.ids_RK.tolist() == [[4, 5], [0, 1]] and some.tail_R.tolist() == [2, 0]
    some.ids_RK[:] = 9
    assert top.ids_RK.max() == 5
    top.give_back()
    assert top.nbytes == 6 * 4 + 6 * 2 + 3 * 4
    logits = Logits(torch.arange(6.0).reshape(3, 2))
    assert logits.nbytes == 24 and Logits(logits.logits_RV, num_held_bytes=99).nbytes == 99
    assert logits.of(np.array([2, 1])).logits_RV.tolist() == [[4, 5], [2, 3]]


def test_memory_is_given_back_once_all_is_settled() -> None:
    given: list[int] = []
    steps: list[Logits | TopK] = [
        Logits(torch.eye(3)[n : n + 1].clone(), give_back=partial(given.append, n))
        for n in range(3)
    ]
    top = top_of([steps[0], top_of([Logits(torch.zeros(1, 3))], 1), *steps[1:]], 1)
    assert top.ids_RK[[0, 2, 3], 0].tolist() == [0, 1, 2] and given == [0, 1, 2]


def test_memory_of_rows_is_used_again_where_it_fits() -> None:
    pool, logits = RowPool(), torch.arange(40.0).reshape(20, 2)
    first = pool.copy(logits, torch.tensor([3, 1]))
    assert first.logits_RV.tolist() == [[6, 7], [2, 3]] and first.nbytes == 16 * 2 * 4
    where = first.logits_RV.data_ptr()
    assert pool.copy(logits, torch.tensor([0])).logits_RV.data_ptr() != where, "it is still held"
    for num in (16, 1):
        first.give_back()
        first = pool.copy(logits, torch.arange(num))
        assert first.logits_RV.data_ptr() == where and first.logits_RV.shape == (num, 2)
    wider, narrower = torch.cat([logits, logits], 1), logits[:, :1].contiguous()
    for others, num in ((logits, 16 + 1), (narrower, 1), (wider, 1), (logits.half(), 1)):
        first.give_back()
        copied = pool.copy(others, torch.arange(num))
        assert torch.equal(copied.logits_RV, others[:num])
        assert copied.logits_RV.dtype == others.dtype
        assert copied.nbytes == others[:1].nbytes * 16 * (1 + (num > 16))


def test_the_pool_keeps_no_more_than_it_may() -> None:
    # 16 of them are a quarter of what the pool may keep.
    pool, row = RowPool(), torch.zeros(1, (32 << 20) // 16 // 4)
    held = [pool.copy(row, torch.tensor([0])) for _ in range(6)]
    for one in held:
        one.give_back()
    again = [pool.copy(row, torch.tensor([0])).logits_RV.data_ptr() for _ in range(6)]
    assert sum(where in {one.logits_RV.data_ptr() for one in held[:4]} for where in again) == 4
    assert not {one.logits_RV.data_ptr() for one in held[4:]} & set(again), (
        "nobody holds more than four at rest"
    )
