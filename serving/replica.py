"""A replica: vLLM's own OpenAI server around `AsyncLLM`, and a loop that pulls new drafts into it.

    clients ──HTTP──► vLLM's app ──► AsyncLLM ──► worker (+ our extension: capture, swap)
                                        ▲
    Redis ──wanted release──► pull loop ┘ ──heartbeat, windows, swap reports──► Redis

The path of a request is vLLM's. The loop beside it (`serving/engine_loop.py`) never touches a
request, and tries again later what fails. Everything runs in one thread with its own event loop,
started by the constructor. When a supervisor restarts the process, the constructor runs again and
the replica starts with the newest draft.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from osd.common.addresses import join
from osd.config.schema import Config
from osd.config.serving import argument
from osd.errors import ConfigError
from osd.exchange.registry import Registry
from osd.records import DraftRelease
from serving.activity import Activity
from serving.begun import HeadWithFirstWord
from serving.engine_loop import EngineLoop, look_after
from serving.headers import HeadersToXargs
from serving.pull import Here, as_it_lies, release_to_start
from serving.speculation.client import room_for_drafts, settings_for
from serving.speculation.memory.warm import Recent
from serving.vllm import fixes, names, parts
from serving.vllm.heads import method_for
from serving.vllm.server import (
    build_engine_and_app,
    engine_arguments,
    graphs_for_every_k,
    http_server,
)
from serving.vllm.undrafted import refuse_undrafted

logger = logging.getLogger(__name__)

SECONDS_TO_ANSWER = 60.0
GRACEFUL_SHUTDOWN_SECONDS = 2
SECONDS_TO_FINISH = 1.0
"""To send the last counters."""


class Replica:
    """One engine behind one port.

    `sink` is passed to the worker extension. `draft_release` is what to start with where Redis
    names no other; None serves the target without speculation, capture and swap. `awake_note` is a
    file (`serving/speculation/sleep/awake_note.py`); "" = none is kept. `here` gives a release its
    path on this machine. `recent`: what the memory begins with; None = nothing.
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        target_dir: str,
        target_id: str,
        draft_release: DraftRelease | None,
        registry: Registry | None,
        worker_extension: str,
        sink: dict[str, Any],
        awake_note: str = "",
        here: Here = as_it_lies,
        recent: Recent | None = None,
    ) -> None:
        self.name = name
        self._config = config
        self._target_dir = target_dir
        self._target_id = target_id
        self._release = draft_release
        self._registry = registry
        self._extension = worker_extension
        self._sink = sink
        self._awake_note = awake_note
        self._here, self._recent = here, recent
        self._beside: EngineLoop | None = None
        self._is_controlled = False
        self._off: dict[str, str] = {}
        """Part that does not work with this vLLM -> why"""
        self._activity = Activity()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"osd-{name}", daemon=True)
        self._thread.start()

    # -- called from other threads ----------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> str:
        """Block until the port answers, and return its URL. Raises the error that kept the engine
        from starting."""
        self._ready.wait(timeout)
        if self._error is not None:
            raise self._error
        if not self._ready.is_set():
            raise TimeoutError(f"{self.name} was not ready within {timeout} s")
        return self.url

    @property
    def url(self) -> str:
        serving = self._config.serving
        scheme = "https" if argument(serving.vllm, "ssl_certfile") else "http"
        return f"{scheme}://{join(serving.host, serving.port)}"

    def step_times(self) -> list[dict[str, Any]]:
        """Cells of measured step times; [] where speculation is not controlled."""
        assert self._loop is not None
        client = None if self._beside is None else self._beside.speculation_client
        if client is None:
            return []
        rows = asyncio.run_coroutine_threadsafe(client.rows(), self._loop)
        return rows.result(SECONDS_TO_ANSWER)

    def close(self) -> None:
        """Close the port, with a moment for requests in flight. The engine's processes end with
        this process, or some seconds later."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._closed.wait(timeout=GRACEFUL_SHUTDOWN_SECONDS + 2)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the engine has ended, after `close` until its own processes have. They may
        otherwise outlive this one."""
        self._thread.join(timeout)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  `wait_ready` raises it
            self._error = error
            if self._ready.is_set():
                logger.critical("%s ended: %s", self.name, error)
                # A half-dead replica is of no use; the supervisor starts the process again.
                os._exit(1)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        sock = listen(self._config.serving.host, self._config.serving.port)
        engine, app = await self._build()
        self._engine = engine
        try:
            if self._release is not None:
                await self._start_beside(self._release)
            await self._serve(app, sock)
        finally:
            engine.shutdown()

    async def _build(self) -> tuple[Any, Any]:
        serving = self._config.serving
        if self._release is not None and self._registry is not None:
            self._release = await asyncio.to_thread(
                release_to_start, self._registry, self._release, self._here, self.name
            )
        extra: dict[str, Any] = {**serving.vllm, "host": serving.host, "port": serving.port}
        if serving.num_ranks > 1:
            # vLLM would ask Ray for its ranks if it found itself in one of Ray's placement groups.
            extra["distributed_executor_backend"] = "mp"
        extra["served_model_name"] = [serving.served_model_name or serving.target]
        if self._release is not None:
            room = room_for_drafts(self._config)
            extra["worker_extension_cls"] = self._extension
            extra["speculative_config"] = {
                "method": method_for(Path(self._release.path)),
                "model": self._release.path,
                "num_speculative_tokens": room,
            }
            if self._config.speculation.is_sampled:
                extra["speculative_config"]["draft_sample_method"] = "probabilistic"
            extra |= self._control_arguments()
            if self._is_controlled:
                extra["speculative_config"] |= graphs_for_every_k(room)
        if problem := parts.problem_with("server"):
            raise ConfigError(
                f"{names.engine_version()} cannot be served: {problem}; "
                f"use {' or '.join(names.TESTED_VERSIONS)}"
            )
        parts.start(self._off, "requests", refuse_undrafted)
        try:
            self._args = engine_arguments(self._target_dir, extra)
        except ValueError as error:
            raise ConfigError(f"serving.vllm: {error}") from None
        return await build_engine_and_app(self._args)

    def _control_arguments(self) -> dict[str, Any]:
        """vLLM arguments with which speculation is controlled in the engine; {} where this vLLM
        does not allow it."""
        assert self._release is not None
        if problem := parts.problem_with("control"):
            parts.switch_off(self._off, "control", problem)
            if wrong := fixes.problem_with_sampling():
                raise ConfigError(
                    f"{names.engine_version()} cannot be served: outputs at temperature > 0 would "
                    f"be wrong ({wrong}), and speculation cannot be switched off ({problem}); "
                    f"use {' or '.join(names.TESTED_VERSIONS)}"
                )
            return {}
        self._is_controlled = True
        given = dict(self._config.serving.vllm.get("additional_config") or {})
        given["osd"] = settings_for(self._config, self._release)
        if fixes.problem_with_sampling():  # drafts would be verified wrongly
            given["osd"]["mode"] = "off"
        return {
            "scheduler_cls": "serving.speculation.scheduler.controlled_scheduler",
            "additional_config": given,
        }

    async def _start_beside(self, release: DraftRelease) -> None:
        self._beside = EngineLoop(
            self._engine,
            self._config,
            name=self.name,
            url=self.url,
            release=release,
            target_id=self._target_id,
            registry=self._registry,
            sink=self._sink,
            is_controlled=self._is_controlled,
            activity=self._activity,
            here=self._here,
            off=self._off,
            awake_note=self._awake_note,
            recent=self._recent,
        )
        await self._beside.start()

    async def _serve(self, app: Any, sock: socket.socket) -> None:
        assert self._stop is not None
        outermost = self._activity.watching(HeadersToXargs(app))
        if self._config.has_front_door:
            outermost = HeadWithFirstWord(outermost, lambda: self._engine.errored)
        server = http_server(outermost, self._args, seconds_to_finish=GRACEFUL_SHUTDOWN_SECONDS)
        app.state.server = server
        http = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        pull = asyncio.create_task(look_after(self._engine, self._beside), name="pull")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        while not server.started and not http.done():
            await asyncio.sleep(0.02)
        self._ready.set()
        done, _ = await asyncio.wait({http, pull, stop}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait({http}, timeout=GRACEFUL_SHUTDOWN_SECONDS + 2)
        pull.cancel()
        if stop in done and self._beside is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._beside.finish(), SECONDS_TO_FINISH)
        self._closed.set()
        stop.cancel()
        if stop not in done:
            raise next(iter(done)).exception() or RuntimeError("the HTTP server ended by itself")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. It is bound before the engine starts, so that a taken port fails at
    once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"serving.port={port}: cannot listen on {host}:{port} ({error.strerror}); "
            "choose another port or end what uses it"
        ) from None
    return sock
