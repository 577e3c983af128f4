"""What a sleeping draft misses, on batches written by hand. Blocks of 4 positions."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from serving.speculation.sleep.missed import Missed, Span, parts

TABLES = {"a": [7, 3, 5], "b": [9, 2, 4], "shares a's first two": [7, 3, 8]}


class Batch:
    def __init__(self, slack: int = 0) -> None:
        self.missed = Missed(4, slack)

    def step(
        self, k: int, given: dict[str, tuple[int, int]], anew: Collection[str] = ()
    ) -> list[Span]:
        """`given`: request -> (positions computed before this step, and after it)"""
        start_B = np.array([start for start, _ in given.values()])
        end_B = np.array([end for _, end in given.values()])
        names = list(given)

        def blocks(b: int) -> np.ndarray:
            return np.array(TABLES[names[b]])

        self.missed.meet(names, start_B, blocks, anew)
        if k:
            return self.missed.wake(names, start_B, end_B, blocks)
        self.missed.sleep(names, start_B, end_B, blocks)
        return []


def test_what_was_slept_through_is_caught_up_once() -> None:
    batch = Batch()
    assert batch.step(2, {"a": (0, 5), "b": (0, 2)}) == []
    batch.step(0, {"a": (5, 6), "b": (2, 3)})
    batch.step(0, {"a": (6, 7)})
    assert batch.step(1, {"a": (7, 8)}) == [(0, 5, 7)]
    assert batch.step(1, {"a": (8, 9), "b": (3, 4)}) == [(1, 2, 3)]
    assert batch.step(1, {"a": (9, 10), "b": (4, 5)}) == []


def test_where_the_host_may_be_ahead_it_begins_that_much_earlier() -> None:
    batch = Batch(slack=3)
    batch.step(2, {"a": (0, 5), "b": (0, 1)})
    batch.step(0, {"a": (8, 9), "b": (1, 2)})
    assert batch.step(1, {"a": (7, 8), "b": (2, 3)}) == [(0, 5, 7), (1, 0, 2)], (
        "a step back within the slack is none to the start"
    )


@pytest.mark.parametrize(("resumed_at", "anew"), [(0, ()), (1, ()), (5, ("a",)), (4, ("a",))])
def test_a_request_that_starts_again_misses_nothing_it_computes_anew(
    resumed_at: int, anew: Collection[str]
) -> None:
    batch = Batch(slack=2)
    batch.step(2, {"a": (0, 6)})
    batch.step(0, {"a": (6, 7)})
    batch.missed._is_stale_block = None
    assert batch.step(1, {"a": (resumed_at, 8)}, anew) == []


def test_a_cached_prefix_is_caught_up_from_its_first_block_that_the_draft_never_wrote() -> None:
    batch = Batch()
    batch.step(1, {"a": (0, 4)})
    batch.step(0, {"a": (4, 9)})
    assert batch.step(1, {"shares a's first two": (8, 9)}) == [(0, 4, 8)]
    batch.step(1, {"b": (0, 1)})
    batch.missed.forget_all_but({"b"})
    assert batch.step(1, {"shares a's first two": (8, 9)}) == [], "its blocks were written since"


def test_blocks_are_written_anew_by_another_request() -> None:
    batch = Batch()
    batch.step(0, {"a": (0, 8)})
    batch.missed.forget_all_but(())
    batch.step(1, {"a": (0, 8)})
    batch.missed.forget_all_but(())
    assert batch.step(1, {"shares a's first two": (8, 9)}) == []


def test_a_forgotten_request_is_met_anew_by_its_blocks() -> None:
    batch = Batch()
    batch.step(1, {"a": (0, 4)})
    batch.step(0, {"a": (4, 7)})
    batch.missed.forget_all_but(())
    assert batch.step(1, {"a": (7, 8)}) == [(0, 4, 7)]


def test_blocks_of_any_number_are_marked() -> None:
    batch = Batch()
    TABLES["far"] = [100_000, 100_001]
    batch.step(0, {"far": (0, 4)})
    batch.missed.forget_all_but(())
    assert batch.step(1, {"far": (4, 5)}) == [(0, 0, 4)]


def test_spans_are_cut_into_passes_that_fit() -> None:
    spans = [(0, 0, 5), (1, 3, 4), (2, 0, 9)]
    assert list(parts(spans, 6)) == [
        [(0, 0, 5), (1, 3, 4)],
        [(2, 0, 6)],
        [(2, 6, 9)],
    ]
    assert list(parts(spans, 100)) == [spans]
    assert list(parts([], 6)) == []


def test_a_block_taken_after_preemption_is_marked_like_any_other() -> None:
    """Where it starts again just where it was, nothing else tells that its last block is new."""
    batch = Batch()
    batch.step(1, {"a": (0, 4)})
    batch.step(0, {"a": (4, 5)})
    TABLES["a again"] = [7, 6, 5]
    start_B, end_B = np.array([4]), np.array([5])
    batch.missed.sleep(["a"], start_B, end_B, lambda _: np.array(TABLES["a again"]))
    TABLES["shares it"] = [7, 6, 8]
    assert batch.step(1, {"shares it": (8, 9)}) == [(0, 4, 8)]
