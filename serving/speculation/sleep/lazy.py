"""What the sleeping draft of any model runner has in common."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from serving.speculation.sleep.missed import Span

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

READS_HIDDEN_STATES = "an EAGLE-3 head reads the target's hidden states of every step, in one pass"
"""Why a head does not sleep."""


def end_process() -> None:
    """At once: what would close first waits for the other ranks too."""
    logging.shutdown()
    os._exit(1)


class LazyDraft:
    """Wraps methods of one model runner. Its first error ends it: vLLM's own way from then on.

    Ranks of a tensor parallel group wait for one another in every pass of the draft, and vLLM only
    logs what a rank other than the first raises: the others would wait for minutes. So an error of
    one among several ends its process, which vLLM notices at once and ends the engine. It is noted
    first (`awake_note.py`), so that the next engine leaves the draft awake.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.is_off = self.is_left = False
        self.problem = ""
        """Why it no longer sleeps."""
        self.before_ending: Callable[[str], None] = lambda problem: None
        """Told of an error that ends the engine."""
        self.end_process: Callable[[], None] = end_process
        self.num_forwards_saved = 0
        self.num_tokens_caught_up = 0
        self.num_steps_without_drafts = 0
        """Steps sampled without the rejection sampler, where vLLM would use it."""

    def leave(self) -> None:
        """Leave the draft to vLLM from now on. Nothing may have slept yet."""
        self.is_off = self.is_left = True

    def _guarded(self, act: Callable[[], Result]) -> Result | None:
        if self.is_off:
            return None
        try:
            return act()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if self._num_ranks > 1:
                logger.exception(
                    "the draft failed to sleep on one of %d ranks, for which the others would wait:"
                    " this process ends, and the engine with it; the one started in its place "
                    "leaves the draft awake",
                    self._num_ranks,
                )
                self.before_ending(problem)
                self.end_process()
                raise
            self.is_off, self.problem = True, problem
            logger.exception("the draft no longer sleeps at k = 0; serving is not affected")
            return None


class Flat:
    """Spans of B requests as the flat arrays of one forward pass over T tokens."""

    def __init__(self, spans: list[Span]) -> None:
        self.lengths_B = np.array([end - first for _, first, end in spans], np.int32)
        self.num_tokens = int(self.lengths_B.sum())
        self.rows_B = np.array([b for b, _, _ in spans], np.int64)
        """rows in the batch"""
        self.rows_T = np.repeat(self.rows_B, self.lengths_B)
        self.positions_T = np.concatenate([np.arange(first, end) for _, first, end in spans])
        self.ends_B = np.array([end for _, _, end in spans], np.int32)
        self.starts = np.zeros(len(spans) + 1, np.int32)
        """[B + 1], where each request's tokens begin"""
        np.cumsum(self.lengths_B, out=self.starts[1:])
