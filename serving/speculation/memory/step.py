"""All requests of a step in one call of the kernels: a call from Python costs as much as what it
does for one token.

Legend: B requests of a step, S slots (running requests), W tokens of a window, T tokens that were
served to all of them, K of a proposal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serving.speculation.memory.kernels import (
    LONGEST,
    SHARED,
    Cells,
    Table,
    learn,
    propose,
    remember,
)


class Windows(NamedTuple):
    """The last tokens of running requests, as many as contexts are long, with room for those of a
    step and for a proposal behind them."""

    token_SW: np.ndarray
    """int32"""
    num_S: np.ndarray
    """int64: how many of them are known"""
    scope_S2: np.ndarray
    """int64: `SHARED` and `OWN`"""
    is_kept_S: np.ndarray
    """bool: whether others may be proposed what this one is served"""

    @classmethod
    def empty(cls, num: int, k: int) -> Windows:
        """For so many requests, with proposals of up to k tokens."""
        return cls(
            np.zeros((num, LONGEST + 2 * (k + 1)), np.int32),
            np.zeros(num, np.int64),
            np.zeros((num, 2), np.int64),
            np.zeros(num, np.bool_),
        )


class Proposed(NamedTuple):
    """What may follow, for each request of a step."""

    num_B: np.ndarray
    """int64"""
    found_BK: np.ndarray
    """int64"""
    survival_BK: np.ndarray
    """float64"""


def advance(
    shared: Table,
    own: Table,
    cells: Cells,
    windows: Windows,
    slot_B: np.ndarray,
    end_B: np.ndarray,
    token_T: np.ndarray,
    learns_B: np.ndarray,
    now: int,
) -> int:
    """Request b was served the tokens up to `end_B[b]`. Where it `learns_B`, its own table is told,
    and what both would have said of them is judged. Returns what was fetched, so that it is."""
    begin = read = 0
    for b in range(len(slot_B)):
        slot = slot_B[b]
        first = end = int(windows.num_S[slot])
        token_W = windows.token_SW[slot]
        for t in range(begin, end_B[b]):
            token_W[end] = token_T[t]
            end += 1
        begin = end_B[b]
        scopes = int(windows.scope_S2[slot, 0]), int(windows.scope_S2[slot, 1])
        if learns_B[b]:
            read ^= learn(shared, own, cells, token_W, first, end, scopes, now)
        if windows.is_kept_S[slot]:
            read ^= remember(shared, token_W, first, end, scopes[SHARED], now)
        num = min(end, LONGEST)
        for i in range(num):
            token_W[i] = token_W[end - num + i]
        windows.num_S[slot] = num
    return read


def propose_all(
    shared: Table,
    own: Table,
    cells: Cells,
    windows: Windows,
    slot_B: np.ndarray,
    least: float,
    proposed: Proposed,
) -> None:
    """Write what may follow for each request, as `propose` does for one."""
    for b in range(len(slot_B)):
        slot = slot_B[b]
        scopes = int(windows.scope_S2[slot, 0]), int(windows.scope_S2[slot, 1])
        proposed.num_B[b] = propose(
            shared,
            own,
            cells,
            windows.token_SW[slot],
            int(windows.num_S[slot]),
            scopes,
            least,
            proposed.found_BK[b],
            proposed.survival_BK[b],
        )
