"""A clock that stands still until it is moved."""

from __future__ import annotations

import asyncio

from osd.common.clock import Clock


class HandClock(Clock):
    """`slept`: what anybody waited, which here takes no time.

    Example:
        clock = HandClock()
        monitor = RollbackMonitor(..., clock)
        clock.move(60)
    """

    def __init__(self, now: float = 1.7e9 + 0.5) -> None:
        self.now = now
        self.slept: list[float] = []
        self._begun = now - 5000

    def move(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def set(self, seconds: float) -> None:
        """The wall clock is set forward (or back), while no time passes."""
        self.now += seconds
        self._begun += seconds

    def monotonic(self) -> float:
        return self.now - self._begun

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)
