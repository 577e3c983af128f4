"""The living replicas, and which of them lag behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from osd.common.clock import Clock
from osd.control.protocols import Feed, Tell
from osd.records import DraftRelease, Event, Member, ReplicaStatus

LAGGING_AFTER_S = 15.0
"""A replica lags after serving another version than the wanted one for this long."""


class ReplicaWatch:
    """The newest heartbeats, and how long each replica has served another version than wanted."""

    def __init__(self, registry: Feed, tell: Tell, clock: Clock) -> None:
        self._registry, self._tell, self._clock = registry, tell, clock
        self.statuses: list[ReplicaStatus] = []
        self.members: list[Member] = []
        self.lagging: set[str] = set()
        """Names of lagging replicas."""
        self._behind_since: dict[str, float] = {}

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
        """Read the heartbeats. Raises `ReplayBufferError` when Redis is away."""
        self.statuses, self.members = await asyncio.to_thread(self._read)

    def _read(self) -> tuple[list[ReplicaStatus], list[Member]]:
        return self._registry.replicas(), self._registry.members()

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
