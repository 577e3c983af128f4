"""Prompt lookup: propose what followed the last tokens at their earlier occurrence in the request.

The scheduler knows every token of a request, so a lookup needs neither the worker nor the draft
model. A proposal can be compared with what the target then wrote: its acceptance is known without
verifying it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SIZES = (4, 2)
"""Lengths of the suffix looked up, the longest first."""
MAX_INDEXED = 1024
"""Tokens indexed in one step, so that a long prompt does not delay it."""
STEPS_PER_SHADOW = 8
"""Steps of a request between two lookups in shadow."""


class Lookup:
    """Where one request's n-grams occur."""

    __slots__ = ("_ends", "_indexed")

    def __init__(self) -> None:
        self._indexed = 0
        self._ends: dict[tuple[int, ...], int] = {}
        """n-gram -> index of the token after its last occurrence, the end of the text excluded"""

    def index(self, tokens: Sequence[int]) -> bool:
        """Index some more of the tokens; True once all but the last one are indexed."""
        end = min(len(tokens), self._indexed + MAX_INDEXED)
        for i in range(self._indexed, end):
            for size in SIZES:
                if i >= size:
                    self._ends[tuple(tokens[i - size : i])] = i
        self._indexed = max(self._indexed, end)
        return self._indexed >= len(tokens)

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """Up to k tokens that may follow; none when the last tokens never occurred before."""
        if k <= 0 or not self.index(tokens):
            return []
        for size in SIZES:
            if len(tokens) >= size and (at := self._ends.get(tuple(tokens[-size:]))) is not None:
                found = list(tokens[at : at + k])
                period = len(found)
                while len(found) < k:  # it reaches the end of the request: repeat the loop
                    found.append(found[-period])
                return found
        return []


class Shadow:
    """Judges lookups of one request by what the target wrote, without verifying them."""

    __slots__ = ("_at", "_num_steps", "_proposed")

    def __init__(self) -> None:
        self._num_steps = 0
        self._at = -1
        """Length of the request at the lookup that is to be judged; -1 = there is none."""
        self._proposed: list[int] = []

    def step(
        self, lookup: Lookup, tokens_of: Callable[[], Sequence[int]], k: int
    ) -> tuple[int, int] | None:
        """Called after each step. Returns how many draft tokens count as proposed and as accepted
        when a lookup can be judged, else None. A lookup that found nothing counts as one proposed
        token that was not accepted."""
        self._num_steps += 1
        if self._at < 0:
            if self._num_steps % STEPS_PER_SHADOW == 0:
                tokens = tokens_of()
                if lookup.index(tokens):  # a long prompt takes several turns
                    self._at, self._proposed = len(tokens), lookup.propose(tokens, k)
            return None
        proposed, written = self._proposed, tokens_of()[self._at : self._at + len(self._proposed)]
        num = next(
            (j for j, (a, b) in enumerate(zip(proposed, written, strict=False)) if a != b),
            len(written),
        )
        if num == len(written) < len(proposed):
            return None
        self._at = -1
        return max(len(proposed), 1), num
