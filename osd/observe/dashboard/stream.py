"""Events as they happen (`/osd/stream`, server-sent events), and a server that can stop while one
is open."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

from osd.records import Event

POLL_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0
MAX_STREAM_SECONDS = 600.0
"""A stream ends after so long; browsers reconnect by themselves, from the last event they saw."""


async def event_stream(
    fetch: Callable[[], Awaitable[list[Event]]], since: float, stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    """The events after `since` (Unix time), as server-sent events, until `stopping`: oldest first,
    but one of a part that tells it later, or whose clock is behind, when it comes.

    The id is the newest time so far, which a reconnecting client sends back as `Last-Event-ID`.
    """
    started = last_sent = time.monotonic()
    latest, seen = since, set[bytes]()
    yield b"retry: 1000\n\n"
    while not stopping.is_set() and time.monotonic() - started < MAX_STREAM_SECONDS:
        listed = [event for event in await fetch() if event.at > since]
        before, seen = seen, {msgspec.json.encode(event) for event in listed}
        for event in sorted(listed, key=lambda event: event.at):
            if (data := msgspec.json.encode(event)) in before:
                continue
            before.add(data)
            latest, last_sent = max(latest, event.at), time.monotonic()
            yield b"id: %r\nevent: osd\ndata: %b\n\n" % (latest, data)
        if time.monotonic() - last_sent > KEEPALIVE_SECONDS:
            last_sent = time.monotonic()
            yield b": nothing new\n\n"
        await _wait(stopping, POLL_SECONDS)
    yield b": closing\n\n"


async def _wait(stopping: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return


class ControlServer(uvicorn.Server):
    """uvicorn for the control port: ends the open event streams before it waits for connections to
    close.

    Example:
        app = build_app(controller, history, token)
        server = ControlServer.of(app, host="127.0.0.1", port=8001)
        await server.serve()          # until server.should_exit = True
    """

    @classmethod
    def of(cls, app: Any, *, host: str, port: int) -> ControlServer:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        return cls(config)

    @property
    def port(self) -> int:
        """The bound port, also when 0 ("any free one") was asked for. Only while serving."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.stopping.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)
