"""Growing pauses between attempts, and one line in the log when trouble begins and one when it is over."""

from __future__ import annotations

import asyncio
import logging

MAX_PAUSE_S = 30.0


class Backoff:
    """One kind of trouble. `pause` after a failure, `over` after a success.

    Example:
        away = Backoff(0.5)          # pauses of 0.5, 1, 2 ... 30 seconds
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self.num_failures = 0

    async def pause(self, text: str, log: logging.Logger) -> None:
        """Say it if it is new, then wait before the next attempt."""
        if self.num_failures == 0:
            log.warning("%s; trying again until it works", text)
        seconds = min(MAX_PAUSE_S, self.first_s * 2 ** min(self.num_failures, 16))
        self._last = text
        self.num_failures += 1
        await asyncio.sleep(seconds)

    def over(self, log: logging.Logger) -> bool:
        """Whether there was trouble before; then that it is over is said."""
        was_failing, self.num_failures = self.num_failures > 0, 0
        if was_failing:
            log.warning("works again: %s", self._last)
        return was_failing
