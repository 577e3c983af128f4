"""A trainer that fails, is silent, or comes back: what is told, once each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from osd.control.trainer_link import (
    ENDED_AGAIN,
    SECONDS_BETWEEN_QUESTIONS,
    SECONDS_TO_ANSWER,
    TRAINING,
    UNKNOWN,
    TrainerLink,
)
from osd.errors import AwayError, OSDError, ReplayBufferError
from osd.records import DraftRelease, EarlierReport, Event, RoundOutcome, RoundSize
from tests.support.clocks import HandClock

RELEASE = DraftRelease(version=1, parent=0, path="/d", sha256="a", target_id="t", created_at=1.0)
OUTCOME: Any = "an outcome"
PATIENCE_S = 0.05


class FakeTrainer:
    """`fails`: method -> what it raises. `answers` is not set while it is silent."""

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_asked = 0
        self.lacks = "no machine has the resource 'train'"

    async def machine(self) -> str:
        self.num_asked += 1
        await self.answers.wait()
        return self._do("machine", "here")

    async def why_silent(self) -> str:
        return self.lacks

    async def num_new_traces(self) -> int:
        return self._do("num_new_traces", 7)

    async def run_round(self, base: DraftRelease, line: int, size: RoundSize) -> RoundOutcome:
        return self._do("run_round", OUTCOME)

    async def candidate(self, outcome: RoundOutcome) -> str:
        return outcome.path

    async def evaluate_releases(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float]:
        return self._do("evaluate_releases", {1: 0.5})

    async def compare_earlier(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport]:
        return self._do("compare_earlier", [])

    def _do(self, method: str, answer: Any) -> Any:
        if method in self.fails:
            raise self.fails[method]
        return answer


class Told:
    """A link, and the events and failures it told."""

    def __init__(self) -> None:
        self.trainer, self.events, self.num_failures = FakeTrainer(), list[str](), 0
        self.link = TrainerLink(
            self.trainer, self.tell, HandClock(), 0.0, PATIENCE_S, 4 * PATIENCE_S
        )

    async def tell(self, record: Any) -> None:
        if isinstance(record, Event):
            self.events.append(f"{record.kind}: {record.text}")
        else:
            self.num_failures += 1

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.link.watch())
        yield
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def call(self, method: str) -> Any:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "num_new_traces": self.link.num_new_traces,
            "run_round": lambda: self.link.run_round(RELEASE, 1, 8),
            "evaluate_releases": lambda: self.link.evaluate_releases([RELEASE], 9),
            "compare_earlier": lambda: self.link.compare_earlier(RELEASE, [RELEASE], 16),
        }
        return await calls[method]()


@pytest.fixture
def told() -> Told:
    return Told()


BACK = "trainer_back: the trainer answers again"
SILENCE = f"no answer for some {PATIENCE_S:g} s: {UNKNOWN}"


async def test_a_silent_trainer_is_told_once_with_what_is_known_of_the_reason(told: Told) -> None:
    told.trainer.answers.clear()
    silence = "no answer for some 0.05 s: no machine has the resource 'train'"
    async with told.watching():
        await told.until(lambda: told.link.is_away)
        await asyncio.sleep(3 * PATIENCE_S)
        assert (told.link.trouble, told.trainer.num_asked) == (silence, 1), "it is asked once"
        told.trainer.answers.set()
        await told.until(lambda: not told.link.is_away)
    assert told.events == [f"trainer_failed: {silence}", BACK]
    assert told.num_failures == 0, "it was not called"


def test_silence_is_known_within_15_seconds() -> None:
    """And a look at the page besides."""
    assert SECONDS_BETWEEN_QUESTIONS + SECONDS_TO_ANSWER <= 12


async def test_a_trainer_that_starts_is_given_time(told: Told) -> None:
    told.trainer.lacks = ""
    told.trainer.answers.clear()
    async with told.watching():
        await asyncio.sleep(2.5 * PATIENCE_S)
        assert not told.link.is_away
        await told.until(lambda: told.link.is_away)
    assert told.events == [f"trainer_failed: {SILENCE}"]
    assert "no memory for it to start in (see `osd logs trainer`)" in SILENCE


async def test_one_that_has_answered_is_given_none(told: Told) -> None:
    told.trainer.lacks = ""
    async with told.watching():
        await told.until(lambda: told.trainer.num_asked > 1)
        told.trainer.answers.clear()
        await asyncio.sleep(2.5 * PATIENCE_S)
        assert told.link.trouble == SILENCE


async def test_a_trainer_whose_process_ended_is_told_once_whoever_finds_out(told: Told) -> None:
    ended = AwayError("its process ended, and is started again")
    told.trainer.fails = {"machine": ended, "num_new_traces": ended}
    async with told.watching():
        await told.until(lambda: told.link.is_away)
        assert await told.call("num_new_traces") is None
        told.trainer.fails = {}
        await told.until(lambda: not told.link.is_away)
    assert told.events == [f"trainer_failed: {ended}", BACK]


@pytest.mark.parametrize(
    ("failing", "healed_by", "not_by"),
    [
        ("run_round", "run_round", ("num_new_traces", "evaluate_releases")),
        ("num_new_traces", "num_new_traces", ("evaluate_releases",)),
        ("num_new_traces", "run_round", ()),
        ("evaluate_releases", "evaluate_releases", ("num_new_traces",)),
        ("evaluate_releases", "run_round", ("num_new_traces",)),
    ],
)
async def test_a_failure_is_over_when_what_failed_succeeds(
    told: Told, failing: str, healed_by: str, not_by: tuple[str, ...]
) -> None:
    told.trainer.fails[failing] = RuntimeError("out of\nmemory")
    async with told.watching():
        for _ in range(3):
            assert await told.call(failing) is None
            for other in not_by:
                assert await told.call(other) is not None
        await told.until(lambda: told.trainer.num_asked > 3)
        assert told.link.trouble == "RuntimeError: out of memory"
        del told.trainer.fails[failing]
        assert await told.call(healed_by) is not None
        assert not told.link.is_away
    assert told.events == ["trainer_failed: RuntimeError: out of memory", BACK]
    assert told.num_failures == 3


@pytest.mark.parametrize(
    "method", ["num_new_traces", "run_round", "evaluate_releases", "compare_earlier"]
)
async def test_redis_away_is_seen_and_not_told_and_over_when_traces_can_be_counted(
    told: Told, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    told.trainer.fails[method] = ReplayBufferError("Redis cannot be used")
    with caplog.at_level(logging.WARNING):
        assert await told.call(method) is None
        assert await told.call(method) is None
        assert (told.link.is_away, told.link.trouble) == (True, "")
        told.trainer.fails = {}
        assert await told.call("num_new_traces") == 7
    assert not told.link.is_away
    assert (told.events, told.num_failures) == ([], 0)
    assert caplog.text.count("trying again until it works") == 1
    assert caplog.text.count("works again: trainer: Redis cannot be used") == 1


async def test_one_that_ends_in_round_after_round_is_told_with_the_remedy_and_paused_for(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again at once, and answers between its rounds: else they would follow each
    other without a pause, each with the line that it ended and the line that it is back."""
    ended = AwayError("its process ended, and is started again")
    told.trainer.fails["run_round"] = ended
    async with told.watching():
        for num in range(1, 5):
            assert await told.call("run_round") is None
            assert await told.call("num_new_traces") == 7
            assert told.link._outages[TRAINING].num_failures == num
            asked = told.trainer.num_asked
            await told.until(lambda asked=asked: told.trainer.num_asked > asked + 1)
        assert told.link.trouble == ENDED_AGAIN.format(4, ended)
        told.trainer.fails = {}
        await told.call("run_round")
        assert not told.link.is_away
        told.trainer.fails["run_round"] = ended
        await told.call("run_round")
    again = f"trainer_failed: {ENDED_AGAIN.format(2, ended)}"
    first = f"trainer_failed: {ended}"
    assert told.events[:4] == [first, BACK, again, BACK]
    assert told.events[4] == first, "once is no sign of more"
    assert "lower trainer.batch_size or trainer.max_length" in again
    warned = [r.message for r in caplog.records if r.message.startswith("trainer: it ended in")]
    assert len(warned) == 1, "once, however often"


