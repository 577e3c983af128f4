"""Where acceptance comes from: by place in the draft, by place in the output, by length of context, across requests.

This is the acceptance study of "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580), kept live.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

EDGES = (64, 256, 1024, 4096)
"""Lengths of context that part the buckets."""
MAX_FINISHED = 500
"""Newest finished requests whose spread is reported."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


class Anatomy:
    """Counters of tested and accepted draft tokens of the draft model."""

    def __init__(self, num_places: int) -> None:
        self._place_G = np.arange(num_places)
        self._tested_G = np.zeros(num_places, np.int64)
        self._accepted_G = np.zeros(num_places, np.int64)
        self._tested_L = np.zeros(len(EDGES) + 1, np.int64)
        self._accepted_L = np.zeros(len(EDGES) + 1, np.int64)
        self._finished: deque[float] = deque(maxlen=MAX_FINISHED)

    def add_step(self, drafted_B: np.ndarray, accepted_B: np.ndarray, lengths: Sequence[int]) -> None:
        """One verification step; `lengths`: tokens of each request before it."""
        tested_B = np.minimum(drafted_B, accepted_B + 1)
        self._tested_G += (self._place_G[:, None] < tested_B).sum(1)
        self._accepted_G += (self._place_G[:, None] < accepted_B).sum(1)
        bucket_B = np.searchsorted(EDGES, np.asarray(lengths[: len(tested_B)]), "right")
        np.add.at(self._tested_L, bucket_B, tested_B)
        np.add.at(self._accepted_L, bucket_B, accepted_B)

    def add_finished(self, acceptance: float) -> None:
        """A request has ended with this conditional acceptance; NaN = never tested."""
        if not math.isnan(acceptance):
            self._finished.append(acceptance)

    def report(self) -> dict[str, Any]:
        """{"tested_per_place", "accepted_per_place", "by_context", "spread"}."""
        names = [f"<{edge}" for edge in EDGES] + [f">={EDGES[-1]}"]
        spread = np.quantile(self._finished, QUANTILES).tolist() if self._finished else []
        return {
            "tested_per_place": self._tested_G.tolist(),
            "accepted_per_place": self._accepted_G.tolist(),
            "by_context": {
                name: [int(tested), int(accepted)]
                for name, tested, accepted in zip(names, self._tested_L, self._accepted_L, strict=True)
            },
            "spread": dict(zip(map(str, QUANTILES), spread, strict=False)),
        }
