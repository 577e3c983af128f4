"""Deletes traces that have become too old."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from osd.common.clock import Clock
from osd.control.protocols import Buffer

SECONDS_BETWEEN_PURGES = 60.0
"""Each purge may make the server rewrite its append-only file."""


class TraceExpiry:
    """Deletes traces older than `max_age_seconds`, at most a twentieth of that age too late."""

    def __init__(self, buffer: Buffer, max_age_seconds: float | None, clock: Clock) -> None:
        self._buffer, self._max_age, self._clock = buffer, max_age_seconds, clock
        self._next_at = -math.inf

    async def delete_old(self) -> None:
        """Purge the buffer when that is due. Raises `ReplayBufferError` when Redis is away."""
        max_age, now = self._max_age, self._clock.monotonic()
        if max_age is None or now < self._next_at:
            return
        self._next_at = now + SECONDS_BETWEEN_PURGES  # also when the purge fails
        await asyncio.to_thread(
            partial(self._buffer.purge, before=self._clock.time() - max_age, all_targets=True)
        )
        self._next_at = now + max(SECONDS_BETWEEN_PURGES, max_age / 20)
