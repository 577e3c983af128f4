"""Calls to a trainer that may be away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from osd.common.backoff import Outage
from osd.common.clock import Clock
from osd.control.protocols import Tell, Trainer
from osd.errors import ReplayBufferError
from osd.records import DraftRelease, Event, MetricPoint, RoundOutcome

log = logging.getLogger(__name__)
T = TypeVar("T")


class TrainerLink:
    """The trainer's methods, which return None after any error.

    An error is said once and followed by a growing pause. Redis being away is not counted as a
    failure of the trainer.
    """

    def __init__(self, trainer: Trainer, tell: Tell, clock: Clock, backoff_s: float) -> None:
        self._trainer, self._tell, self._clock = trainer, tell, clock
        self._outage = Outage(backoff_s)
        self._has_told_failure = False

    @property
    def is_away(self) -> bool:
        """Whether the last call failed."""
        return self._outage.num_failures > 0

    async def num_new_traces(self) -> int | None:
        return await self._answer(self._trainer.num_new_traces)

    async def run_round(self, base: DraftRelease, line: int) -> RoundOutcome | None:
        return await self._answer(lambda: self._trainer.run_round(base, line))

    async def evaluate_releases(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float] | None:
        return await self._answer(lambda: self._trainer.evaluate_releases(versions, num_traces))

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T | None:
        try:
            answer = await call()
        except Exception as error:  # noqa: BLE001  any error: serving goes on, Ray restarts the trainer
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            if not isinstance(error, ReplayBufferError):
                await self._tell_failure(text)
            await self._outage.pause(f"trainer: {text}", log)
            return None
        if self._outage.over(log) and self._has_told_failure:
            self._has_told_failure = False
            await self._tell(
                Event(at=self._clock.time(), kind="trainer_back", text="the trainer answers again")
            )
        return answer

    async def _tell_failure(self, text: str) -> None:
        """The first of several failures in a row is an event; each one is counted."""
        now = self._clock.time()
        if not self._has_told_failure:
            self._has_told_failure = True
            await self._tell(Event(at=now, kind="trainer_failed", text=text))
        await self._tell(MetricPoint(at=now, name="osd_trainer_failures_total", value=1))
