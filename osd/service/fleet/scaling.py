"""How many replicas the load asks for.

    requests in flight / requests_each ──► needed, within min and max ──► for long? ──► wanted

What lasts only for a moment changes nothing: wanted is what was needed throughout the last
`up_seconds`, or at no moment of the last `down_seconds` was more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from osd.config.serving import ReplicasConfig


class Scaler:
    """Is told the load again and again, and says how many replicas there should be."""

    def __init__(self, config: ReplicasConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._since: float | None = None
        """Since when another number is needed, all in one direction."""
        self._needed = 0
        """Of the numbers needed since then, the one nearest to the present."""

    def needed(self, num_requests: float) -> int:
        """How many replicas this load needs, within min and max."""
        needed = math.ceil(num_requests / self._config.requests_each)
        return min(max(needed, self._config.min), self._config.max)

    def wanted(self, num: int, num_requests: float) -> int:
        """How many replicas there should be, where there are `num`, which have `num_requests` in
        flight together."""
        limits, now, needed = self._config, self._clock(), self.needed(num_requests)
        is_up = needed > num
        if needed == num:
            self._since = None
            return num
        if self._since is None or (self._needed > num) is not is_up:
            self._since, self._needed = now, needed
        self._needed = min(self._needed, needed) if is_up else max(self._needed, needed)
        seconds = limits.up_seconds if is_up else limits.down_seconds
        if now - self._since < seconds:
            return num
        self._since = None
        return self._needed
