"""A replica's loop beside serving: it pulls the wanted draft into its engine, and reports.

    Redis ──wanted release──► fetch it where it is not on this machine ──► stage beside every worker
      ▲                                                                      │
      │                                        commit between two steps ◄────┘
      └── heartbeat, windows, swap reports ◄── counters of the worker, SwapReport

While Redis is away, the engine serves on with the draft it has. Reports wait, up to a limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from osd.errors import OSDError, ReleaseError
from osd.exchange.registry import Registry
from osd.records import (
    NO_VERSION,
    CommitReport,
    DraftRelease,
    ReplicaStatus,
    SpeculationReport,
    SpecWindow,
    StagingReport,
    SwapReport,
    WorkerReport,
)
from serving.activity import Activity
from serving.folding import MAX_SECONDS, Folding
from serving.speculation.client import SpeculationClient
from serving.speculation.memory.warm import Warming
from serving.swap.ranks import Ranks
from serving.vllm import names

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_REPORTS = 1.0
HEARTBEAT_TTL = 10.0
SECONDS_FRESH, MAX_SECONDS_FRESH = 60.0, 10.0
"""How long a draft is new, and how long its windows are held back at most until then."""
MAX_UNSENT = 2000
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds before a refused draft is tried again; the delay doubles each time."""


Here = Callable[[DraftRelease], DraftRelease]
"""The release with its path on this machine. Blocking. Raises `ReleaseError`."""


def as_it_lies(release: DraftRelease) -> DraftRelease:
    """A release that this machine sees where the store keeps it. Raises `ReleaseError`."""
    if not Path(release.path).is_dir():
        raise ReleaseError(f"draft v{release.version}: {release.path} is not there")
    return release


def release_to_start(
    registry: Registry, known: DraftRelease, here: Here = as_it_lies, replica: str = ""
) -> DraftRelease:
    """The release that an engine starts with: the wanted one, or `known` where Redis is away, no
    release is wanted, or the wanted one belongs to another target or cannot be had."""
    try:
        wanted = registry.wanted(known.draft, replica)
        if wanted is not None and wanted.target_id == known.target_id:
            return here(wanted)
    except OSDError as error:
        logger.warning("starting with v%d, for %s", known.version, error)
    return here(known)


