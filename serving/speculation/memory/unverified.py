"""Drafts that were proposed and not verified, since the memory proposed in their place: judged by
what was served.

A token of a greedy draft is accepted with the target's probability for it, and with the same
probability it is the token that is served. So what was served says, without a bias, what the draft
would have been accepted. Counted only where it was chosen, it would look better than it is, or
worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Judged(NamedTuple):
    """A draft of a request that nobody verified, by what was served."""

    req_id: str
    step: int
    """The step in which it was proposed."""
    num_tokens: int
    """Tokens of the request before the draft."""
    num_outputs: int
    """How many of them are output."""
    num_drafted: int
    """Tokens of the draft, as far as it is known what was served in their place."""
    num_accepted: int
    found: float = 0.0
    """Tokens that the memory expected to be accepted in its place."""


class _Open:
    """A draft that is being compared."""

    __slots__ = ("at", "found", "num_outputs", "num_right", "step", "tokens")

    def __init__(
        self, step: int, at: int, num_outputs: int, tokens: Sequence[int], found: float
    ) -> None:
        self.step, self.at, self.num_outputs, self.tokens = step, at, num_outputs, tokens
        self.found = found
        self.num_right = 0

    def judged(self, req_id: str, num_drafted: int) -> Judged:
        where = req_id, self.step, self.at, self.num_outputs
        return Judged(*where, num_drafted, self.num_right, self.found)


class Unverified:
    """One per engine. A draft is open until a token differs, or all of its tokens were served."""

    def __init__(self) -> None:
        self._open: dict[str, list[_Open]] = {}

    def add(
        self,
        req_id: str,
        step: int,
        num_tokens: int,
        num_outputs: int,
        draft: Sequence[int],
        found: float = 0.0,
    ) -> None:
        """The draft was proposed behind so many tokens of the request, and will not be verified:
        the memory expects so many of its own to be accepted."""
        if draft:
            one = _Open(step, num_tokens, num_outputs, draft, found)
            self._open.setdefault(req_id, []).append(one)

    def served(self, req_id: str, tokens: Sequence[int]) -> list[Judged]:
        """The request now has these tokens, from its prompt on. Returns what is known by that."""
        drafts = self._open.get(req_id)
        if not drafts:
            return []
        judged, still_open = [], []
        for one in drafts:
            done = False
            while not done and one.at + one.num_right < len(tokens):
                if one.tokens[one.num_right] == tokens[one.at + one.num_right]:
                    one.num_right += 1
                    done = one.num_right == len(one.tokens)
                else:
                    done = True
            if done:
                judged.append(one.judged(req_id, len(one.tokens)))
            else:
                still_open.append(one)
        self._open[req_id] = still_open
        return judged

    def end(self, req_id: str) -> list[Judged]:
        """The request has gone: what is known of its drafts."""
        drafts = self._open.pop(req_id, [])
        return [one.judged(req_id, one.num_right) for one in drafts if one.num_right]

    def clear(self) -> None:
        """Another draft serves."""
        self._open.clear()
