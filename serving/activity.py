"""Whether an engine was used lately, and by how many at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SECONDS_ACTIVE = 3.0
"""How long after its last request an engine is asked for its counters. A call keeps a vLLM worker
spinning for a second, so calling an idle one every second would burn a core."""


class Activity:
    """Knows whether the engine was used lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._last_at = self._counted_at = clock()
        self._open_s = 0.0
        self.is_always = False
        """Whether it is used in ways that are not seen here."""

    @property
    def num_open(self) -> int:
        """Requests that are being answered, or wait for it."""
        return self._num_open

    def open_seconds(self) -> float:
        """Seconds that clients have waited for answers so far, all together."""
        self._count()
        return self._open_s

    def is_recent(self) -> bool:
        return (
            self.is_always or self._num_open > 0 or self._clock() - self._last_at < SECONDS_ACTIVE
        )

    def watching(self, app: Any) -> Any:
        """The ASGI application, with its work noted."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if not _is_work(scope):
                return await app(scope, receive, send)
            self._count()
            self._num_open += 1
            try:
                await app(scope, receive, send)
            finally:
                self._count()
                self._num_open -= 1
                self._last_at = self._clock()

        return watched

    def _count(self) -> None:
        now = self._clock()
        self._open_s += self._num_open * (now - self._counted_at)
        self._counted_at = now


def _is_work(scope: Any) -> bool:
    """Whether somebody waits for an answer of the engine, or may."""
    if scope["type"] != "http":
        return scope["type"] == "websocket"
    path = scope.get("path", "")
    is_read = scope["method"] == "GET" and path.startswith("/v1/") and path != "/v1/models"
    return scope["method"] == "POST" or is_read
