"""Whether the Ray that a service runs on is still there.

    Ray on this machine   accepts no connection for 10 s ────────────────────┐
    Ray's head            accepts none for 10 s, a joined one's for longer ──┴─► the service ends

A head that keeps its tables in a Redis of its own goes on where it was when it is started again.
Until then the processes of its cluster wait, and requests are answered. Ray ends them all, and this
process, when that takes a minute; the service ends before, with a line that says why.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

SECONDS_UNTIL_GONE = 10.0
"""What accepts no connection for so long is gone. What is overloaded accepts them."""
RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable that says how long Ray's processes wait for their head."""
RAYS_SECONDS, SECONDS_TO_END = 60.0, 20.0
SECONDS_TO_CONNECT, SECONDS_TO_TELL = 2.0, 2.0
HEAD, HERE = "head", "here"


class RayWatch:
    """Looks whether Ray's head and Ray on this machine accept connections (host:port; "" is not
    looked at). `patience_s`: how long the head may be away."""

    def __init__(
        self,
        head: str,
        here: str = "",
        patience_s: float = SECONDS_UNTIL_GONE,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[str], None] | None = None,
    ) -> None:
        self._addresses = {HEAD: head, HERE: here}
        self._patience_s, self._clock = patience_s, clock
        self._connect = connect or connected
        self._seen_at = dict.fromkeys(self._addresses, clock())
        self._is_told = False
        self.is_head_away = False
        """Meanwhile Ray starts nothing."""

    def what_is_gone(self) -> str:
        """`HERE` or `HEAD`; "" while both are there."""
        there = {place for place, address in self._addresses.items() if self._accepts(address)}
        now = self._clock()
        self._seen_at |= dict.fromkeys(there, now)
        self.is_head_away = HEAD not in there
        away_s = {place: now - at for place, at in self._seen_at.items()}
        if away_s[HERE] >= SECONDS_UNTIL_GONE:
            return HERE
        if away_s[HEAD] >= self._patience_s:
            return HEAD
        self._tell(away_s[HEAD])
        return ""

    def _accepts(self, address: str) -> bool:
        try:
            if address:
                self._connect(address)
        except OSError:
            return False
        return True

    def _tell(self, away_s: float) -> None:
        if self._is_told and not self.is_head_away:
            logger.warning("Ray's head is back")
            self._is_told = False
        elif away_s >= SECONDS_TO_TELL and not self._is_told:
            logger.warning(
                "Ray's head is away: requests are answered, and what ends meanwhile is started "
                "again when it is back; the service waits for %.0f s",
                self._patience_s,
            )
            self._is_told = True


def patience(environ: Mapping[str, str] = os.environ) -> float:
    """How long the head of a joined cluster may be away: as long as Ray waits, less what the
    service takes to end. What is no number is Ray's to refuse."""
    try:
        seconds = float(environ.get(RAYS_PATIENCE) or RAYS_SECONDS)
    except ValueError:
        seconds = RAYS_SECONDS
    return max(seconds - SECONDS_TO_END, SECONDS_UNTIL_GONE)


def why_ended(gone: str, address: str) -> str:
    """What to say of it, where `address` is `ray.address`."""
    if address == "local":
        return "the private Ray of this service has ended, and all its parts with it; serve again"
    if gone == HERE:
        return (
            f"ray.address={address}: Ray has ended on this machine, and the service's parts with "
            "it; start it again, then serve again"
        )
    return (
        f"ray.address={address}: that Ray cluster has ended, and the service's parts with it; "
        "start it again, then serve again"
    )


def connected(address: str) -> None:
    """Raise `OSError` where nobody accepts a connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT):
        pass
