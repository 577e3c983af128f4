"""The replica's side of a swap: all ranks of an engine go through its phases together.

    stage on every rank ──► wait for the slowest ──► put on every rank ──► do the digests add up?
       └─ one fails: all drop it      all confirm ◄── yes ─┴─ no, or one failed ──► all put back

A rank alone never decides. All of them therefore serve one version, whichever fails and in which
phase. An engine without tensor parallelism is one rank.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from osd.errors import SwapError
from osd.records import (
    CommitReport,
    DraftRelease,
    RankReport,
    StagingReport,
    WorkerReport,
    decode,
    encode,
)
from serving.swap import proof

logger = logging.getLogger(__name__)

SECONDS_TO_STAGE = 600.0
SECONDS_BETWEEN_LOOKS = 0.02
ASLEEP = "the engine sleeps, and has no memory to put a draft into; wake it up"

Record = TypeVar("Record", StagingReport, RankReport, WorkerReport)


async def _nothing() -> None:
    pass


async def _never() -> bool:
    return False


class Ranks:
    """The ranks of one engine. `call(method, *arguments)` calls a method of the worker extension
    on all of them and returns their answers in order. `is_asleep`: vLLM's own question.

    `unproved` says why swaps cannot be proved in this engine; "" when they can.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Sequence[str]]],
        clock: Callable[[], float] = time.monotonic,
        is_asleep: Callable[[], Awaitable[bool]] = _never,
    ) -> None:
        self._call, self._clock, self._is_asleep = call, clock, is_asleep
        self._cannot_say = False
        self.unproved = ""

    async def start(self, settings: str) -> None:
        """Install the hooks on all ranks, and find out whether they can be read back. Raises
        `SwapError` where one refuses."""
        reports = await self._ask(RankReport, "osd_start", settings)
        if refused := next((report.refused for report in reports if report.refused), ""):
            raise SwapError(refused)
        self.unproved = _first_error(reports)
        if not self.unproved and proof.problem([r.held for r in reports], reports[0].expected):
            self.unproved = "its layers hold the first draft in a form of their own"
        if self.unproved:
            logger.warning("swaps are not proved in this engine: %s", self.unproved)

    async def can_swap(self) -> bool:
        """Whether the engine has its memory: not while it sleeps (vLLM's /sleep). Where it cannot
        say, as when some of its cores sleep and others do not, it serves on with what it has."""
        try:
            is_asleep = await self._is_asleep()
        except Exception as error:  # noqa: BLE001  its heartbeat must go on
            if not self._cannot_say:
                logger.warning("swaps wait: the engine does not say whether it sleeps: %r", error)
            self._cannot_say = True
            return False
        self._cannot_say = False
        return not is_asleep

    async def stage(
        self, release: DraftRelease, meanwhile: Callable[[], Awaitable[None]] = _nothing
    ) -> StagingReport:
        """Load and check a release beside the draft of every rank. Where one fails, or time is
        over, all drop it. `meanwhile` is called again and again."""
        deadline = self._clock() + SECONDS_TO_STAGE
        begun = await self._ask(StagingReport, "osd_stage", encode(release).decode())
        if error := _first_error(begun):
            await self._call("osd_drop")
            return StagingReport(version=release.version, done=True, error=error)
        while not (found := _slowest(await self._ask(StagingReport, "osd_staging"))).done:
            if self._clock() >= deadline:
                found = StagingReport(version=release.version, error="staging took too long")
                break
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                await meanwhile()
            except Exception:
                logger.warning("what goes on during a staging failed", exc_info=True)
        if found.error:
            await self._call("osd_drop")
        return found

    async def commit(self, version: int) -> CommitReport:
        """Make the staged release live on all ranks, or on none."""
        can_prove = not self.unproved
        put = await self._ask(RankReport, "osd_put", version, can_prove)
        error = _first_error(put) or _problem(put, can_prove)
        if error:
            error, is_lost = await self._put_back(f"v{version}", error, can_prove)
            return CommitReport(
                pause_s=_pause(put), previous=put[0].version, error=error, is_lost=is_lost
            )
        pause_s, error = await self._confirm(version)
        return CommitReport(
            pause_s=_pause(put) + pause_s,
            previous=put[0].version,
            proved=can_prove and not error,
            error=error,
            is_lost=bool(error),
        )

    async def swap(
        self, release: DraftRelease, meanwhile: Callable[[], Awaitable[None]] = _nothing
    ) -> tuple[StagingReport, CommitReport]:
        """Stage and commit. A bad release does not raise: the reports say what is wrong."""
        staged = await self.stage(release, meanwhile)
        if staged.error:
            return staged, CommitReport(error=staged.error)
        if not await self.can_swap():
            await self._call("osd_drop")
            return staged, CommitReport(error=ASLEEP)
        return staged, await self.commit(release.version)

    async def report(self, replica: str, draft: str) -> WorkerReport:
        """The counters, which the first rank keeps. Raises `RuntimeError` when it cannot."""
        found = (await self._ask(WorkerReport, "osd_report", replica, draft))[0]
        if found.error:
            raise RuntimeError(f"the engine's counters cannot be read: {found.error}")
        return found

    async def _confirm(self, version: int) -> tuple[float, str]:
        """Seconds it took, and what was wrong. A rank that fails is asked once more; those that
        have confirmed do nothing then. Where one never does, no rank says that it serves the
        version."""
        seconds, error = 0.0, ""
        for _ in range(2):
            reports = await self._ask(RankReport, "osd_confirm")
            seconds, error = seconds + _pause(reports), _first_error(reports)
            if not error:
                return seconds, ""
        await self._call("osd_disown")
        return seconds, (
            f"v{version}: it is live, but could not be kept for the next swap to return to: "
            f"{error}; restart this replica"
        )

    async def _put_back(self, what: str, why: str, can_prove: bool) -> tuple[str, bool]:
        """Restore the last good weights on all ranks. Returns what to say of the failure `why`, and
        whether they could not be restored: drafts are useless then until the next swap, while
        answers stay right."""
        reports = await self._ask(RankReport, "osd_put_back", can_prove)
        error = _first_error(reports)
        if len({report.version for report in reports}) > 1:
            error = error or "ranks have kept different versions"
        if not error and all(report.held for report in reports):
            error = _problem(reports, can_prove)
        if error:
            return (
                f"{what}: {why}; and the previous draft could not be restored: {error}; restart "
                "this replica"
            ), True
        await self._ask(RankReport, "osd_confirm")
        return f"{what}: loading failed, the previous draft was restored: {why}", False

    async def _ask(self, kind: type[Record], method: str, *arguments: object) -> list[Record]:
        return [decode(answer, kind) for answer in await self._call(method, *arguments)]


def _first_error(reports: Sequence[RankReport | StagingReport]) -> str:
    """What failed, and on which rank if there are several; "" when nothing did."""
    where = [f"rank {i}: " if len(reports) > 1 else "" for i in range(len(reports))]
    failed = (at + r.error for at, r in zip(where, reports, strict=True) if r.error)
    return next(failed, "")


def _problem(reports: Sequence[RankReport], can_prove: bool) -> str:
    held = [report.held for report in reports]
    return proof.problem(held, reports[0].expected) if can_prove else ""


def _pause(reports: Sequence[RankReport]) -> float:
    """Ranks work at the same time, and the engine waits for the slowest."""
    return max(report.seconds for report in reports)


def _slowest(reports: Sequence[StagingReport]) -> StagingReport:
    """How the staging of all ranks goes."""
    error = _first_error(reports)
    return StagingReport(
        version=reports[0].version,
        done=bool(error) or all(report.done for report in reports),
        error=error,
        seconds=max(report.seconds for report in reports),
    )