@pytest.mark.parametrize("between", [OSDError("disk full"), ReplayBufferError("Redis is away")])
async def test_a_round_that_fails_in_another_way_did_not_end_it(
    told: Told, between: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    ended = AwayError("its process ended, and is started again")
    for error in (ended, between, between, ended):
        told.trainer.fails["run_round"] = error
        await told.call("run_round")
    assert "it ended in each of" not in caplog.text
    await told.call("run_round")
    assert ENDED_AGAIN.format(2, ended) in caplog.text


async def test_rounds_that_end_it_are_told_though_it_is_known_to_be_away(told: Told) -> None:
    """The remedy comes with the rounds, not with the question where it is."""
    ended = AwayError("its process ended, and is started again")
    told.trainer.fails = {"machine": ended, "run_round": ended}
    async with told.watching():
        await told.until(lambda: told.link.is_away)
        for _ in range(3):
            await told.call("run_round")
    again = f"trainer_failed: {ENDED_AGAIN.format(2, ended)}"
    assert told.events == [f"trainer_failed: {ended}", again]


async def test_a_failed_round_may_be_followed_by_a_silence(told: Told) -> None:
    """The silence is what is shown; it is one trouble until all is over."""
    told.trainer.fails["run_round"] = RuntimeError("out of memory")
    async with told.watching():
        await told.call("run_round")
        told.trainer.answers.clear()
        await told.until(lambda: told.link.trouble.startswith("no answer"))
        told.trainer.answers.set()
        await told.until(lambda: told.link.trouble == "RuntimeError: out of memory")
        told.trainer.fails = {}
        await told.call("run_round")
    assert told.events == ["trainer_failed: RuntimeError: out of memory", BACK]
