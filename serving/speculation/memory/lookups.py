"""What the memory found lately, by which it is estimated what it will find, and who is looked up
where it may not propose.

Legend: B requests, R newest look-ups, M tokens of a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_LOOKUPS = 8
"""Newest look-ups by which it is estimated what the memory will find for a request."""
NUM_LOOKUPS_OF_ALL = 64
"""Newest look-ups of all requests, which stand for those that a request has not had yet."""
NUM_UNUSED = 16
"""Look-ups in a step in which the memory may not propose: in the steps between two decisions as
many as a decision looks at."""


class Lookups:
    """The survival of the tokens that were found, 0 where there was none."""

    __slots__ = ("_num", "_survival_RM")

    def __init__(self, num: int, length: int) -> None:
        self._survival_RM = np.zeros((num, length))
        self._num = 0

    def add(self, survival_M: np.ndarray) -> None:
        row_M = self._survival_RM[self._num % len(self._survival_RM)]
        num = len(survival_M)
        row_M[num:] = 0.0
        if num:
            row_M[:num] = survival_M
        self._num += 1

    def newest(self, num: int) -> np.ndarray:
        """float [R, M]: the newest first; fewer than `num` where there are no more."""
        length = len(self._survival_RM)
        ago = np.arange(1, min(num, self._num, length) + 1)
        return self._survival_RM[(self._num - ago) % length]

    def completed(self, num: int, others: Lookups) -> np.ndarray:
        """float [num, M]: with the newest of others, as long as there are too few."""
        own_RM = self.newest(num)
        if not (missing := num - len(own_RM)):
            return own_RM
        shape, rest_RM = (missing, own_RM.shape[1]), others.newest(missing)
        filled_RM = np.resize(rest_RM, shape) if len(rest_RM) else np.zeros(shape)
        return np.concatenate([own_RM, filled_RM])


def found_lately(requests: Sequence[Lookups | None], all_lookups: Lookups) -> np.ndarray:
    """float [B, R, M]. None: the memory is not asked for a request."""
    # Many requests show by few look-ups of each what few requests show by many.
    num = min(max(NUM_LOOKUPS_OF_ALL // len(requests), 1), NUM_LOOKUPS)
    nothing_RM = np.zeros_like(all_lookups.completed(num, all_lookups))
    return np.stack(
        [nothing_RM if one is None else one.completed(num, all_lookups) for one in requests]
    )


class Turns:
    """Few requests are looked up in a step in which the memory may not propose; they take turns."""

    def __init__(self) -> None:
        self._due: set[str] | None = None
        """None = all"""
        self._num = 0

    def begin(
        self, served: list[tuple[str, Sequence[int]]], is_unused: bool
    ) -> tuple[list[tuple[str, Sequence[int]]], int]:
        """A step served these requests. Returns them, those that are to be looked up first, and
        the number of these."""
        self._due, num = None, len(served)
        if is_unused and num > NUM_UNUSED:
            first, num = self._num % num, NUM_UNUSED
            served = served[first:] + served[:first]
            self._due = {req_id for req_id, _ in served[:num]}
            self._num += num
        return served, num

    def is_due(self, req_id: str) -> bool:
        """Whether this request is to be looked up although the memory may not propose."""
        return self._due is None or req_id in self._due
