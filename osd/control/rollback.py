"""Compares the serving draft's live α with the measured one, and takes a bad draft back.

live α (history) ─► should_replay? ─► replay of draft and parent (trainer) ─► should_rollback?
                                                                                    │
                                                                         take back ◄┘
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from osd.common.clock import Clock
from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.protocols import Tell
from osd.control.release_manager import ReleaseManager
from osd.observe.history import History
from osd.records import DraftRelease, Event, SpecWindow

OVER_S = 3600.0
"""The live α covers at most the last so many seconds."""
MAX_PATIENCE_S = 300.0
MOST_DOUBLINGS = 20
"""Of a pause: after days of them a float would not hold it."""
SECONDS_TO_STORE = 1.0
"""Traces reach the buffer within this time after their request has ended."""
MOST_AHEAD_S = 10.0
"""A replica's clock may be ahead by this much. Windows further ahead were written before the clock
was set back."""


SECONDS_TO_FORGET = 60.0
"""What is known of a replica without a heartbeat for so long is forgotten."""


class Replay(Protocol):
    """Measures releases on the newest held-out traces: version -> α. {} or None when that is not
    possible now."""

    def __call__(
        self, versions: list[DraftRelease], num_traces: int
    ) -> Awaitable[dict[int, float] | None]: ...


@dataclass(slots=True)
class _Judged:
    """What is known of one replica, or of all together, with the draft that serves now."""

    checked_at: float = -math.inf
    """Monotonic time; windows of before are no evidence any more."""
    num_stays: int = 0
    """Checks after which the draft stayed."""
    num_failed: int = 0
    """Checks after which it should have gone, and could not be taken back."""
    alarm: str = ""
    """Why its engine seems to run something else; "" when it does not."""
    seen_at: float = -math.inf


class RollbackMonitor:
    """Looks in every turn of the watch loop. At most one replay runs, beside the loop.

    All replicas are judged together and, of several, each by itself: one engine among many that
    runs something else would hardly lower their mean. A draft may stay although its live α is low
    (the traffic changed). It is then checked again at growing intervals, on what it served since,
    and told of once.
    """

    def __init__(
        self,
        gate: GateConfig,
        history: History,
        releases: ReleaseManager,
        replay: Replay,
        tell: Tell,
        clock: Clock,
        patience_s: float = 5.0,
    ) -> None:
        self._gate, self._history, self._releases = gate, history, releases
        self._replay, self._tell = replay, tell
        self._clock, self._patience_s = clock, patience_s
        self._task: asyncio.Task[None] | None = None
        self._num_empty = 0
        """Replays in a row that could not be made."""
        self._version = 0
        self._judged: dict[str, _Judged] = {}
        """Replica -> what is known; "" = all together."""

    @property
    def alarm(self) -> str:
        """Why an engine seems to run something else than the serving draft; "" when none does."""
        return next((each.alarm for each in self._judged.values() if each.alarm), "")

    @property
    def is_checking(self) -> bool:
        """Whether a replay runs."""
        return self._task is not None and not self._task.done()

    def has_judged(self, replica: str) -> bool:
        """Whether a replay has shown that the draft is not what makes this replica slow."""
        return any(self._judged[s].num_stays for s in ("", replica) if s in self._judged)

    async def look(self, current: DraftRelease, replicas: Sequence[str] = ()) -> None:
        """Start a check if there is reason for one. Raises the error of the check before."""
        if self._task is not None:
            if self.is_checking:
                return
            ended, self._task = self._task, None
            ended.result()
        if current.version != self._version:
            self._version, self._judged = current.version, {}
        lives = self._lives(current, ["", *(replicas if len(replicas) > 1 else ())])
        self._end_alarms(current, lives)
        suspects = [
            scope
            for scope, live in lives.items()
            if policy.should_replay(live, current, self._gate).ok and not self._is_too_early(scope)
        ]
        # The one that was checked longest ago, so that none hides the others.
        scope = min(suspects, key=lambda s: self._judged[s].checked_at, default=None)
        live = None if scope is None else lives[scope]
        if (
            scope is not None
            and live is not None
            and await self._releases.pinned() is None
            and (parent := await self._releases.previous()) is not None
        ):
            check = self._check(current, parent, live, scope)
            self._task = asyncio.create_task(check, name="rollback")

    async def close(self) -> None:
        """Cancel a running check."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _lives(self, current: DraftRelease, scopes: Sequence[str]) -> dict[str, SpecWindow | None]:
        """What each has served since the last change, or since it was checked."""
        now, until = self._clock.monotonic(), self._clock.time() + MOST_AHEAD_S
        for scope in scopes:
            self._judged.setdefault(scope, _Judged()).seen_at = now
        since = self._since(-math.inf)
        together, each = self._history.windows(current.version, since, until)
        found: dict[str, SpecWindow | None] = {"": together, **each}
        for scope in scopes:
            if (checked_at := self._judged[scope].checked_at) > -math.inf:
                found[scope] = self._history.window(
                    current.version, self._since(checked_at), until, scope or None
                )
        return {scope: found.get(scope) for scope in scopes}

    def _since(self, checked_at: float) -> float:
        """Unix time from which windows count: the last change or check, or `OVER_S` ago."""
        # Computed from the present time, because the clock may have been set since.
        seconds_ago = self._clock.monotonic() - max(self._releases.changed_at, checked_at)
        return self._clock.time() - min(seconds_ago, OVER_S)

    def _end_alarms(self, current: DraftRelease, lives: Mapping[str, SpecWindow | None]) -> None:
        """Of those that serve as they should again, and of replicas that are gone."""
        for scope, known in list(self._judged.items()):
            live = lives.get(scope)
            if live is not None and policy.is_as_predicted(live, current, self._gate):
                known.alarm = ""
            if self._clock.monotonic() - known.seen_at > SECONDS_TO_FORGET:
                del self._judged[scope]

    def _is_too_early(self, scope: str) -> bool:
        known = self._judged[scope]
        num = known.num_stays + known.num_failed
        patience = _patience(self._patience_s, num)
        return num > 0 and self._clock.monotonic() < known.checked_at + patience

    async def _check(
        self, current: DraftRelease, parent: DraftRelease, live: SpecWindow, scope: str
    ) -> None:
        known = self._judged[scope]
        alphas = await self._replay([current, parent], policy.num_to_replay(live, self._gate))
        if not alphas:  # the trainer is away, or the newest traces are not stored yet
            self._num_empty += 1
            return await self._clock.sleep(_patience(SECONDS_TO_STORE, self._num_empty - 1))
        self._num_empty = 0
        known.checked_at = self._clock.monotonic() + min(
            max(live.at - self._clock.time(), 0.0), MOST_AHEAD_S
        )
        decision = policy.should_rollback(live, current, parent.version, alphas, self._gate)
        reason = f"on {scope}, {decision.reason}" if scope else decision.reason
        if decision.ok:
            known.num_failed += 1  # also where the disk raises
            if await self._releases.take_back(current, reason):
                known.num_failed -= 1
            return None
        known.num_stays += 1
        is_unexplained = policy.is_unexplained(live, current, alphas, self._gate)
        if known.num_stays == 1 or is_unexplained != bool(known.alarm):
            kind = "alarm" if is_unexplained else "stays"
            await self._tell(
                Event(at=self._clock.time(), kind=kind, text=reason, version=current.version)
            )
        known.alarm = reason if is_unexplained else ""
        return None


def _patience(first_s: float, num: int) -> float:
    """Seconds of a pause that has been doubled so often, up to `MAX_PATIENCE_S`."""
    return min(MAX_PATIENCE_S, first_s * 2 ** min(num, MOST_DOUBLINGS))
