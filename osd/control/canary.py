"""A new draft serves on one of several replicas first.

published ─► on one replica ─► as the gate measured, or nothing against it for long ─► on all
                 │
                 ├─ it does not take the draft, or its engine is at fault ─► another replica
                 ├─ lost or started again since it took the draft: twice ─► taken back
                 └─ rolled back (`rollback.py`) ─► no other replica has ever had it
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

from osd.common.clock import Clock
from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.release_manager import ReleaseManager
from osd.control.rollback import RollbackMonitor
from osd.observe.history import History
from osd.records import Canary, ReplicaStatus

MOST_LOSSES = 2
"""Replicas that may be lost, or start again, after they took a draft: one may be chance."""


@dataclass(slots=True)
class _Trial:
    """What is known of a draft on one replica. Times are monotonic; inf = not yet."""

    version: int
    replica: str
    since: float
    serves_since: float = math.inf
    gone_since: float = math.inf
    alarmed_since: float = math.inf
    started_at: float = 0.0
    """Unix time at which the replica that serves it started."""
    is_lost: bool = False
    """Whether it is gone for so long that this was counted."""
    num_losses: int = 0
    tried: set[str] = field(default_factory=set)
    """Replicas that did not take it, or whose engine was at fault."""
    verdict: str = ""
    """Why it is to be taken back."""
    judged_at: float = -math.inf
    """When that was tried last."""


class CanaryWatch:
    """Looks in every turn of the watch loop."""

    def __init__(
        self, gate: GateConfig, history: History, releases: ReleaseManager, clock: Clock
    ) -> None:
        self._gate, self._history, self._releases = gate, history, releases
        self._clock = clock
        self._trial: _Trial | None = None

    def choose(self, replicas: list[ReplicaStatus], target_id: str) -> str:
        """The replica that is to serve a new draft first: the busiest. "" = all at once."""
        able = able_to_swap(replicas, target_id)
        fit = [status for status in able.values() if status.may_try]
        if len(able) < 2 or not fit or not self._gate.canary_seconds:
            return ""
        return max(fit, key=lambda status: (status.num_running, status.replica)).replica

    async def look(
        self,
        replicas: list[ReplicaStatus],
        monitor: RollbackMonitor | None,
        draining: Set[str] = frozenset(),
    ) -> None:
        """Roll out, choose another replica, take back, or wait. A replica that is drained shows
        nothing more of its draft, and its end is nobody's fault."""
        canary = self._releases.canary
        if canary is None:
            self._trial = None
            return
        trial = self._trial_of(canary)
        if not self._gate.canary_seconds:
            return await self._releases.roll_out(trial.version, "no trials are wanted any more")
        able = able_to_swap(replicas, canary.release.target_id)
        mine = able.get(canary.replica)
        if trial.verdict:
            return await self._take_back(canary, trial)
        if canary.replica in draining:
            return await self._choose_another(canary, trial, able, f"{canary.replica} is drained")
        if trial.serves_since == math.inf:
            await self._wait_for_it(canary, trial, mine, able)
        elif not await self._note_losses(canary, trial, mine, able):
            await self._judge(canary, trial, able, monitor)

    def _trial_of(self, canary: Canary) -> _Trial:
        trial, now = self._trial, self._clock.monotonic()
        if trial is None or trial.version != canary.release.version:
            trial = _Trial(canary.release.version, canary.replica, now)
        elif trial.replica != canary.replica:
            trial = _Trial(
                trial.version, canary.replica, now, num_losses=trial.num_losses, tried=trial.tried
            )
        self._trial = trial
        return trial

    async def _wait_for_it(
        self,
        canary: Canary,
        trial: _Trial,
        mine: ReplicaStatus | None,
        able: dict[str, ReplicaStatus],
    ) -> None:
        now = self._clock.monotonic()
        if mine is not None and mine.version == trial.version:
            trial.serves_since, trial.started_at = now, mine.started_at
        elif mine is None or now - trial.since > self._gate.canary_seconds:
            why = "is gone" if mine is None else "did not take it"
            await self._choose_another(canary, trial, able, f"{canary.replica} {why}")

    async def _note_losses(
        self,
        canary: Canary,
        trial: _Trial,
        mine: ReplicaStatus | None,
        able: dict[str, ReplicaStatus],
    ) -> bool:
        """Whether the replica that took the draft is not there now."""
        now = self._clock.monotonic()
        if mine is None:
            trial.gone_since = min(trial.gone_since, now)
            if now - trial.gone_since > self._gate.canary_seconds:
                await self._note_absence(canary, trial, able)
            return True
        was_counted, trial.is_lost, trial.gone_since = trial.is_lost, False, math.inf
        if mine.started_at != trial.started_at:
            trial.started_at, trial.serves_since = mine.started_at, now
            if not was_counted:
                await self._lose(canary, trial, "had to be started again", able)
            return True
        return mine.version != trial.version

    async def _note_absence(
        self, canary: Canary, trial: _Trial, able: dict[str, ReplicaStatus]
    ) -> None:
        """It is one loss, however long it lasts: where no other replica is there either, the trial
        waits for the first that is."""
        if trial.is_lost:
            await self._choose_another(canary, trial, able, f"{canary.replica} is gone")
        else:
            trial.is_lost = True
            await self._lose(canary, trial, "was lost", able)

    async def _lose(
        self, canary: Canary, trial: _Trial, what: str, able: dict[str, ReplicaStatus]
    ) -> None:
        trial.num_losses += 1
        reason = f"{canary.replica} {what} after it took v{trial.version}"
        if trial.num_losses >= MOST_LOSSES:
            trial.verdict = f"{reason}, as another time before"
            await self._take_back(canary, trial)
        elif canary.replica not in able:
            await self._choose_another(canary, trial, able, reason)

    async def _take_back(self, canary: Canary, trial: _Trial) -> None:
        """Where the disk refuses, it is tried again, and nothing else is done with the draft."""
        now = self._clock.monotonic()
        if now - trial.judged_at >= self._gate.canary_seconds:
            trial.judged_at = now
            await self._releases.take_back(canary.release, trial.verdict)

    async def _judge(
        self,
        canary: Canary,
        trial: _Trial,
        able: dict[str, ReplicaStatus],
        monitor: RollbackMonitor | None,
    ) -> None:
        now, version = self._clock.monotonic(), trial.version
        if monitor is not None and monitor.alarm:
            trial.alarmed_since = min(trial.alarmed_since, now)
            if now - trial.alarmed_since > self._gate.canary_seconds:
                await self._choose_another(canary, trial, able, monitor.alarm)
            return
        trial.alarmed_since = math.inf
        if monitor is not None and monitor.is_checking:
            return
        since = self._clock.time() - (now - trial.since)
        live = self._history.window(version, since, replica=canary.replica)
        if live is not None and policy.is_proved(live, canary.release, self._gate):
            text = f"it serves with α {live.alpha:.2f}, as measured"
            return await self._releases.roll_out(version, text)
        if now - trial.serves_since < self._gate.canary_seconds:
            return
        has_judged = monitor is None or monitor.has_judged(canary.replica)
        if has_judged or not policy.is_plainly_low(live, canary.release, self._gate):
            text = f"nothing was found against it in {self._gate.canary_seconds:.0f} s"
            await self._releases.roll_out(version, text)

    async def _choose_another(
        self, canary: Canary, trial: _Trial, able: dict[str, ReplicaStatus], reason: str
    ) -> None:
        trial.tried.add(canary.replica)
        others = sorted(n for n in able if able[n].may_try and n not in trial.tried)
        if others:
            serving = [name for name in others if able[name].version == trial.version]
            await self._releases.move_canary(trial.version, (serving or others)[0], reason)
        elif able:
            text = f"no other replica is left to try it first ({reason})"
            await self._releases.roll_out(trial.version, text)


def able_to_swap(replicas: list[ReplicaStatus], target_id: str) -> dict[str, ReplicaStatus]:
    """Replicas that can serve a new draft of this target, by name."""
    return {
        status.replica: status
        for status in replicas
        if status.is_swapped and "swap" not in status.off and status.target_id == target_id
    }
