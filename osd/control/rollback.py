"""Judges the serving draft on live traffic: when it disappoints, a replay tells why, and a bad one is taken back.

live α (history) ─► should_judge? ─► replay of the draft and its parent (trainer) ─► should_rollback? ─► take back
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Protocol

from osd.common.clock import Clock
from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.release_manager import Drafts, Tell
from osd.observe.history import History
from osd.records import DraftRelease, Event, SpecWindow

OVER_S = 3600.0
"""A draft is judged on what it served in so many seconds at most."""
MAX_PATIENCE_S = 300.0
SECONDS_TO_STORE = 1.0
"""By when the traces of requests that have ended are in the buffer."""
MOST_AHEAD_S = 10.0
"""By so much a replica's clock may be ahead of this one; more is from before the clock was set back."""


class Replay(Protocol):
    """α of releases on the newest held-out traces: version -> α; {} or None when that is not possible now."""

    def __call__(self, versions: list[DraftRelease], num_traces: int) -> Awaitable[dict[int, float] | None]: ...


class Judge:
    """Looks at every turn of the watch loop, and replays beside it: one replay at a time.

    A draft that stays although it disappoints (the traffic changed) is judged again on what it served since, at
    growing intervals, and is spoken of once.
    """

    def __init__(
        self,
        gate: GateConfig,
        history: History,
        drafts: Drafts,
        replay: Replay,
        tell: Tell,
        clock: Clock,
        patience_s: float = 5.0,
    ) -> None:
        self._gate, self._history, self._drafts = gate, history, drafts
        self._replay, self._tell = replay, tell
        self._clock, self._patience_s = clock, patience_s
        self._task: asyncio.Task[None] | None = None
        self._num_empty = 0
        """Replays in a row that could not be made."""
        self.alarm = ""
        """Why the engine seems to run something else than the serving draft; "" when it does not."""
        self._meet(version=0)

    async def look(self, current: DraftRelease) -> None:
        """Begin a judgement if there is reason for one. An error of the one before is raised here."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()
        live = self._history.window(current.version, self._since(current), until=self._clock.time() + MOST_AHEAD_S)
        if live is not None and policy.is_as_predicted(live, current, self._gate):
            self.alarm = ""
        if live is None or not policy.should_judge(live, current, self._gate).ok or self._is_too_early():
            return
        if await self._drafts.pinned() is None and (parent := await self._drafts.previous()) is not None:
            self._task = asyncio.create_task(self._judge(current, parent, live), name="judge")

    async def close(self) -> None:
        """Drop a judgement under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _meet(self, version: int) -> None:
        """Nothing is known of another draft yet."""
        self._version, self._num_stays, self._judged_at, self.alarm = version, 0, -math.inf, ""

    def _since(self, current: DraftRelease) -> float:
        if current.version != self._version:
            self._meet(current.version)
        # As the clock stands now: it may have been set since.
        seconds_ago = self._clock.monotonic() - max(self._drafts.changed_at, self._judged_at)
        return self._clock.time() - min(seconds_ago, OVER_S)

    def _is_too_early(self) -> bool:
        patience = min(MAX_PATIENCE_S, self._patience_s * 2**self._num_stays)
        return self._num_stays > 0 and self._clock.monotonic() < self._judged_at + patience

    async def _judge(self, current: DraftRelease, parent: DraftRelease, live: SpecWindow) -> None:
        alphas = await self._replay([current, parent], policy.num_to_replay(live, self._gate))
        if not alphas:  # the trainer is away, or what was just served is not stored yet
            self._num_empty += 1
            return await self._clock.sleep(min(MAX_PATIENCE_S, SECONDS_TO_STORE * 2 ** (self._num_empty - 1)))
        self._num_empty = 0
        self._judged_at = self._clock.monotonic() + min(max(live.at - self._clock.time(), 0.0), MOST_AHEAD_S)
        decision = policy.should_rollback(live, current, parent.version, alphas, self._gate)
        if decision.ok:
            await self._drafts.take_back(current, decision.reason)
            return
        self._num_stays += 1
        is_unexplained = policy.is_unexplained(live, current, alphas, self._gate)
        if self._num_stays == 1 or is_unexplained != bool(self.alarm):
            kind = "alarm" if is_unexplained else "stays"
            await self._tell(Event(at=self._clock.time(), kind=kind, text=decision.reason, version=current.version))
        self.alarm = decision.reason if is_unexplained else ""
