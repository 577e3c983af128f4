"""Time and waiting, as an object that tests can replace."""

from __future__ import annotations

import asyncio
import time
from collections import deque

SKEW_OVER = 8
"""Messages from which it is known by how much a clock is wrong."""
MAX_LATE_S = 12.0
"""A message does not travel so long: one that is later is of a clock that was set."""


class Clock:
    """The machine's clock.

    Example:
        clock = Clock()
        begun = clock.monotonic()
        await clock.sleep(0.5)
        clock.monotonic() - begun  # 0.5, also when the time was set meanwhile
    """

    def monotonic(self) -> float:
        """Seconds, for durations."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since the epoch, for records."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Skew:
    """By how much another machine's clock is behind, from messages that say when they were sent.

    Example:
        skew = Skew()
        skew.by_ours(at=1_000.2, now=4_600.5)  # 4600.2: its clock is an hour behind
    """

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=SKEW_OVER)
        """When messages were seen, less their times: how far its clock is behind, and a little."""

    def by_ours(self, at: float, now: float) -> float:
        """By the caller's clock, when a message was sent that is seen now. In whole seconds of
        correction, so that nothing is changed where clocks are right."""
        delay = now - at
        if self._delays and abs(delay - min(self._delays)) > MAX_LATE_S:
            self._delays.clear()
        self._delays.append(delay)
        return at + round(min(self._delays))
