"""Time and waiting, as an object that tests can replace."""

from __future__ import annotations

import asyncio
import time


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
