"""The control plane: controller and control port in one thread with its own event loop.

It runs in a process of its own, so that training decisions and dashboard requests take no time from
the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sqlite3
import threading
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buffers import trace_stream
from buffers.redis_stream import RedisTraceBuffer
from osd.common.addresses import join
from osd.common.backoff import Outage
from osd.config.schema import Config, ControlConfig
from osd.control.controller import Controller
from osd.errors import ConfigError
from osd.exchange.redis_url import is_loopback
from osd.exchange.registry import Registry
from osd.observe.dashboard import ControlServer, build_app
from osd.observe.dashboard.logs import Logs
from osd.observe.history import History
from osd.observe.history_file import HistoryFile, UnopenedFile
from osd.releases.store import ReleaseStore

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_SAVES = 30.0
EVERYWHERE = ("0.0.0.0", "::")


def open_history_file(path: Path) -> HistoryFile:
    """The file. Where the disk refuses, with a warning, one that is opened when `keep` saves. Until
    then, history lives as long as the feed in Redis."""
    try:
        return HistoryFile(path)
    except (OSError, sqlite3.Error) as error:
        logger.warning(
            "history is not kept on disk, for %s cannot be used (%s); trying again until it works, "
            "and what it has from before is shown after the next start",
            path,
            error,
        )
        return UnopenedFile(path)


async def keep(history: History, seconds: float = SECONDS_BETWEEN_SAVES) -> None:
    """Save the history regularly. A disk that refuses is told of once and tried again."""
    trouble = Outage(seconds)
    while True:
        await asyncio.sleep(seconds)
        try:
            await asyncio.to_thread(history.save)
        except (OSError, sqlite3.Error) as error:
            await trouble.pause(f"history is not kept on disk: {error}", logger)
        else:
            trouble.over(logger)


def url_for_others(control: ControlConfig, private_url: str) -> str:
    """The control port as engines reach it. One that listens on all addresses is reached as the
    private Valkey is (`private_url`, "" without), or by this machine's name."""
    host = control.host
    if host in EVERYWHERE:
        named = urlsplit(private_url).hostname or ""
        is_reached = named and named not in EVERYWHERE and not is_loopback(named)
        host = named if is_reached else socket.gethostname()
    return f"http://{join(host, control.port)}"


def listen(control: ControlConfig) -> socket.socket:
    """The control port. Raises `ConfigError` where it was taken since it was chosen, or while the
    process was away."""
    host, port = control.host, control.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"control.port={port}: cannot listen on {join(host, port)} ({error.strerror}); choose "
            "another with control.port=N, or 0 for any free one"
        ) from None


class ControlPlane:
    """Controller and control port in one thread.

    `trainer` is an `osd.control.protocols.Trainer`, or None where nothing is trained.
    """

    def __init__(
        self,
        config: Config,
        *,
        redis_url: str,
        buffer_settings: dict[str, Any],
        target_id: str,
        token: str,
        trainer: Any,
        logs: Logs | None = None,
    ) -> None:
        self._config = config
        self._token, self._logs = token, logs
        self._history = History(
            config.control.history_seconds, open_history_file(config.history_path)
        )
        buffer = RedisTraceBuffer(**buffer_settings)
        self._traces = partial(trace_stream.stream, buffer, target_id)
        releases, drafts_token = ReleaseStore(config.releases_path), secrets.token_urlsafe(24)
        self._drafts = (releases.read_part, drafts_token)
        self._controller = Controller(
            config,
            Registry(redis_url, config.deployment),
            releases,
            self._history,
            trainer,
            buffer,
            target_id=target_id,
            drafts_url=url_for_others(config.control, "" if config.buffer.redis_url else redis_url),
            drafts_token=drafts_token,
        )
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._server: ControlServer | None = None
        self._thread = threading.Thread(target=self._run, name="osd-control", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{join(self._config.control.host, self._config.control.port)}"

    def wait_ready(self) -> str:
        """Block until the control port answers; returns its URL. Raises the error of a failed
        start."""
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self.url

    def stop(self) -> None:
        """Close the control port and end both loops."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  raised by `wait_ready`
            self._error = error
            if self._ready.is_set():
                logger.critical("the control plane ended: %s", error)
                # The supervisor starts the process again; its state is on disk and in Redis.
                os._exit(1)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        control = self._config.control
        app = build_app(
            self._controller,
            self._history,
            self._token,
            host=control.host,
            traces=self._traces,
            logs=self._logs,
            releases=self._drafts,
        )
        self._server = ControlServer.of(app, host=control.host, port=control.port)
        http = asyncio.create_task(self._server.serve([listen(control)]), name="http")
        loops = asyncio.create_task(self._controller.run(), name="controller")
        keeping = asyncio.create_task(keep(self._history), name="history")
        while not self._server.started and not http.done():
            await asyncio.sleep(0.02)
        self._ready.set()
        done, _ = await asyncio.wait({http, loops, keeping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done & {loops, keeping}:
            task.result()
        loops.cancel()
        keeping.cancel()
        await asyncio.gather(loops, keeping, return_exceptions=True)
