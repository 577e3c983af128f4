"""Which replicas are told to be lost, and to be back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from osd.control.replica_watch import SECONDS_TO_FORGET, SECONDS_TO_RETURN, ReplicaWatch
from osd.errors import ReplayBufferError
from osd.records import Event, Member
from tests.support.clocks import HandClock
from tests.unit.osd.control.test_controller import MemoryRegistry, replica


class Scene:
    """Replicas with a heartbeat each second, in turns of a second."""

    def __init__(self, *names: str) -> None:
        self.clock, self.registry = HandClock(), MemoryRegistry()
        self.names = list(names)
        self.silent: set[str] = set()
        """Those whose last heartbeat is still there."""
        self.told: list[Event] = []
        self.members(**dict.fromkeys(names, "serving"))
        registry: Any = self.registry
        self.watch = ReplicaWatch(registry, self._tell, self.clock)

    async def _tell(self, *events: Event) -> None:
        self.told += events

    def members(self, **states: str) -> None:
        self.registry.started = [
            Member(replica=name, state=state, since=0.0) for name, state in states.items()
        ]

    async def run(self, seconds: int) -> list[str]:
        """What is told meanwhile."""
        before = len(self.told)
        for _ in range(seconds):
            self.clock.move(1)
            last = {status.replica: status for status in self.registry.living}
            self.registry.living = [
                last[name]
                if name in self.silent
                else replace(replica(4, name), at=self.clock.time())
                for name in self.names
            ]
            try:
                await self.watch.refresh()
            except ReplayBufferError:
                self.watch.note_outage()
        return [f"{event.kind}: {event.text}" for event in self.told[before:]]


async def test_one_that_ends_is_told_and_its_return_too() -> None:
    scene = Scene("one", "two")
    assert await scene.run(5) == []
    scene.names.remove("one")
    scene.members(one="starting", two="serving")
    assert await scene.run(2) == [], "a heartbeat may be late"
    assert await scene.run(30) == [
        "replica_lost: one, which served v4, is lost; it is started again (last heard of 3 s ago)"
    ]
    assert scene.told[0].version == 4
    scene.names.append("one")
    assert await scene.run(5) == ["replica_back: one is back after 30 s, with v4"]
    scene.names.remove("one")
    assert len(await scene.run(5)) == 1, "as often as it happens"


async def test_one_that_falls_silent_is_told_when_its_heartbeat_has_expired() -> None:
    """Of one that somebody else started nobody else knows that it has ended."""
    scene = Scene("one")
    scene.members()
    await scene.run(5)
    scene.silent.add("one")
    assert await scene.run(10) == []
    scene.names, scene.silent = [], set()
    assert await scene.run(5) == [
        "replica_lost: one, which served v4, is lost (last heard of 13 s ago)"
    ]


@pytest.mark.parametrize("then", [{}, {"one": "draining"}])
async def test_one_that_is_ended_on_purpose_is_not_lost(then: dict[str, str]) -> None:
    scene = Scene("one", "two")
    await scene.run(5)
    scene.members(one="draining", two="serving")
    assert await scene.run(1) == []
    scene.members(two="serving", **then)
    scene.names.remove("one")
    assert await scene.run(30) == []
    scene.members(one="serving", two="serving")
    scene.names.append("one")
    assert await scene.run(5) == [], "nor back, when one of its name is started later"
    scene.names.remove("one")
    scene.members(one="starting", two="serving")
    assert len(await scene.run(5)) == 1, "which may be lost in its turn"


async def test_one_that_is_ended_may_say_some_last_words() -> None:
    """Its heartbeat is removed when it is told to end, which takes it some seconds."""
    scene = Scene("one", "two")
    await scene.run(5)
    scene.members(one="draining", two="serving")
    await scene.run(5)
    scene.members(two="serving")
    scene.names = ["two"]
    await scene.run(1)
    scene.names = ["one", "two"]
    await scene.run(4)
    scene.names = ["two"]
    await scene.run(30)
    assert scene.told == []


async def test_what_an_earlier_service_left_is_not_lost() -> None:
    scene = Scene("one")
    scene.registry.living, scene.silent = [replica(4, "one")], {"one"}
    assert await scene.run(5) == []
    scene.names, scene.silent = [], set()
    assert await scene.run(30) == []
    scene.names = ["one"]
    assert await scene.run(5) == []


async def test_while_redis_was_away_nobody_is_lost() -> None:
    scene = Scene("one", "two")
    await scene.run(5)
    scene.registry.is_away = True
    assert await scene.run(60) == []
    scene.registry.is_away, scene.names = False, []
    assert await scene.run(int(SECONDS_TO_RETURN) - 2) == []
    scene.names = ["one"]
    assert await scene.run(1) == []
    (text,) = await scene.run(30)
    assert text.startswith("replica_lost: two, which served v4, is lost"), "it does not return"


async def test_one_that_never_returns_is_forgotten() -> None:
    """Names of engines that others start may never come again."""
    scene = Scene("one")
    await scene.run(5)
    scene.names = []
    assert len(await scene.run(5)) == 1
    scene.clock.move(SECONDS_TO_FORGET)
    await scene.run(1)
    assert not scene.watch._known
    scene.names = ["one"]
    assert await scene.run(5) == []
