"""Compares the serving draft's live α with the measured one, and takes a bad draft back.

live α (history) ─► should_replay? ─► replay of draft and parent (trainer) ─► should_rollback?
                                                                                    │
                                                                         take back ◄┘
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
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
SECONDS_TO_STORE = 1.0
"""Traces reach the buffer within this time after their request has ended."""
MOST_AHEAD_S = 10.0
"""A replica's clock may be ahead by this much. Windows further ahead were written before the clock
was set back."""


class Replay(Protocol):
    """Measures releases on the newest held-out traces: version -> α. {} or None when that is not
    possible now."""

    def __call__(
        self, versions: list[DraftRelease], num_traces: int
    ) -> Awaitable[dict[int, float] | None]: ...


class RollbackMonitor:
    """Looks in every turn of the watch loop. At most one replay runs, beside the loop.

    A draft may stay although its live α is low (the traffic changed). It is then checked again at
    growing intervals, on what it served since, and told of once.
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
        self.alarm = ""
        """Why the engine seems to run something else than the serving draft; "" when it does
        not."""
        self._alarmed = ""
        """The replica that the alarm is about; "" = all together."""
        self._start_over(version=0)

    @property
    def is_checking(self) -> bool:
        """Whether a replay runs."""
        return self._task is not None and not self._task.done()

    async def look(self, current: DraftRelease, replicas: Sequence[str] = ()) -> None:
        """Start a check if there is reason for one: all replicas together, or one of several, serve
        too badly. Raises the error of the check before."""
        if self._task is not None:
            if self.is_checking:
                return
            self._task.result()
        scopes = ("", *(replicas if len(replicas) > 1 else ()))
        lives = {scope: self._live(current, scope) for scope in scopes}
        of_alarm = lives.get(self._alarmed)
        if self._alarmed not in lives or (
            of_alarm is not None and policy.is_as_predicted(of_alarm, current, self._gate)
        ):
            self.alarm = self._alarmed = ""
        if self._is_too_early():
            return
        scope, live = self._suspect(current, lives)
        if (
            live is not None
            and await self._releases.pinned() is None
            and (parent := await self._releases.previous()) is not None
        ):
            check = self._check(current, parent, live, scope)
            self._task = asyncio.create_task(check, name="rollback")

    def _live(self, current: DraftRelease, replica: str) -> SpecWindow | None:
        until = self._clock.time() + MOST_AHEAD_S
        return self._history.window(current.version, self._since(current), until, replica or None)

    def _suspect(
        self, current: DraftRelease, lives: Mapping[str, SpecWindow | None]
    ) -> tuple[str, SpecWindow | None]:
        """The first that serves too badly; all replicas together come first."""
        for scope, live in lives.items():
            if policy.should_replay(live, current, self._gate).ok:
                return scope, live
        return "", None

    async def close(self) -> None:
        """Cancel a running check."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start_over(self, version: int) -> None:
        """Forget what was known of another draft."""
        self._version, self._num_stays, self._checked_at = version, 0, -math.inf
        self.alarm = self._alarmed = ""

    def _since(self, current: DraftRelease) -> float:
        """Time from which windows count: the last change or check, or `OVER_S` ago."""
        if current.version != self._version:
            self._start_over(current.version)
        # Computed from the present time, because the clock may have been set since.
        seconds_ago = self._clock.monotonic() - max(self._releases.changed_at, self._checked_at)
        return self._clock.time() - min(seconds_ago, OVER_S)

    def _is_too_early(self) -> bool:
        patience = min(MAX_PATIENCE_S, self._patience_s * 2**self._num_stays)
        return self._num_stays > 0 and self._clock.monotonic() < self._checked_at + patience

    async def _check(
        self, current: DraftRelease, parent: DraftRelease, live: SpecWindow, replica: str
    ) -> None:
        """`replica`: the one that is judged; "" = all together."""
        alphas = await self._replay([current, parent], policy.num_to_replay(live, self._gate))
        if not alphas:  # the trainer is away, or the newest traces are not stored yet
            self._num_empty += 1
            return await self._clock.sleep(
                min(MAX_PATIENCE_S, SECONDS_TO_STORE * 2 ** (self._num_empty - 1))
            )
        self._num_empty = 0
        self._checked_at = self._clock.monotonic() + min(
            max(live.at - self._clock.time(), 0.0), MOST_AHEAD_S
        )
        decision = policy.should_rollback(live, current, parent.version, alphas, self._gate)
        reason = f"on {replica}, {decision.reason}" if replica else decision.reason
        if decision.ok:
            await self._releases.take_back(current, reason)
            return
        self._num_stays += 1
        is_unexplained = policy.is_unexplained(live, current, alphas, self._gate)
        if self._num_stays == 1 or is_unexplained != bool(self.alarm):
            kind = "alarm" if is_unexplained else "stays"
            await self._tell(
                Event(at=self._clock.time(), kind=kind, text=reason, version=current.version)
            )
        self.alarm = reason if is_unexplained else ""
        self._alarmed = replica if is_unexplained else ""
