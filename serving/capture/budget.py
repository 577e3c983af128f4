"""How many bytes of traces may leave a worker."""

from __future__ import annotations

import time
from collections.abc import Callable


class ByteBudget:
    """A token bucket that holds one second's worth: in any t seconds at most (t + 1) x
    `bytes_per_second` pass."""

    def __init__(self, bytes_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._left = float(bytes_per_second)
        self._at = clock()

    def spend(self, num_bytes: int) -> bool:
        """Take `num_bytes` off the budget; False, and nothing is taken, when they are too many."""
        now = self._clock()
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True
