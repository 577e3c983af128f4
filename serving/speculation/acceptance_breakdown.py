"""Acceptance by position in the draft, by position in the output, by length of context, and its
spread across requests.

This is the acceptance study of "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580),
kept live.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

CONTEXT_EDGES = (64, 256, 1024, 4096)
"""Lengths of context, in tokens, at which a new bucket begins."""
OUTPUT_EDGES = (16, 64, 256, 1024)
"""Positions in the output at which a new bucket begins."""
MAX_FINISHED = 500
"""Newest finished requests whose spread is reported."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


class AcceptanceBreakdown:
    """Counters of tested and accepted draft tokens of the draft model."""

    def __init__(self, num_positions: int) -> None:
        self._position_G = np.arange(num_positions)
        self._tested_G = np.zeros(num_positions, np.int64)
        self._accepted_G = np.zeros(num_positions, np.int64)
        self._by_context = _Buckets(CONTEXT_EDGES)
        self._by_output = _Buckets(OUTPUT_EDGES)
        self._finished: deque[float] = deque(maxlen=MAX_FINISHED)

    def add_step(
        self,
        drafted_B: np.ndarray,
        accepted_B: np.ndarray,
        lengths: Sequence[int],
        outputs: Sequence[int] = (),
    ) -> None:
        """Add one verification step. `lengths`: tokens of each request before it; `outputs`: how
        many of them are output."""
        tested_B = np.minimum(drafted_B, accepted_B + 1)
        self._tested_G += (self._position_G[:, None] < tested_B).sum(1)
        self._accepted_G += (self._position_G[:, None] < accepted_B).sum(1)
        self._by_context.add(lengths, tested_B, accepted_B)
        if outputs:
            self._by_output.add(outputs, tested_B, accepted_B)

    def add_finished(self, acceptance: float) -> None:
        """A request has ended with this conditional acceptance; NaN = never tested."""
        if not math.isnan(acceptance):
            self._finished.append(acceptance)

    def report(self) -> dict[str, Any]:
        """The fields of `SpeculationReport` that this knows."""
        spread = np.quantile(self._finished, QUANTILES).tolist() if self._finished else []
        return {
            "tested_per_position": tuple(self._tested_G.tolist()),
            "accepted_per_position": tuple(self._accepted_G.tolist()),
            "by_context": self._by_context.report(),
            "by_output": self._by_output.report(),
            "spread": dict(zip(map(str, QUANTILES), spread, strict=False)),
        }


class _Buckets:
    """Tested and accepted tokens by a length."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges
        self._tested_L = np.zeros(len(edges) + 1, np.int64)
        self._accepted_L = np.zeros(len(edges) + 1, np.int64)

    def add(self, lengths: Sequence[int], tested_B: np.ndarray, accepted_B: np.ndarray) -> None:
        bucket_B = np.searchsorted(self._edges, np.asarray(lengths[: len(tested_B)]), "right")
        np.add.at(self._tested_L, bucket_B, tested_B)
        np.add.at(self._accepted_L, bucket_B, accepted_B)

    def report(self) -> dict[str, tuple[int, int]]:
        """Bucket -> (tested, accepted)."""
        names = [f"<{edge}" for edge in self._edges] + [f">={self._edges[-1]}"]
        counts = zip(self._tested_L.tolist(), self._accepted_L.tolist(), strict=True)
        return dict(zip(names, counts, strict=True))
