"""Everything that changes which draft serves: publish, roll back, recall, promote, pin. One lock
keeps the changes apart.

    change on disk (releases, pointer last) ─► wanted in Redis ─► event in the feed

The disk decides. While Redis is away, changes are made on disk, and `restore_wanted` tells the
replicas later.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from osd.common.clock import Clock
from osd.config.schema import Config
from osd.control import policy
from osd.control.protocols import Tell, Wishes
from osd.errors import OSDError, ReleaseError, ReplayBufferError
from osd.observe.status import describe_drafts, presentable
from osd.records import (
    Canary,
    DraftRelease,
    DraftView,
    EarlierReport,
    Event,
    MetricPoint,
    RoundOutcome,
)
from osd.releases.store import ReleaseStore

log = logging.getLogger(__name__)


async def as_it_lies(outcome: RoundOutcome) -> str:
    """The directory of a candidate that was written on this machine."""
    return outcome.path


class ReleaseManager:
    """Changes the release store and the wanted version together.

    `collect` brings the candidate of a round to this machine. An unknown, bad or pinned version
    raises `ReleaseError`. The automatic changes report it as an event instead.
    """

    def __init__(
        self,
        config: Config,
        registry: Wishes,
        releases: ReleaseStore,
        target_id: str,
        tell: Tell,
        clock: Clock,
        collect: Callable[[RoundOutcome], Awaitable[str]] = as_it_lies,
    ) -> None:
        self._config, self._registry, self._releases = config, registry, releases
        self._target_id, self._tell, self._clock = target_id, tell, clock
        self._collect = collect
        self._lock = asyncio.Lock()
        self.is_paused = releases.paused()
        """While True, no candidate is published."""
        self.canary: Canary | None = None
        """What one replica serves before all others."""
        self._knows_canary = False
        self.changed_at = -math.inf
        """Monotonic time of the last change of the serving draft; -inf when there was none in this
        process."""

    async def current(self) -> DraftRelease | None:
        return await asyncio.to_thread(self._releases.current, self._target_id)

    async def pinned(self) -> int | None:
        return await asyncio.to_thread(self._releases.pinned, self._target_id)

    async def previous(self) -> DraftRelease | None:
        """The release that a rollback would serve; None when there is none."""
        if self.canary is not None:
            return self.canary.before
        try:
            return await asyncio.to_thread(self._releases.previous, self._target_id)
        except ReleaseError:
            return None

    async def recallable(self) -> tuple[DraftRelease | None, Sequence[DraftRelease]]:
        """The draft that serves, and those that may serve again by themselves."""
        found = await asyncio.to_thread(self._releases.recallable, self._target_id)
        return await self.current(), found

    async def is_settled(self, current: DraftRelease) -> bool:
        """Whether this release serves on all replicas, and another may take its place."""
        is_free = self.canary is None and not self.is_paused and await self.pinned() is None
        return is_free and await self.current() == current

    async def describe(self) -> list[DraftView]:
        return await asyncio.to_thread(describe_drafts, self._releases, self._target_id)

    async def base(self) -> tuple[DraftRelease, int] | None:
        """The release that a round starts from, with the time since which its candidate is judged,
        and its line (`ReleaseStore.line`)."""
        async with self._lock:
            current = await self.current()
            line = await asyncio.to_thread(self._releases.line, self._target_id)
            since = await asyncio.to_thread(self._releases.judged_since)
        return None if current is None else (replace(current, judged_since=since), line)

    async def restore_wanted(self) -> None:
        """Write the current release to Redis if it differs. Does nothing during a change."""
        if self._lock.locked():
            return
        async with self._lock:
            current = await self.current()
            if current is None:
                return
            await self._know_canary(current)
            of_all = self.canary.before if self.canary is not None else current
            wanted = await asyncio.to_thread(self._registry.wanted, self._releases.draft)
            if wanted != of_all:
                log.info("wanted draft is v%d", of_all.version)
                await asyncio.to_thread(self._registry.set_wanted, of_all)
            # Afterwards: a canary whose draft is the wanted one now keeps it throughout.
            if await asyncio.to_thread(self._registry.canary, self._releases.draft) != self.canary:
                await asyncio.to_thread(
                    self._registry.set_canary, self.canary, self._releases.draft
                )

    async def _know_canary(self, current: DraftRelease) -> None:
        """A canary of before this process goes on, if the disk has both drafts; one of another
        draft than the current is over."""
        if not self._knows_canary:
            told = await asyncio.to_thread(self._registry.canary, self._releases.draft)
            self.canary = told and await asyncio.to_thread(
                self._releases.on_disk, told, self._target_id
            )
            self._knows_canary = True
        if self.canary is not None and self.canary.release != current:
            self.canary = None

    def wanted_of(self, replica: str, current: int) -> int:
        """The version that this replica is to serve, while `current` is the deployment's."""
        if self.canary is None or self.canary.replica == replica:
            return current
        return self.canary.before.version

    # Automatic changes

    async def roll_out(self, version: int, reason: str) -> None:
        """Let all replicas serve what the canary serves, if that is still this version."""
        async with self._lock:
            current = await self.current()
            if self.canary is None or current is None:
                return
            if not current.version == self.canary.release.version == version:
                return
            replica = self.canary.replica
            await self._serve(current)
        text = f"v{current.version} on all replicas: on {replica}, {reason}"
        await self._say("rolled_out", text, current.version)

    async def move_canary(self, version: int, replica: str, reason: str) -> None:
        """Let another replica serve this version first."""
        async with self._lock:
            if self.canary is None or self.canary.release.version != version:
                return
            self.canary = replace(self.canary, replica=replica)
            await self._tell_replicas(self.canary.release)
        await self._say("canary_moved", f"v{version} first on {replica} now: {reason}", version)

    async def conclude(self, outcome: RoundOutcome, serving: set[int], first_on: str = "") -> bool:
        """Publish the candidate of a round, or tell why not. `first_on` names the replica that is
        to serve it first; "" = all at once. Returns whether it was published."""
        try:
            outcome = await self._bring(outcome)
            async with self._lock:
                kind, text, version = await self._publish_or_refuse(outcome, serving, first_on)
        except OSDError as error:
            kind, text, version = "publish_failed", str(error), outcome.base_version
        label = "failed" if kind == "publish_failed" else kind
        aside = policy.if_sampled(outcome, self._config.serving.num_ranks)
        event = Event(
            at=self._clock.time(),
            kind=kind,
            text=text + policy.contradictions(outcome) + aside,
            version=version,
        )
        await self._tell(
            *(presentable(outcome), event, self._count("osd_round_total", 1, outcome=label)),
            self._count("osd_round_rows_total", outcome.num_new_rows, kind="trainable"),
            self._count("osd_round_rows_total", outcome.num_contradicting, kind="contradicting"),
        )
        return kind == "published"

    async def _bring(self, outcome: RoundOutcome) -> RoundOutcome:
        """Bring the candidate to this machine if it is to be published. Takes minutes where it is
        large, in which drafts may be changed by hand and rolled back."""
        current = await self.current()
        if current is None or self.is_paused or not (await self._decide(outcome, current)).ok:
            return outcome
        return replace(outcome, path=await self._collect(outcome))

    async def _decide(self, outcome: RoundOutcome, current: DraftRelease) -> policy.Decision:
        is_pinned = await self.pinned() is not None
        return policy.should_publish(outcome, current, self._config.gate, is_pinned)

    async def _publish_or_refuse(
        self, outcome: RoundOutcome, serving: set[int], first_on: str
    ) -> tuple[str, str, int]:
        current = await self.current()
        if current is None:
            return "refused", "the draft it was trained from is gone", outcome.base_version
        decision = await self._decide(outcome, current)
        if outcome.discarded:
            return "discarded", decision.reason, outcome.base_version
        if self.canary is not None and decision.ok:
            trial = f"v{current.version} is on trial on {self.canary.replica}"
            return "refused", f"{trial}; the next candidate has learnt the same", current.version
        if self.is_paused or not decision.ok:
            reason = decision.reason if not decision.ok else "paused while it was trained"
            return "refused", reason, outcome.base_version
        release = await asyncio.to_thread(
            self._releases.publish,
            outcome.path,
            parent=current.version,
            target_id=self._target_id,
            outcome=outcome,
            origin=current.origin,
        )
        canary = Canary(replica=first_on, release=release, before=current) if first_on else None
        await self._serve(release, canary)
        await self._prune(serving | {current.version})
        where = f", first on {first_on}" if first_on else ""
        return "published", f"v{release.version}: {decision.reason}{where}", release.version

    async def take_back(self, current: DraftRelease, reason: str) -> bool:
        """Roll back a bad draft and never offer it again. False when that is not possible."""
        async with self._lock:
            if await self.current() != current or await self.pinned():
                return False
            try:
                parent = await self._before_current()
                await asyncio.to_thread(self._releases.mark_bad, current.version, reason)
                await self._choose(parent.version, by_hand=False)
            except ReleaseError as error:
                text = f"v{current.version} should go, but {error}"
                await self._say("rollback_failed", text, current.version)
                return False
        await self._tell_rollback(current.version, parent.version, reason, "disappointed")
        return True

    async def recall(self, current: DraftRelease, found: EarlierReport) -> bool:
        """Let an earlier draft serve again. False when there was a change meanwhile."""
        async with self._lock:
            if not await self.is_settled(current):
                return False
            arguments = found.version, self._target_id, found.since
            await self._serve(await asyncio.to_thread(self._releases.recall, *arguments))
        await self._say("recalled", policy.why_recalled(found, current), found.version)
        return True

    # Changes by hand

    async def set_paused(self, is_paused: bool) -> None:
        """Pause or resume. After it returns, no candidate is being published."""
        async with self._lock:
            await asyncio.to_thread(self._releases.set_paused, is_paused)
            self.is_paused = is_paused

    async def promote(self, version: int) -> DraftRelease:
        async with self._lock:
            release = await self._choose(version, by_hand=True)
        await self._say("promoted", f"v{version} by hand", version)
        return release

    async def rollback(self) -> DraftRelease:
        """Go back to the parent. The draft is not marked bad: `promote` can bring it back."""
        async with self._lock:
            current = await self.current()
            parent = await self._before_current()
            release = await self._choose(parent.version, by_hand=True)
        left = current.version if current is not None else 0
        await self._tell_rollback(left, release.version, "by hand", "by_hand")
        return release

    async def pin(self, version: int) -> DraftRelease:
        async with self._lock:
            release = await asyncio.to_thread(self._releases.pin, version, self._target_id)
            await self._serve(release)
        await self._say("pinned", f"v{version} serves until unpinned", version)
        return release

    async def unpin(self) -> None:
        async with self._lock:
            await asyncio.to_thread(self._releases.unpin)
        await self._say("unpinned", "newer drafts may serve again")

    async def keep(self, version: int) -> DraftRelease:
        async with self._lock:
            release = await asyncio.to_thread(self._releases.keep, version)
        await self._say("kept", f"v{version} is never pruned", version)
        return release

    # Inside

    async def _choose(self, version: int, *, by_hand: bool) -> DraftRelease:
        """Let an existing release serve."""
        choose = partial(self._releases.set_current, by_hand=by_hand)
        release = await asyncio.to_thread(choose, version, self._target_id)
        await self._serve(release)
        return release

    async def _say(self, kind: str, text: str, version: int = 0) -> None:
        await self._tell(Event(at=self._clock.time(), kind=kind, text=text, version=version))

    def _count(self, name: str, value: int, **labels: str) -> MetricPoint:
        return MetricPoint(at=self._clock.time(), name=name, value=value, labels=labels)

    async def _before_current(self) -> DraftRelease:
        """What a rollback serves: in a trial, what all other replicas do. Raises `ReleaseError`."""
        if self.canary is not None:
            return self.canary.before
        return await asyncio.to_thread(self._releases.previous, self._target_id)

    async def _serve(self, release: DraftRelease, canary: Canary | None = None) -> None:
        self.changed_at, self.canary = self._clock.monotonic(), canary
        self._knows_canary = True
        await self._tell_replicas(release)

    async def _tell_replicas(self, release: DraftRelease) -> None:
        try:
            # In this order: a canary whose draft is the wanted one now keeps it throughout.
            if self.canary is None:
                await asyncio.to_thread(self._registry.set_wanted, release)
            await asyncio.to_thread(self._registry.set_canary, self.canary, self._releases.draft)
        except ReplayBufferError as error:
            log.warning("replicas will hear of v%d later: %s", release.version, error)

    async def _prune(self, serving: set[int]) -> None:
        try:
            await asyncio.to_thread(self._releases.prune, self._config.releases.keep, serving)
        except ReleaseError as error:
            log.warning("old releases were not removed: %s", error)

    async def _tell_rollback(self, version: int, parent: int, reason: str, label: str) -> None:
        text = f"v{version} -> v{parent}: {reason}"
        event = Event(at=self._clock.time(), kind="rolled_back", text=text, version=parent)
        await self._tell(event, self._count("osd_rollback_total", 1, reason=label))
