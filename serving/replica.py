"""A replica: vLLM's own OpenAI server around `AsyncLLM`, and a loop that pulls new drafts into it.

    clients ──HTTP──► vLLM's app ──► AsyncLLM ──► worker (+ our extension: capture, swap)
                                        ▲
    Redis ──wanted release──► pull loop ┘ ──heartbeat, windows, swap reports──► Redis

The path of a request is vLLM's. The loop beside it never touches a request; what fails in it is tried again later.
Everything runs in one thread with its own event loop, started by the constructor: when the process is restarted by
whoever supervises it, the constructor runs again and the replica comes up with the newest draft.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from osd.config import Config
from osd.errors import ConfigError, OSDError
from osd.records import DraftRelease, ReplicaStatus, SpecWindow, SwapReport, decode, encode
from osd.registry import Registry
from serving import vllm_compat
from serving.headers import HeadersToXargs
from serving.worker import trace_settings

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 1.0
SECONDS_ACTIVE = 3.0
"""How long after its last request an engine is asked for its counters. Being asked keeps a vLLM worker spinning for a
second, so an idle one that was asked every second would burn a core."""
HEARTBEAT_TTL = 10.0
MAX_UNSENT = 2000
MAX_PAUSE = 30.0
SECONDS_TO_STAGE = 600.0
GRACEFUL_SHUTDOWN_SECONDS = 2


class Replica:
    """One engine behind one port.

    `sink` is handed to the worker extension unread; `draft_release` is what to start with when Redis knows nothing
    newer; None serves the target without speculation (and without capture and swap).
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
    ) -> None:
        self.name = name
        self._config = config
        self._target_dir = target_dir
        self._target_id = target_id
        self._release = draft_release
        self._registry = registry
        self._extension = worker_extension
        self._sink = sink
        self._version = 0
        self._started_at = time.time()
        self._unsent: deque[SpecWindow | SwapReport] = deque(maxlen=MAX_UNSENT)
        self._report: dict[str, Any] = {}
        self._report_at = 0.0
        self._retry_at: dict[int, tuple[float, float]] = {}
        self._num_open = 0
        self._last_active = time.monotonic()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"osd-{name}", daemon=True)
        self._thread.start()

    # -- called from outside ------------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> str:
        """Block until the port answers; returns its URL. Raises what kept the engine from starting."""
        self._ready.wait(timeout)
        if self._error is not None:
            raise self._error
        if not self._ready.is_set():
            raise TimeoutError(f"{self.name} was not ready within {timeout} s")
        return self.url

    @property
    def url(self) -> str:
        scheme = "https" if self._config.serving.vllm.get("ssl_certfile") else "http"
        return f"{scheme}://{self._config.serving.host}:{self._config.serving.port}"

    def call(self, method: str, *args: Any) -> Any:
        """A worker extension method from another thread (diagnostics and tests)."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._rpc(method, *args), self._loop).result(60)

    def close(self) -> None:
        """Close the port, with a moment for requests in flight. The engine's processes end with this process, or after
        some seconds in which vLLM waits for them."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._closed.wait(timeout=GRACEFUL_SHUTDOWN_SECONDS + 2)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for readiness
            self._error = error
            if self._ready.is_set():
                logger.critical("%s ended: %s", self.name, error)
                os._exit(1)  # the supervisor starts the process again; a half-dead replica helps nobody
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        sock = listen(self._config.serving.host, self._config.serving.port)
        engine, app = await self._build()
        self._engine = engine
        try:
            await self._start_extension()
            await self._serve(app, sock)
        finally:
            engine.shutdown()

    async def _build(self) -> tuple[Any, Any]:
        serving = self._config.serving
        self._release = self._newest_release()
        extra: dict[str, Any] = {**serving.vllm, "host": serving.host, "port": serving.port}
        extra["served_model_name"] = [serving.served_model_name or serving.target]
        if self._release is not None:
            extra["worker_extension_cls"] = self._extension
            extra["speculative_config"] = {
                "method": "draft_model",
                "model": self._release.path,
                "num_speculative_tokens": serving.num_speculative_tokens,
            }
        try:
            self._args = vllm_compat.engine_arguments(self._target_dir, extra)
        except ValueError as error:
            raise ConfigError(f"serving.vllm: {error}") from None
        return await vllm_compat.build_engine_and_app(self._args)

    def _newest_release(self) -> DraftRelease | None:
        if self._release is None or self._registry is None:
            return self._release
        try:
            wanted = self._registry.wanted(self._release.draft)
        except OSDError:
            return self._release
        usable = wanted is not None and wanted.target_id == self._target_id and Path(wanted.path).is_dir()
        return wanted if usable else self._release

    async def _start_extension(self) -> None:
        if self._release is None:
            return
        settings = trace_settings(
            self._release,
            self._config.capture,
            k=self._config.serving.num_speculative_tokens,
            sink=self._sink,
            target_id=self._target_id,
        )
        await self._rpc("osd_start", settings)
        self._version = self._release.version

    async def _serve(self, app: Any, sock: socket.socket) -> None:
        assert self._stop is not None
        watched = self._watched(HeadersToXargs(app))
        server = vllm_compat.http_server(watched, self._args, seconds_to_finish=GRACEFUL_SHUTDOWN_SECONDS)
        app.state.server = server
        http = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        pull = asyncio.create_task(self._pull_loop(), name="pull")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        while not server.started and not http.done():
            await asyncio.sleep(0.02)
        self._ready.set()
        done, _ = await asyncio.wait({http, pull, stop}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait({http}, timeout=GRACEFUL_SHUTDOWN_SECONDS + 2)
        self._closed.set()
        for task in (pull, stop):
            task.cancel()
        if stop not in done:
            raise next(iter(done)).exception() or RuntimeError("the HTTP server ended by itself")

    def _watched(self, app: Any) -> Any:
        """The application, with a note of whether anything was asked of the engine lately."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                return await app(scope, receive, send)
            self._num_open += 1
            try:
                await app(scope, receive, send)
            finally:
                self._num_open -= 1
                self._last_active = time.monotonic()

        return watched

    def _is_active(self) -> bool:
        return self._num_open > 0 or time.monotonic() - self._last_active < SECONDS_ACTIVE

    # -- the pull loop ------------------------------------------------------------------------------------------------

    async def _pull_loop(self) -> None:
        """Ends only when the engine is dead: whatever else goes wrong here, requests are still answered."""
        pause = self._config.serving.seconds_between_polls
        while not self._engine.errored:
            try:
                if self._release is not None and self._registry is not None:
                    await self._pull_and_report()
                pause = self._config.serving.seconds_between_polls
            except Exception:
                pause = min(2 * pause, MAX_PAUSE)
                logger.exception("pulling drafts failed; serving goes on, the next try is in %.1f s", pause)
            await asyncio.sleep(pause)
        raise RuntimeError("the engine died")

    async def _pull_and_report(self) -> None:
        await self._swap_if_wanted()
        await self._report_if_due()

    async def _report_if_due(self) -> None:
        if time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + SECONDS_BETWEEN_REPORTS
            await self._send_report()

    async def _swap_if_wanted(self) -> None:
        assert self._registry is not None and self._release is not None
        try:
            wanted = await asyncio.to_thread(self._registry.wanted, self._release.draft)
        except OSDError:
            return  # Redis is away: serve on with what we have
        if wanted is None or wanted.version == self._version or wanted.target_id != self._target_id:
            return
        retry_at, delay = self._retry_at.get(wanted.version, (0.0, 1.0))
        if time.monotonic() < retry_at:
            return
        report = await self.swap(wanted)
        self._unsent.append(report)
        if report.ok:
            self._retry_at.clear()
        else:
            logger.warning("swap to v%d failed: %s", wanted.version, report.error)
            self._retry_at[wanted.version] = (time.monotonic() + delay, min(delay * 2, 60.0))
        await self._send_report()

    async def swap(self, release: DraftRelease) -> SwapReport:
        """Stage, validate and commit a release. Never raises for a bad one: the report says what happened."""
        previous = self._version
        await self._rpc("osd_stage", encode(release).decode())
        deadline = time.monotonic() + SECONDS_TO_STAGE
        staging: dict[str, Any] = {"done": False, "error": "", "seconds": 0.0}
        while not staging["done"] and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            await self._report_if_due()
            staging = json.loads(await self._rpc("osd_staging"))
        outcome: dict[str, Any] = {"pause_s": 0.0, "error": staging["error"] or "staging took too long"}
        if staging["done"] and not staging["error"]:
            outcome = json.loads(await self._rpc("osd_commit", release.version))
        if not outcome["error"]:
            self._version = release.version
        return SwapReport(
            at=time.time(),
            replica=self.name,
            draft=release.draft,
            version=release.version,
            previous=previous,
            ok=not outcome["error"],
            stage_s=staging["seconds"],
            pause_s=outcome["pause_s"],
            error=outcome["error"],
        )

    async def _send_report(self) -> None:
        assert self._registry is not None and self._release is not None
        if self._is_active():
            self._report = json.loads(await self._rpc("osd_report", self.name, self._release.draft))
            self._unsent.extend(msgspec.convert(self._report["windows"], list[SpecWindow]))
        try:
            await asyncio.to_thread(self._registry.heartbeat, self._status(), HEARTBEAT_TTL)
            batch = list(self._unsent)
            if batch:
                await asyncio.to_thread(self._registry.publish, *batch)
                for _ in batch:
                    self._unsent.popleft()
        except OSDError:
            return  # Redis is away: what is unsent waits, the oldest leave first

    def _status(self) -> ReplicaStatus:
        assert self._release is not None
        return ReplicaStatus(
            at=time.time(),
            replica=self.name,
            draft=self._release.draft,
            url=self.url,
            version=self._version,
            target_id=self._target_id,
            k=self._config.serving.num_speculative_tokens,
            pid=os.getpid(),
            started_at=self._started_at,
            engine=vllm_compat.engine_version(),
            capture_rows=self._report.get("rows", {}),
            capture_skipped=self._report.get("skipped", {}),
            buffer_dropped=self._report.get("dropped", {}),
            num_running=self._report.get("num_running", 0),
        )

    async def _rpc(self, method: str, *args: Any) -> Any:
        """Call the worker extension; the first rank answers for all, an error in any of them counts."""
        results = await self._engine.collective_rpc(method, args=args)
        return results[0]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the engine starts so that a taken port is known at once."""
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


def load_release(text: str) -> DraftRelease | None:
    """A release from its JSON; None from an empty text."""
    return decode(text, DraftRelease) if text else None
