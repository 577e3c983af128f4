"""Chance, as drafting and verification ask for it: whoever answers decides what happens.

Random in the engine; in tests every answer is gone through, each with its probability.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Dice(Protocol):
    """Answers to questions of chance."""

    def accepts(self, probability: float) -> bool:
        """True with this probability; one above 1 is certain."""
        ...

    def draw(self, probs_V: np.ndarray) -> int:
        """A token from a distribution."""
        ...


class RandomDice:
    """Dice of a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def accepts(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def draw(self, probs_V: np.ndarray) -> int:
        # The sum is not exactly 1, and a token without probability is never drawn.
        cumulated_V = np.cumsum(probs_V)
        drawn = np.searchsorted(cumulated_V, self._rng.random() * cumulated_V[-1], side="right")
        return int(drawn)
