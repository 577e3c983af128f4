"""What a replica does beside serving: it pulls the wanted draft into its engine, and reports how that goes.

    Redis ──wanted release──► stage in a thread of the worker ──► commit between two steps ──► SwapReport ─┐
      ▲                                                                                                    │
      └──────────────────────── heartbeat, windows, swap reports ◄── counters of the worker ◄──────────────┘

While Redis is away the engine serves on with the draft it has, and what was to be said waits, up to a limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import DraftRelease, ReplicaStatus, SpecWindow, SwapReport, encode
from serving.speculation.client import Steering
from serving.vllm import names

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 1.0
SECONDS_ACTIVE = 3.0
"""How long after its last request an engine is asked for its counters. Being asked keeps a vLLM worker spinning for a
second, so an idle one that was asked every second would burn a core."""
HEARTBEAT_TTL = 10.0
MAX_UNSENT = 2000
SECONDS_TO_STAGE = 600.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds before a draft that was refused is tried again; twice as long each time."""


class Activity:
    """Whether anything was asked of the engine lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._last_at = clock()

    def is_recent(self) -> bool:
        return self._num_open > 0 or self._clock() - self._last_at < SECONDS_ACTIVE

    def watching(self, app: Any) -> Any:
        """The ASGI application, its POST requests noted."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                return await app(scope, receive, send)
            self._num_open += 1
            try:
                await app(scope, receive, send)
            finally:
                self._num_open -= 1
                self._last_at = self._clock()

        return watched


def release_to_start(registry: Registry, known: DraftRelease) -> DraftRelease:
    """What an engine begins with: the wanted release; `known` while Redis is away or has nothing to say, and where what
    is wanted belongs to another target or is not on disk."""
    try:
        wanted = registry.wanted(known.draft)
    except OSDError:
        return known
    if wanted is None or wanted.target_id != known.target_id or not Path(wanted.path).is_dir():
        return known
    return wanted


class DraftPuller:
    """Keeps one engine, started with `release`, at the wanted draft. `rpc` calls the worker extension by method name.

    For one event loop; `look` is to be called again and again.
    """

    def __init__(
        self,
        registry: Registry,
        rpc: Callable[..., Awaitable[Any]],
        activity: Activity,
        *,
        name: str,
        url: str,
        k: int,
        release: DraftRelease,
        steering: Steering | None = None,
        uncontrolled: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steering = steering
        self._speculation: dict[str, Any] = {"problem": uncontrolled} if uncontrolled else {}
        self._registry, self._rpc, self._activity, self._clock = registry, rpc, activity, clock
        self._name, self._url, self._k = name, url, k
        self._draft, self._target_id, self._version = release.draft, release.target_id, release.version
        self._started_at = time.time()
        self._unsent: deque[SpecWindow | SwapReport] = deque(maxlen=MAX_UNSENT)
        self._counters: dict[str, Any] = {}
        self._report_at = 0.0
        self._retry_at: dict[int, tuple[float, float]] = {}
        """version -> when it may be tried again, and the delay after that"""

    async def look(self) -> None:
        """Swap if another draft is wanted, report if a report is due."""
        await self._swap_if_wanted()
        await self._report_if_due()

    async def swap(self, release: DraftRelease) -> SwapReport:
        """Stage, validate and commit a release. Never raises for a bad one: the report says what happened."""
        previous = self._version
        staging = await self._stage(release)
        outcome: dict[str, Any] = {
            "pause_s": 0.0,
            "proved": False,
            "error": staging["error"] or "staging took too long",
        }
        if staging["done"] and not staging["error"]:
            outcome = json.loads(await self._rpc("osd_commit", release.version))
        if not outcome["error"]:
            self._version = release.version
            if self._steering is not None:
                await self._steering.restart(release)
        return SwapReport(
            at=time.time(),
            replica=self._name,
            draft=release.draft,
            version=release.version,
            previous=previous,
            ok=not outcome["error"],
            stage_s=staging["seconds"],
            pause_s=outcome["pause_s"],
            proved=outcome.get("proved", False),
            error=outcome["error"],
        )

    async def _swap_if_wanted(self) -> None:
        try:
            wanted = await asyncio.to_thread(self._registry.wanted, self._draft)
        except OSDError:
            return  # Redis is away: serve on with what we have
        if wanted is None or wanted.version == self._version or wanted.target_id != self._target_id:
            return
        retry_at, delay = self._retry_at.get(wanted.version, (0.0, FIRST_DELAY))
        if self._clock() < retry_at:
            return
        report = await self.swap(wanted)
        self._unsent.append(report)
        if report.ok:
            self._retry_at.clear()
        else:
            logger.warning("swap to v%d failed: %s", wanted.version, report.error)
            self._retry_at[wanted.version] = (self._clock() + delay, min(delay * 2, LONGEST_DELAY))
        await self._send_report()

    async def _stage(self, release: DraftRelease) -> dict[str, Any]:
        """Have the worker load and check the release aside; its last word on that."""
        await self._rpc("osd_stage", encode(release).decode())
        deadline = self._clock() + SECONDS_TO_STAGE
        staging: dict[str, Any] = {"done": False, "error": "", "seconds": 0.0}
        while not staging["done"] and self._clock() < deadline:
            await asyncio.sleep(0.02)
            await self._report_if_due()
            staging = json.loads(await self._rpc("osd_staging"))
        return staging

    async def _report_if_due(self) -> None:
        if self._clock() >= self._report_at:
            self._report_at = self._clock() + SECONDS_BETWEEN_REPORTS
            await self._send_report()

    async def _send_report(self) -> None:
        if self._activity.is_recent():
            self._counters = json.loads(await self._rpc("osd_report", self._name, self._draft))
            self._unsent.extend(msgspec.convert(self._counters["windows"], list[SpecWindow]))
            if self._steering is not None:
                self._speculation = {**await self._steering.report(), "split": self._counters.get("split", {})}
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
        return ReplicaStatus(
            at=time.time(),
            replica=self._name,
            draft=self._draft,
            url=self._url,
            version=self._version,
            target_id=self._target_id,
            k=self._k,
            pid=os.getpid(),
            started_at=self._started_at,
            engine=names.engine_version(),
            capture_rows=self._counters.get("rows", {}),
            capture_skipped=self._counters.get("skipped", {}),
            num_traces=self._counters.get("num_traces", 0),
            buffer_dropped=self._counters.get("dropped", {}),
            num_running=self._counters.get("num_running", 0),
            unproved=self._counters.get("unproved", ""),
            speculation=self._speculation,
        )
