"""Growing pauses between attempts, and a line in the log when an outage begins and when it ends."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

MAX_PAUSE_S = 30.0


class Backoff:
    """Says when something that failed may be tried again. Thread-safe.

    The delay starts at `first_s` and doubles with every failure, up to `longest_s`.

    Example:
        Backoff()          # delays of 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5 ... seconds
    """

    def __init__(
        self,
        first_s: float = 0.1,
        longest_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._clock = clock
        self._next_try = 0.0
        self._lock = threading.Lock()
        self.num_failures = 0
        """Failures since the last success."""
        self.delay_s = 0.0
        """Seconds from the last failure to the next attempt; 0 after a success."""

    def may_try(self) -> bool:
        """Whether to try now. During an outage, one caller per delay is told to."""
        with self._lock:
            if self.num_failures and self._clock() < self._next_try:
                return False
            self._next_try = self._clock() + self.delay_s
            return True

    def failed(self) -> bool:
        """Note a failure; return whether it is the first of an outage."""
        with self._lock:
            self.num_failures += 1
            self.delay_s = min(max(2 * self.delay_s, self._first_s), self._longest_s)
            self._next_try = self._clock() + self.delay_s
            return self.num_failures == 1

    def succeeded(self) -> bool:
        """Note a success; return whether it ends an outage."""
        with self._lock:
            was_failing = self.num_failures > 0
            self.num_failures, self.delay_s = 0, 0.0
            return was_failing


class Outage:
    """One kind of trouble in asynchronous code. `pause` after a failure, `over` after a success.

    Example:
        outage = Outage(0.5)          # pauses of 0.5, 1, 2 ... 30 seconds
    """

    def __init__(self, first_s: float) -> None:
        self._backoff = Backoff(first_s, MAX_PAUSE_S)
        self._text = ""

    @property
    def num_failures(self) -> int:
        """Failures since the last success."""
        return self._backoff.num_failures

    async def pause(self, text: str, log: logging.Logger) -> None:
        """Log the first failure of an outage, then wait before the next attempt."""
        if self._backoff.failed():
            log.warning("%s; trying again until it works", text)
        self._text = text
        await asyncio.sleep(self._backoff.delay_s)

    def over(self, log: logging.Logger) -> bool:
        """Log the end of an outage; return whether there was one."""
        was_failing = self._backoff.succeeded()
        if was_failing:
            log.warning("works again: %s", self._text)
        return was_failing
