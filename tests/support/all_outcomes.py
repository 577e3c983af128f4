"""Dice that go through every outcome, each with its probability: what a function of chance does is
then known exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")


class Script:
    """Dice that answer as they are told, then always in the first possible way."""

    def __init__(self, answers: tuple[int, ...]) -> None:
        self._told = answers
        self.answers: list[int] = []
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []
        """Answers not given, each behind all that were given before it."""

    def accepts(self, probability: float) -> bool:
        chance = min(1.0, probability)
        return bool(self._answer(np.array([1.0 - chance, chance])))

    def draw(self, probs_V: np.ndarray) -> int:
        return self._answer(probs_V)

    def _answer(self, probs: np.ndarray) -> int:
        if len(self.answers) < len(self._told):
            answer = self._told[len(self.answers)]
        else:
            answer, *others = np.flatnonzero(probs).tolist()
            self.others += [(*self.answers, other) for other in others]
        self.answers.append(answer)
        self.probability *= float(probs[answer])
        return answer


def all_outcomes(play: Callable[[Script], Result]) -> Iterator[tuple[Result, float]]:
    """Each result of `play`, with its probability; a result may come more than once."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        dice = Script(waiting.pop())
        result = play(dice)
        waiting += dice.others
        yield result, dice.probability