class DraftPuller:
    """Keeps one engine, started with `release`, at the wanted draft. `look` is to be called
    repeatedly in one event loop. `off`: the parts that do not work with this vLLM, with their
    reasons; without `swap`, no draft is swapped.
    """

    def __init__(
        self,
        registry: Registry,
        ranks: Ranks,
        activity: Activity,
        *,
        name: str,
        url: str,
        k: int,
        release: DraftRelease,
        speculation_client: SpeculationClient | None = None,
        warming: Warming | None = None,
        off: Mapping[str, str] | None = None,
        here: Here = lambda release: release,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._speculation_client, self._warming = speculation_client, warming
        self._off = dict(off or {})
        uncontrolled = self._off.get("control", "")
        self._speculation = SpeculationReport(problem=uncontrolled) if uncontrolled else None
        self.steps: tuple[str, ...] | None = None
        """What is switched on; None = everything."""
        self._registry, self._ranks, self._activity = registry, ranks, activity
        self._here = here
        self._clock = clock
        self._name, self._url, self._k = name, url, k
        self._draft, self._target_id = release.draft, release.target_id
        self._version = release.version
        self._started_at = time.time()
        self._unsent: deque[SpecWindow | SwapReport] = deque(maxlen=MAX_UNSENT)
        self._sent: list[SpecWindow | SwapReport] = []
        """What was sent last and is not known to have come."""
        self._num_sent = 0
        self._folding, self._num_replicas = Folding(), 1
        self._swapped_at = -math.inf
        self._counted = WorkerReport()
        self._uncounted = ""
        """Why the engine's counters cannot be read now."""
        self._num_purges: int | None = None
        """As the engine's memory knows of."""
        self._report_at = 0.0
        self._retry_at: dict[int, tuple[float, float]] = {}
        """version -> when it may be tried again, and the delay after that"""

    async def look(self) -> None:
        """Swap if another draft is wanted, and report if a report is due."""
        if "swap" not in self._off and self._is_on("swap"):
            await self._swap_if_wanted()
        await self._report_if_due()
        if self._warming is not None:
            await self._warming.go_on(self._num_purges)

    async def warm(self, seconds: float) -> None:
        """Fill the engine's memory as far as it can be within about so many seconds. What is left
        comes with `look`."""
        deadline = self._clock() + seconds
        if self._warming is None:
            return
        await self._forget_if_purged()
        if self._num_purges is None:
            logger.warning("the memory begins empty: Redis is away, or the engine does not answer")
        while self._num_purges is not None and not self._warming.is_done:
            if self._clock() > deadline:
                return
            await self._warming.go_on(self._num_purges)

    async def finish(self) -> None:
        """Send what has been counted. Nothing is served any more."""
        self._activity.is_always = True
        await self._send_report()
        self._unsent.extend(self._folding.take())
        await self._send_report()

    async def swap(self, release: DraftRelease) -> SwapReport:
        """Fetch, stage, validate and commit a release. A bad one does not raise: the report says
        what is wrong."""
        previous = self._version
        try:
            release = await self._fetch(release)
        except OSDError as error:
            staging, committed = StagingReport(), CommitReport(error=str(error))
        else:
            staging, committed = await self._ranks.swap(release, self._report_if_due)
        if committed.error and (committed.is_lost or committed.previous):
            self._version = NO_VERSION if committed.is_lost else committed.previous
        if not committed.error:
            self._version = release.version
            if self._speculation_client is not None:
                await self._speculation_client.restart(release)
        return SwapReport(
            at=time.time(),
            replica=self._name,
            draft=release.draft,
            version=release.version,
            previous=previous,
            ok=not committed.error,
            stage_s=staging.seconds,
            pause_s=committed.pause_s,
            proved=committed.proved,
            error=committed.error,
        )

    async def _fetch(self, release: DraftRelease) -> DraftRelease:
        """The release on this machine. Heartbeats go on meanwhile."""
        fetching = asyncio.create_task(asyncio.to_thread(self._here, release))
        while not (await asyncio.wait({fetching}, timeout=SECONDS_BETWEEN_REPORTS))[0]:
            await self._report_if_due()
        return fetching.result()

    async def _swap_if_wanted(self) -> None:
        try:
            wanted = await asyncio.to_thread(self._registry.wanted, self._draft, self._name)
        except OSDError:
            return  # Redis is away: serve on with what we have
        if wanted is None or wanted.version == self._version or wanted.target_id != self._target_id:
            return
        retry_at, delay = self._retry_at.get(wanted.version, (0.0, FIRST_DELAY))
        if self._clock() < retry_at or not await self._ranks.can_swap():
            return
        if await self.turn_to(wanted):
            self._retry_at.clear()
        else:
            self._retry_at[wanted.version] = (self._clock() + delay, min(delay * 2, LONGEST_DELAY))
        await self._send_report()

    async def turn_to(self, release: DraftRelease) -> bool:
        """Swap, and note the report. Whether it went well."""
        report = await self.swap(release)
        self._swapped_at = self._clock()
        self._unsent.extend(self._folding.take())
        self._unsent.append(report)
        if not report.ok:
            logger.warning("swap to v%d failed: %s", release.version, report.error)
        return report.ok

    async def _report_if_due(self) -> None:
        if self._clock() >= self._report_at:
            self._report_at = self._clock() + SECONDS_BETWEEN_REPORTS
            await self._send_report()

    async def _send_report(self) -> None:
        if self._activity.is_recent() and self._is_on("observe"):
            await self._count()
        is_fresh = self._clock() - self._swapped_at < SECONDS_FRESH
        most = MAX_SECONDS_FRESH if is_fresh else MAX_SECONDS
        now, num_replicas = time.time(), self._num_replicas
        self._unsent.extend(self._folding.take_if_due(now, num_replicas, most))
        try:
            self._num_replicas = await asyncio.to_thread(
                self._registry.heartbeat, self._status(), HEARTBEAT_TTL
            )
        except OSDError:
            return  # Redis is away: unsent reports wait, and the oldest are dropped first
        await self._forget_if_purged()
        await self._publish()

    async def _forget_if_purged(self) -> None:
        """What is purged must not stay in the engine's memory."""
        if self._speculation_client is None:
            return
        try:
            num = await asyncio.to_thread(self._registry.num_purges)
        except OSDError:
            return
        if num != self._num_purges and await self._speculation_client.forget():
            self._num_purges = num

    async def _publish(self) -> None:
        """Send what waits. What was not answered may have come: it is sent again under its number,
        and first."""
        while self._sent or self._unsent:
            if not self._sent:
                self._sent, self._num_sent = list(self._unsent), self._num_sent + 1
                self._unsent.clear()
            once = (f"{self._name}:{self._started_at}", self._num_sent)
            try:
                await asyncio.to_thread(self._registry.publish, *self._sent, once=once)
            except OSDError:
                return
            self._sent = []

    async def _count(self) -> None:
        """Ask the engine for its counters. Where it cannot say, the heartbeat goes on with those
        from before, and says so."""
        try:
            await self._ask_engine()
        except Exception as error:
            if not self._uncounted:
                logger.exception("the engine's counters cannot be read; the heartbeat goes on")
            self._uncounted = f"{error}; what it counts stands still"
        else:
            self._uncounted = ""

    def _is_on(self, step: str) -> bool:
        return self.steps is None or step in self.steps

    async def _ask_engine(self) -> None:
        self._counted = await self._ranks.report(self._name, self._draft)
        self._folding.add(self._counted.windows)
        if self._speculation_client is not None:
            report = await self._speculation_client.report()
            awake = {"sleep": self._counted.awake} if self._counted.awake else {}
            self._speculation = msgspec.structs.replace(
                report, split=self._counted.split, left_out=report.left_out | awake
            )

    def _status(self) -> ReplicaStatus:
        counted = self._counted
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
            capture_rows=counted.rows,
            capture_skipped=counted.skipped,
            num_traces=counted.num_traces,
            buffer_dropped=counted.dropped,
            num_running=counted.num_running,
            num_open=self._activity.num_open,
            open_seconds=self._activity.open_seconds(),
            unproved=self._ranks.unproved,
            off=self._off
            | counted.off
            | ({"counters": self._uncounted} if self._uncounted else {}),
            may_try=True,
            steps=self.steps,
            speculation=self._speculation,
        )
