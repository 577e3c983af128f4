"""Finds prompts whose beginning an earlier trace has already stored, as in each turn of a chat."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

BLOCK = 32
"""Tokens compared at a time. A repetition is found in whole blocks from the start of a prompt."""

MAX_BLOCKS = 65_536
"""Blocks remembered: two million tokens, about 10 MB. The least recently used are forgotten."""


class StoredPrefixes:
    """Remembers the tokens of stored traces as hashes, each of a block and all blocks before it."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def repeated(self, tokens: np.ndarray) -> int:
        """How many of the leading tokens are those of a stored trace."""
        num_blocks = 0
        for digest in _digests(tokens):
            if digest not in self._seen:
                break
            self._seen.move_to_end(digest)
            num_blocks += 1
        return num_blocks * BLOCK

    def remember(self, tokens: np.ndarray) -> None:
        """These tokens have been stored."""
        for digest in _digests(tokens):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)


def _digests(tokens: np.ndarray) -> Iterator[bytes]:
    """For each whole block, the digest of all tokens up to its end."""
    tokens = np.ascontiguousarray(tokens, np.int32)
    running = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        running.update(tokens[start : start + BLOCK].tobytes())
        yield running.digest()
