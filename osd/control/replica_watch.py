"""The living replicas: which of them lag behind, which are lost, and which are back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from osd.common.clock import Clock
from osd.control.protocols import Feed, Tell
from osd.records import DraftRelease, Event, Member, ReplicaStatus

LAGGING_AFTER_S = 15.0
"""A replica lags after serving another version than the wanted one for this long."""
SECONDS_ABSENT = 2.0
"""A replica without a heartbeat for so long is lost."""
SECONDS_TO_RETURN = 10.0
"""After Redis was away, replicas get so long for their next heartbeat."""
SECONDS_TO_END = 60.0
"""One that was told to end may be heard of for so long."""
SECONDS_TO_FORGET = 3600.0
"""A lost one that comes later is a new one."""


@dataclass(slots=True)
class _Known:
    """A replica that was heard of. Times are monotonic; inf = not so."""

    status: ReplicaStatus
    """Its newest heartbeat."""
    heard_at: float
    is_proved: bool = False
    """Whether it lives: another heartbeat came. The first may be of a service that has ended."""
    absent_since: float = math.inf
    lost_at: float = math.inf


class ReplicaWatch:
    """The newest heartbeats, and how long each replica has served another version than wanted."""

    def __init__(self, registry: Feed, tell: Tell, clock: Clock) -> None:
        self._registry, self._tell, self._clock = registry, tell, clock
        self.statuses: list[ReplicaStatus] = []
        self.members: list[Member] = []
        self.lagging: set[str] = set()
        """Names of lagging replicas."""
        self._behind_since: dict[str, float] = {}
        self._known: dict[str, _Known] = {}
        self._left_at: dict[str, float] = {}
        """Those that are ended on purpose -> when that was seen last."""
        self._redis_away_at = -math.inf

    @property
    def versions(self) -> set[int]:
        """Versions that serve somewhere."""
        return {status.version for status in self.statuses}

    @property
    def draining(self) -> set[str]:
        """Replicas that get no new requests."""
        return {member.replica for member in self.members if not member.is_wanted}

    @property
    def lasting(self) -> list[ReplicaStatus]:
        """Those that are not about to end."""
        draining = self.draining
        return [status for status in self.statuses if status.replica not in draining]

    @property
    def num_wanted(self) -> int | None:
        """How many are to serve; None where others start them."""
        return sum(member.is_wanted for member in self.members) if self.members else None

    async def refresh(self) -> None:
        """Read the heartbeats, and tell who is lost and who is back. Raises `ReplayBufferError`
        when Redis is away."""
        before, (self.statuses, self.members) = self.members, await asyncio.to_thread(self._read)
        self._note_leaving(before)
        await self._note_losses()

    def note_outage(self) -> None:
        """Redis is away: that nothing is heard says nothing of the replicas."""
        self._redis_away_at = self._clock.monotonic()

    def _read(self) -> tuple[list[ReplicaStatus], list[Member]]:
        return self._registry.replicas(), self._registry.members()

    def _note_leaving(self, before: list[Member]) -> None:
        now = self._clock.monotonic()
        wanted = {member.replica for member in self.members if member.is_wanted}
        names = {member.replica for member in (*before, *self.members)}
        left_at = self._left_at | dict.fromkeys(names, now)
        self._left_at = {
            name: at
            for name, at in left_at.items()
            if name not in wanted and now - at < SECONDS_TO_END
        }

    async def _note_losses(self) -> None:
        now = self._clock.monotonic()
        present = {status.replica: status for status in self.statuses}
        for name, status in present.items():
            known = self._known.setdefault(name, _Known(status, now))
            if status.at == known.status.at:
                continue
            if known.lost_at < math.inf:
                seconds = now - known.lost_at
                text = f"{name} is back after {seconds:.0f} s, with v{status.version}"
                await self._say("replica_back", text, status)
            self._known[name] = _Known(status, now, is_proved=True)
        for name in self._known.keys() - present.keys():
            await self._note_absence(name, self._known[name], now)

    async def _note_absence(self, name: str, known: _Known, now: float) -> None:
        known.absent_since = min(known.absent_since, now)
        if known.lost_at < math.inf:
            if now - known.lost_at > SECONDS_TO_FORGET:
                del self._known[name]
        elif name in self._left_at or not known.is_proved:
            del self._known[name]
        elif (
            now - known.absent_since >= SECONDS_ABSENT
            and now - self._redis_away_at >= SECONDS_TO_RETURN
        ):
            known.lost_at = now
            seconds = now - known.heard_at
            text = f"{name}, which served v{known.status.version}, is lost"
            if any(member.replica == name for member in self.members):
                text += "; it is started again"
            await self._say(
                "replica_lost", f"{text} (last heard of {seconds:.0f} s ago)", known.status
            )

    async def _say(self, kind: str, text: str, status: ReplicaStatus) -> None:
        at = self._clock.time()
        await self._tell(Event(at=at, kind=kind, text=text, version=status.version))

    async def note_lagging(
        self, current: DraftRelease, wanted_of: Callable[[str, int], int] = lambda _, newest: newest
    ) -> None:
        """Update `lagging`, and tell of each replica that is new in it. `wanted_of` says which
        version a replica is to serve."""
        now = self._clock.monotonic()
        behind = {
            status.replica: status
            for status in self.statuses
            if status.is_swapped and status.version != wanted_of(status.replica, current.version)
        }
        self._behind_since = {name: self._behind_since.get(name, now) for name in behind}
        lagging = {
            name for name, since in self._behind_since.items() if now - since >= LAGGING_AFTER_S
        }
        for name in sorted(lagging - self.lagging):
            wanted = wanted_of(name, current.version)
            text = f"{name} still serves v{behind[name].version}, wanted is v{wanted}"
            await self._tell(
                Event(at=self._clock.time(), kind="lagging", text=text, version=current.version)
            )
        self.lagging = lagging
