"""Whether the Ray that a service runs on is still there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

SECONDS_UNTIL_GONE = 10.0
"""A head that accepts no connection for so long is gone. One that is overloaded accepts them."""
SECONDS_TO_CONNECT = 2.0


class RayWatch:
    """Looks whether the head of a Ray cluster accepts connections at `address` (host:port)."""

    def __init__(
        self,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[str], None] | None = None,
    ) -> None:
        self._address, self._clock, self._connect = address, clock, connect or connected
        self._last_seen = clock()

    def is_gone(self) -> bool:
        """Whether it has accepted none for `SECONDS_UNTIL_GONE`."""
        try:
            self._connect(self._address)
            self._last_seen = self._clock()
        except OSError:
            pass
        return self._clock() - self._last_seen >= SECONDS_UNTIL_GONE


def connected(address: str) -> None:
    """Raise `OSError` where nobody accepts a connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT):
        pass
