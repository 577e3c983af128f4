"""A new draft serves on one of several replicas first.

published ─► on one replica ─► as the gate measured, or nothing against it for long ─► on all
                 │
                 ├─ it does not take the draft, or is gone ─► another replica
                 └─ rolled back (`rollback.py`) ─► no other replica has ever had it
"""

from __future__ import annotations

import math

from osd.common.clock import Clock
from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.release_manager import ReleaseManager
from osd.control.rollback import RollbackMonitor
from osd.observe.history import History
from osd.records import ReplicaStatus


class CanaryWatch:
    """Looks in every turn of the watch loop."""

    def __init__(
        self, gate: GateConfig, history: History, releases: ReleaseManager, clock: Clock
    ) -> None:
        self._gate, self._history, self._releases = gate, history, releases
        self._clock = clock
        self._watched: tuple[int, str] = (0, "")
        """version and replica"""
        self._since = self._serves_since = math.inf
        """Monotonic time at which it was chosen, and at which it was first seen to serve."""

    def choose(self, replicas: list[ReplicaStatus]) -> str:
        """The replica that is to serve a new draft first: the busiest. "" = all at once."""
        able = [status for status in replicas if status.is_swapped]
        if len(able) < 2 or not self._gate.canary_seconds:
            return ""
        return max(able, key=lambda status: (status.num_running, status.replica)).replica

    async def look(self, replicas: list[ReplicaStatus], monitor: RollbackMonitor | None) -> None:
        """Roll out, choose another replica, or wait."""
        canary = self._releases.canary
        if canary is None:
            return
        now, version = self._clock.monotonic(), canary.release.version
        if self._watched != (version, canary.replica):
            self._watched, self._since, self._serves_since = (
                (version, canary.replica),
                now,
                math.inf,
            )
        able = {status.replica: status for status in replicas if status.is_swapped}
        mine = able.get(canary.replica)
        if mine is not None and mine.version == version:
            self._serves_since = min(self._serves_since, now)
        elif mine is None or now - self._since > self._gate.canary_seconds:
            return await self._choose_another(canary.replica, able)
        if monitor is not None and (monitor.is_checking or monitor.alarm):
            return None
        live = self._history.window(version, replica=canary.replica)
        if live is not None and policy.is_as_predicted(live, canary.release, self._gate):
            return await self._releases.roll_out(f"it serves with α {live.alpha:.2f}, as measured")
        if now - self._serves_since >= self._gate.canary_seconds:
            text = f"nothing was found against it in {self._gate.canary_seconds:.0f} s"
            return await self._releases.roll_out(text)
        return None

    async def _choose_another(self, replica: str, able: dict[str, ReplicaStatus]) -> None:
        others = sorted(name for name in able if name != replica)
        if not others:
            return
        after = [name for name in others if name > replica]
        await self._releases.move_canary((after or others)[0])
