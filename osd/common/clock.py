"""What time it is, and waiting: handed to whoever decides by it, so that tests can move it."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The machine's.

    Example:
        clock = Clock()
        begun = clock.monotonic(); await clock.sleep(0.5); clock.monotonic() - begun  -> 0.5, whoever sets the time
    """

    def monotonic(self) -> float:
        """Seconds; for durations."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since the epoch; for what others are told."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
