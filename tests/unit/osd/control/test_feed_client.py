"""The controller's own feed: what it tells, and what it hears."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osd.config.schema import TrainerConfig
from osd.control.drift import DriftDetector
from osd.control.feed_client import FeedClient
from osd.errors import ReplayBufferError
from osd.exchange.registry import FeedRecord
from osd.observe.history import History
from osd.records import Event
from tests.unit.osd.control.test_controller import MemoryRegistry
from tests.unit.osd.control.test_drift import FRUITLESS, NOW, end, window


class SlowRegistry(MemoryRegistry):
    """Redis, which while `is_slow` takes what is published and does not answer in time."""

    is_slow = False

    def publish(self, *records: FeedRecord) -> None:
        super().publish(*records)
        if self.is_slow:
            raise ReplayBufferError("Redis at redis://nowhere cannot be used: timeout")


class Fed:
    """A feed with what hears it."""

    def __init__(self, *, since: float = 0.0) -> None:
        self.registry, self.history = SlowRegistry(), History()
        self.detector = DriftDetector(TrainerConfig(patience_rounds=3), "t", since=since)
        self.client = FeedClient(self.registry, self.history, self.detector)  # type: ignore[arg-type]

    def texts(self) -> list[str]:
        return [event.text for event in self.history.events()]


@pytest.fixture
def fed() -> Fed:
    return Fed()


async def test_what_redis_took_without_an_answer_in_time_is_heard_once(fed: Fed) -> None:
    first, second = (Event(at=NOW + i, kind="paused", text=str(i)) for i in range(2))
    fed.registry.is_slow = True
    await fed.client.tell(first)
    assert fed.texts() == ["0"], "at once"
    fed.registry.is_slow = False
    await fed.client.tell(second)
    await fed.client.catch_up()
    assert fed.texts() == ["0", "1"]
    await fed.client.tell(first)
    await fed.client.catch_up()
    assert fed.texts() == ["0", "0", "1"], "told again, it is heard again"


async def test_what_redis_did_not_take_is_heard_all_the_same(fed: Fed) -> None:
    fed.registry.is_away = True
    for i in range(200):
        await fed.client.tell(Event(at=NOW + i, kind="paused", text=str(i)))
    fed.registry.is_away = False
    await fed.client.catch_up()
    assert fed.registry.feed == [] and fed.texts()[-1] == "199"


async def test_where_the_clock_was_set_back_before_the_first_record_rounds_count() -> None:
    """The target's first release is of an hour later; what the feed had before is another's."""
    fed = Fed(since=NOW + 3600)
    for _ in range(40):
        fed.registry.publish(window(0.8))
    await fed.client.catch_up()
    for _ in range(3):
        end(fed.detector, replace(FRUITLESS))
    assert fed.detector.is_resting
    assert "α" not in fed.detector.decide(NOW).reason, "the windows were of before"
