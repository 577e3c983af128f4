"""Calls to a trainer that may fail, or may not answer at all.

    rounds, replays, counts ──► error = told once, tried again with growing pauses
    "where are you?", always ──► no answer for 8 s = told once, with what is known of the reason

A round takes minutes, so that its silence says nothing: the second question is asked beside it. A
trainer whose process is not there yet, or whose machine is cut off, answers neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from osd.common.backoff import Outage
from osd.common.clock import Clock
from osd.control.protocols import Tell, Trainer
from osd.errors import AwayError, OSDError, ReplayBufferError
from osd.records import DraftRelease, EarlierReport, Event, MetricPoint, RoundOutcome, RoundSize

log = logging.getLogger(__name__)
T = TypeVar("T")

SECONDS_TO_ANSWER = 8.0
"""A trainer that takes longer to say where it is has a problem."""
SECONDS_TO_START = 60.0
"""One that has never answered may still be starting, where nothing else is known of it."""
SECONDS_BETWEEN_QUESTIONS = 2.0
PRESENCE, COUNTING, TRAINING, REPLAY = "presence", "counting", "training", "replay"
ENDS = {
    PRESENCE: {PRESENCE},
    COUNTING: {PRESENCE, COUNTING},
    TRAINING: {PRESENCE, COUNTING, TRAINING, REPLAY},
    REPLAY: {PRESENCE, REPLAY},
}
"""What succeeds -> the troubles that are over then."""
UNKNOWN = (
    "its machine is cut off or overloaded, lacks what the trainer needs, or has no memory for it "
    "to start in (see `osd logs trainer`)"
)
ENDED_AGAIN = (
    "it ended in each of the last {} rounds ({}), as where the host's memory runs out; lower "
    "trainer.batch_size or trainer.max_length, or give its machine more memory"
)


class TrainerLink:
    """The trainer's methods, which return None after any error.

    An error is said once and followed by a growing pause. It is over when what failed succeeds: a
    trainer that counts its traces, and fails each round, still fails. Redis being away is not
    counted as a failure of the trainer.
    """

    def __init__(
        self,
        trainer: Trainer,
        tell: Tell,
        clock: Clock,
        backoff_s: float,
        seconds_to_answer: float = SECONDS_TO_ANSWER,
        seconds_to_start: float = SECONDS_TO_START,
    ) -> None:
        self._trainer, self._tell, self._clock = trainer, tell, clock
        self._seconds_to_answer, self._seconds_to_start = seconds_to_answer, seconds_to_start
        self._has_answered = False
        self._outages = {what: Outage(backoff_s) for what in ENDS}
        self._num_ended = 0
        """Rounds in a row in which its process ended."""
        self._troubles: dict[str, str] = {}
        """What fails -> why."""

    @property
    def is_away(self) -> bool:
        """Whether anything fails."""
        return bool(self._troubles) or self._outages[COUNTING].num_failures > 0

    @property
    def trouble(self) -> str:
        """Why; "" where nothing fails, or only Redis is away."""
        return self._troubles.get(PRESENCE) or next(iter(self._troubles.values()), "")

    async def num_new_traces(self) -> int | None:
        return await self._answer(COUNTING, self._trainer.num_new_traces)

    async def run_round(
        self, base: DraftRelease, line: int, size: RoundSize
    ) -> RoundOutcome | None:
        return await self._answer(TRAINING, lambda: self._trainer.run_round(base, line, size))

    async def evaluate_releases(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float] | None:
        return await self._answer(
            REPLAY, lambda: self._trainer.evaluate_releases(versions, num_traces)
        )

    async def compare_earlier(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport] | None:
        return await self._answer(
            REPLAY, lambda: self._trainer.compare_earlier(base, earlier, num_traces)
        )

    async def watch(self) -> None:
        """Ask where the trainer is, for ever."""
        asked: asyncio.Task[None] | None = None
        try:
            while True:
                if asked is None:
                    asked, silence_s = asyncio.create_task(self._ask(), name="presence"), 0.0
                done, _ = await asyncio.wait({asked}, timeout=self._seconds_to_answer)
                if done:
                    asked = None
                    await self._clock.sleep(SECONDS_BETWEEN_QUESTIONS)
                else:
                    silence_s += self._seconds_to_answer
                    await self._note_silence(silence_s)
        finally:
            if asked is not None:
                asked.cancel()
                await asyncio.wait({asked})

    async def _note_silence(self, seconds: float) -> None:
        why = await self._trainer.why_silent()
        if why or self._has_answered or seconds >= self._seconds_to_start:
            why = why or UNKNOWN
            await self._fails(PRESENCE, f"no answer for some {self._seconds_to_answer:g} s: {why}")

    async def _ask(self) -> None:
        try:
            await self._trainer.machine()
        except Exception as error:  # noqa: BLE001  any error: Ray restarts the trainer
            await self._fails(PRESENCE, _text(error))
        else:
            self._has_answered = True
            await self._works(PRESENCE)

    async def _answer(self, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        try:
            answer = await call()
        except Exception as error:  # noqa: BLE001  any error: serving goes on, Ray restarts the trainer
            why = _text(error)
            if what == TRAINING and not isinstance(error, AwayError):
                self._num_ended = 0
            if isinstance(error, ReplayBufferError):
                held = COUNTING  # which is the first to succeed again
            else:
                trouble = what
                if isinstance(error, AwayError):
                    trouble, why = self._note_end(what, why)
                held = what if what == TRAINING else trouble  # however it answers between rounds
                await self._fails(trouble, why)
                now = self._clock.time()
                await self._tell(MetricPoint(at=now, name="osd_trainer_failures_total", value=1))
            await self._outages[held].pause(f"trainer: {why}", log)
            return None
        if what == TRAINING:
            self._num_ended = 0
        for each in ENDS[what]:
            self._outages[each].over(log)
        await self._works(what)
        return answer

    def _note_end(self, what: str, why: str) -> tuple[str, str]:
        """What fails where its process ended, and why: one that ends in round after round will do
        so again, however well it answers between them."""
        self._num_ended += what == TRAINING
        if what != TRAINING or self._num_ended < 2:
            return PRESENCE, why
        text = ENDED_AGAIN.format(self._num_ended, why)
        if self._num_ended == 2:
            log.warning("trainer: %s", text)
        return TRAINING, text

    async def _fails(self, what: str, why: str) -> None:
        """The first failure is an event; others until all are over are part of it, but for rounds
        that fail."""
        if not self._troubles or (what == TRAINING and TRAINING not in self._troubles):
            await self._tell(Event(at=self._clock.time(), kind="trainer_failed", text=why))
        self._troubles[what] = why

    async def _works(self, what: str) -> None:
        was_failing = bool(self._troubles)
        self._troubles = {w: why for w, why in self._troubles.items() if w not in ENDS[what]}
        if was_failing and not self._troubles:
            text = "the trainer answers again"
            await self._tell(Event(at=self._clock.time(), kind="trainer_back", text=text))


def _text(error: Exception) -> str:
    if isinstance(error, OSDError):
        return str(error)[:500]
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
