"""A running request, as the memory knows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PROMPT = 1 << 15
"""Last tokens of a prompt that are remembered."""


class Running:
    """Tokens of a running request, and how far they are remembered."""

    __slots__ = (
        "is_kept", "num_own", "num_tokens", "own", "proposal", "shared", "slot", "token_T",
    )  # fmt: skip

    def __init__(self, prompt: Sequence[int], room: int, shared: int, own: int, is_kept: bool):
        prompt = prompt[-MAX_PROMPT:]
        self.slot = 0
        """of its window"""
        self.proposal = (0, 0, 0)
        """(which, tokens it was made behind, its row) of the newest that was made for many"""
        self.num_tokens = len(prompt)
        self.num_own = 0
        """Tokens that its own table knows."""
        self.token_T = np.zeros(len(prompt) + 256 + room, np.int32)
        self.token_T[: len(prompt)] = prompt
        self.shared, self.own, self.is_kept = shared, own, is_kept

    def write(self, tokens: Sequence[int], room: int) -> int:
        """Put tokens behind those it has, without counting them. Returns where they end."""
        end = self.num_tokens + len(tokens)
        if end + room > len(self.token_T):
            longer_T = np.zeros(2 * end + room, np.int32)
            longer_T[: self.num_tokens] = self.token_T[: self.num_tokens]
            self.token_T = longer_T
        self.token_T[self.num_tokens : end] = tokens
        return end

    def append(self, tokens: Sequence[int], room: int) -> None:
        if self.num_tokens + len(tokens) + room > len(self.token_T):
            self.num_tokens = self.write(tokens, room)
            return
        for token in tokens:  # few: one by one they take less time than together
            self.token_T[self.num_tokens] = token
            self.num_tokens += 1
