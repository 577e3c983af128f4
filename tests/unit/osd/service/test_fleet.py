"""Replicas that come and go, with engines that are only said to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from osd.config.serving import ReplicasConfig
from osd.errors import ReplayBufferError
from osd.records import Event, Member, ReplicaStatus
from osd.service.fleet.fleet import FIRST_DELAY, SECONDS_OF_LAST_WORDS, SECONDS_TO_DRAIN, Fleet
from osd.service.fleet.scaling import Scaler
from tests.support.clocks import HandClock


class FakeRegistry:
    """Redis, as far as a fleet uses it."""

    def __init__(self) -> None:
        self.living: dict[str, ReplicaStatus] = {}
        self.told: list[Member] = []
        self.events: list[Event] = []
        self.is_away = False
        self.is_forgetful = True

    def replicas(self) -> list[ReplicaStatus]:
        if self.is_away:
            raise ReplayBufferError("Redis is away")
        return list(self.living.values())

    def set_members(self, members: list[Member]) -> None:
        self.told = members

    def forget(self, replica: str) -> None:
        if not self.is_forgetful:
            raise ReplayBufferError("Redis is away")
        self.living.pop(replica, None)

    def publish(self, *records: Any) -> None:
        self.events += records


class FakeEngines:
    """Starts names, and notes what it was asked."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.ended: list[str] = []
        self.expected: list[str] = []
        self.failed: dict[str, str] = {}
        self.pending: dict[str, str] = {}
        self.died: set[str] = set()
        """Those whose process ended since they were watched."""

    def start(self, name: str) -> str:
        self.running.append(name)
        return name

    def end(self, handle: str) -> None:
        self.running.remove(handle)
        self.ended.append(handle)

    def watch(self, handle: str) -> None:
        self.died.discard(handle)

    def has_ended(self, handle: str) -> bool:
        return handle in self.died

    def expect(self, handle: str) -> None:
        self.expected.append(handle)

    def failure(self, handle: str) -> str:
        return self.failed.get(handle, "")

    def why_pending(self, name: str) -> str:
        return self.pending.get(name, "")


class Scene:
    """A fleet whose replicas answer as soon as they are started, in turns of a second."""

    def __init__(self, **replicas: Any) -> None:
        self.clock, self.registry, self.engines = HandClock(), FakeRegistry(), FakeEngines()
        self.lives: dict[str, int] = {}
        """Processes that a replica has had."""
        self.dropped: list[str] = []
        self.load: dict[str, int] = {}
        self.waited: dict[str, float] = {}
        self.silent: set[str] = set()
        self.is_running = False
        self.is_blind = False
        """Whether every heartbeat falls between two requests."""
        config = ReplicasConfig(
            **{"requests_each": 10, "up_seconds": 5, "down_seconds": 20, **replicas}
        )
        registry: Any = self.registry
        self.fleet = Fleet(config, registry, self.engines, self, clock=self.clock)
        self.fleet.start()

    def drop(self, name: str) -> None:
        self.dropped.append(name)

    def run(self, seconds: int, **load: int) -> Scene:
        """Let time pass. `load`: requests that a replica has, by the last part of its name."""
        self.load |= {name.replace("_", "-"): num for name, num in load.items()}
        for _ in range(seconds):
            self.clock.move(1)
            for name in self.load:
                self.waited[name] = self.waited.get(name, 0.0) + self.load[name]
            self.registry.living = {
                name: self.heartbeat(name)
                for name in self.engines.running
                if name not in self.silent | self.engines.failed.keys()
            }
            self.fleet.look()
        return self

    def heartbeat(self, name: str) -> ReplicaStatus:
        return ReplicaStatus(
            at=self.clock.time(),
            replica=name,
            url=f"http://127.0.0.1/{name}",
            version=1,
            target_id="t",
            k=4,
            pid=self.lives.get(name, 1),
            started_at=0.0,
            engine="none",
            num_open=0 if self.is_blind else self.load.get(name, 0),
            open_seconds=self.waited.get(name, 0.0),
            num_running=int(self.is_running),
        )

    def states(self) -> dict[str, str]:
        return {member.replica: member.state for member in self.registry.told}

    def said(self) -> list[str]:
        return [event.text for event in self.registry.events]


def test_a_service_begins_with_the_least() -> None:
    scene = Scene(min=2, max=4)
    assert scene.engines.running == ["replica-0", "replica-1"]
    assert scene.states() == {"replica-0": "starting", "replica-1": "starting"}
    assert scene.run(1).states() == {"replica-0": "serving", "replica-1": "serving"}
    assert scene.run(100).engines.running == ["replica-0", "replica-1"]


def test_load_that_lasts_starts_another_and_its_end_drains_it() -> None:
    scene = Scene(min=1, max=2).run(3, replica_0=11)
    assert len(scene.engines.running) == 1, "not at once"
    scene.run(3)
    assert scene.states() == {"replica-0": "serving", "replica-1": "starting"}
    scene.run(10, replica_0=6, replica_1=5)
    assert scene.fleet.asked == {"replica-0", "replica-1"}
    scene.run(19, replica_0=3, replica_1=2)
    assert scene.dropped == []
    scene.run(3)
    assert scene.states() == {"replica-0": "serving", "replica-1": "draining"}
    assert (set(scene.dropped), scene.fleet.asked) == ({"replica-1"}, {"replica-0"})
    scene.dropped.clear()
    scene.run(50)
    assert len(scene.dropped) == 50, "the front door may have been told of it meanwhile"
    assert scene.engines.ended == [], "it still answers two"
    scene.run(2, replica_1=0)
    assert scene.engines.ended == [], "requests may have been on their way"
    scene.run(1)
    assert scene.engines.ended == ["replica-1"]
    assert list(scene.registry.living) == ["replica-0"]
    assert scene.said() == [
        "replica-1 is started: 11.0 requests in flight",
        "replica-1 is drained: 5.0 requests in flight",
        "replica-1 is drained, and ended",
    ]
    assert {event.kind for event in scene.registry.events} == {"scaled"}


def test_short_requests_count_for_the_time_they_take() -> None:
    scene = Scene(min=1, max=2)
    scene.is_blind = True
    assert len(scene.run(10, replica_0=11).engines.running) == 2


def test_what_is_drained_is_asked_again_when_load_comes_back() -> None:
    scene = Scene(min=1, max=2).run(10, replica_0=15).run(30, replica_0=2, replica_1=1)
    assert scene.states()["replica-1"] == "draining"
    scene.run(1, replica_0=15)
    assert scene.states() == {"replica-0": "serving", "replica-1": "starting"}, "at once"
    scene.run(1)
    assert scene.states() == {"replica-0": "serving", "replica-1": "serving"}
    assert scene.fleet.asked == {"replica-0", "replica-1"}
    assert scene.engines.ended == [] and len(scene.engines.running) == 2
    assert "replica-1 is asked again: 16.0 requests in flight" in scene.said()


def test_an_answer_that_never_ends_is_cut_after_an_hour() -> None:
    scene = Scene(min=1, max=2).run(10, replica_0=15).run(30, replica_0=2, replica_1=1)
    scene.clock.move(SECONDS_TO_DRAIN - 40)
    assert scene.run(1).engines.ended == []
    scene.clock.move(60)
    assert scene.run(1).engines.ended == ["replica-1"]


def drained() -> Scene:
    """The second replica still answers one request."""
    scene = Scene(min=1, max=2).run(10, replica_0=15).run(30, replica_0=2, replica_1=1)
    assert scene.states() == {"replica-0": "serving", "replica-1": "draining"}
    return scene


def test_one_that_dies_while_it_is_drained_is_not_started_again() -> None:
    scene = drained()
    scene.silent.add("replica-1")
    scene.run(60)
    assert scene.engines.ended == [], "a silence may be that of Redis"
    scene.run(2)
    assert scene.engines.ended == ["replica-1"]


def test_a_heartbeat_that_is_missing_ends_nothing() -> None:
    scene = drained()
    scene.silent.add("replica-1")
    scene.run(30)
    scene.silent.clear()
    scene.run(40)
    assert scene.engines.ended == []


def test_one_that_says_nothing_of_its_clients_is_busy_while_its_engine_is() -> None:
    """A replica of an older release."""
    scene = drained()
    scene.is_blind, scene.is_running = True, True
    scene.run(20)
    assert scene.engines.ended == []
    scene.is_running = False
    scene.run(3)
    assert scene.engines.ended == ["replica-1"]


def test_the_one_that_serves_is_kept() -> None:
    scene = Scene(min=1, max=2).run(10, replica_0=15)
    scene.silent.add("replica-0")
    scene.run(30, replica_0=0, replica_1=1)
    assert scene.states() == {"replica-0": "draining", "replica-1": "serving"}
    assert scene.fleet.asked == {"replica-1"}


def test_a_clock_that_is_set_ends_nothing() -> None:
    scene = drained()
    scene.clock.set(7200)
    assert scene.run(2).engines.ended == []
    scene.clock.set(-14400)
    assert scene.run(2).engines.ended == []


def test_the_heartbeat_of_an_earlier_life_is_none() -> None:
    scene = drained()
    scene.registry.is_forgetful = False
    scene.run(3, replica_1=0)
    assert scene.engines.ended == ["replica-1"]
    old = scene.heartbeat("replica-1")
    scene.silent.add("replica-1")
    scene.run(8, replica_0=15)
    scene.registry.living["replica-1"] = old
    scene.fleet.look()
    assert scene.states()["replica-1"] == "starting"
    scene.silent.clear()
    scene.lives["replica-1"] = 2
    assert scene.run(1).states()["replica-1"] == "serving"


def test_one_whose_process_ends_is_missed_before_it_falls_silent() -> None:
    """Its last heartbeat lasts on for seconds."""
    scene = Scene(min=2, max=2).run(2)
    scene.engines.died.add("replica-0")
    assert scene.run(1).states() == {"replica-0": "starting", "replica-1": "serving"}
    assert scene.registry.living.keys() == {"replica-1"}, "nor is it shown any more"
    assert scene.engines.expected == ["replica-0"]
    assert scene.run(5).states()["replica-0"] == "starting", "this is said by nobody"
    scene.lives["replica-0"] = 2
    assert scene.run(1).states() == {"replica-0": "serving", "replica-1": "serving"}
    scene.engines.died.add("replica-0")
    assert scene.run(1).states()["replica-0"] == "starting", "the new one is watched, too"


def test_one_that_has_started_again_when_its_end_is_seen_serves() -> None:
    scene = Scene(min=2, max=2).run(2)
    scene.registry.is_away = True
    scene.engines.died.add("replica-0")
    with pytest.raises(ReplayBufferError):
        scene.run(1)
    scene.registry.is_away = False
    scene.lives["replica-0"] = 2
    assert scene.run(5).states() == {"replica-0": "serving", "replica-1": "serving"}
    assert scene.engines.expected == [] and not scene.engines.died


def test_one_to_which_ray_lost_the_connection_alone_serves_again() -> None:
    """Ray cannot tell that from an end. Its heartbeats go on, with the life they had."""
    scene = Scene(min=2, max=2).run(2)
    scene.engines.died.add("replica-0")
    assert scene.run(1).states()["replica-0"] == "starting"
    assert scene.run(int(SECONDS_OF_LAST_WORDS)).states()["replica-0"] == "serving"
    assert scene.run(20).states()["replica-0"] == "serving"
    scene.engines.died.add("replica-0")
    assert scene.run(1).states()["replica-0"] == "starting", "it is watched again"


def test_an_end_that_redis_does_not_hear_of_is_told_when_it_does() -> None:
    scene = Scene(min=1, max=1).run(2)
    scene.engines.died.add("replica-0")
    scene.registry.is_forgetful = False
    with pytest.raises(ReplayBufferError):
        scene.run(1)
    scene.registry.is_forgetful = True
    assert scene.run(1).states() == {"replica-0": "starting"}
    assert not scene.registry.living


def test_one_that_dies_is_shown_and_keeps_its_place() -> None:
    scene = Scene(min=2, max=2).run(5)
    scene.silent.add("replica-0")
    assert scene.run(5).states() == {"replica-0": "starting", "replica-1": "serving"}
    assert scene.engines.running == ["replica-0", "replica-1"], "Ray starts it again"
    assert scene.dropped == [], "the front door knows whether it lives"
    assert scene.engines.expected == ["replica-0"]
    assert [member.is_lost for member in scene.registry.told] == [True, False]
    assert scene.registry.events == [], "the control actor tells it, once"
    scene.silent.clear()
    assert [member.is_lost for member in scene.run(1).registry.told] == [False, False]
    assert scene.run(1).states()["replica-0"] == "serving"


def test_what_a_replica_waits_for_is_told() -> None:
    scene = Scene(min=2, max=2)
    scene.silent.add("replica-1")
    scene.engines.pending["replica-1"] = "no machine has 'gpu' left"
    begun = scene.clock.time()
    scene.run(9)
    assert [member.why for member in scene.registry.told] == ["", ""], "it may be just starting"
    scene.run(1)
    assert [member.why for member in scene.registry.told] == ["", "no machine has 'gpu' left"]
    assert scene.registry.told[1].since == begun
    scene.silent.clear()
    assert [member.why for member in scene.run(1).registry.told] == ["", ""]


def test_one_that_cannot_start_is_told_once_and_tried_again_ever_more_rarely() -> None:
    scene = Scene(min=1, max=2)
    scene.engines.failed["replica-1"] = "out of memory"
    starts = []
    for _ in range(100):
        before = len(scene.engines.ended)
        scene.run(1, replica_0=15)
        starts += [scene.clock.time()] if len(scene.engines.ended) > before else []
    assert scene.said().count("replica-1 did not start: out of memory") == len(starts)
    gaps = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    assert gaps[0] >= FIRST_DELAY and gaps[1] >= 2 * FIRST_DELAY
    assert "replica-0" in scene.engines.running
    scene.engines.failed.clear()
    scene.run(200)
    assert scene.states() == {"replica-0": "serving", "replica-1": "serving"}


def test_while_redis_is_away_nothing_changes() -> None:
    scene = Scene(min=1, max=2).run(10, replica_0=15)
    scene.registry.is_away = True
    for _ in range(100):
        with pytest.raises(ReplayBufferError):
            scene.run(1)
    assert scene.engines.ended == [] and scene.dropped == []


def test_what_a_replica_says_on_its_way_out_is_forgotten() -> None:
    scene = drained().run(3, replica_1=0)
    scene.registry.living["replica-1"] = replace(scene.heartbeat("replica-1"), at=0.0)
    scene.fleet.look()
    assert list(scene.registry.living) == ["replica-0"]


# -- the policy -----------------------------------------------------------------------------------

LIMITS = ReplicasConfig(min=1, max=5, requests_each=10, up_seconds=5, down_seconds=20)


@pytest.mark.parametrize(
    ("num", "load", "wanted"),
    [
        (1, [10] * 50, 1),
        (1, [11] * 6, 2),
        (1, [11] * 5, 1),
        (1, [11, 11, 11, 10, 11, 11, 11], 1),
        (1, [45, 45, 31, 45, 45, 45], 4),
        (1, [900] * 6, 5),
        (3, [20] * 21, 2),
        (3, [20] * 20, 3),
        (3, [0] * 10 + [21] + [0] * 10, 3),
        (4, [0] * 10 + [25] + [0] * 10, 3),
        (3, [0] * 21, 1),
        (2, [0] * 10 + [30] * 5, 2),
    ],
)
def test_what_lasts_is_followed(num: int, load: list[int], wanted: int) -> None:
    """One look a second."""
    clock = HandClock()
    scaler = Scaler(LIMITS, clock.monotonic)
    for num_requests in load:
        found = scaler.wanted(num, num_requests)
        clock.move(1)
    assert found == wanted


def test_a_fixed_number_stays() -> None:
    clock = HandClock()
    scaler = Scaler(replace_limits(min=2, max=2), clock.monotonic)
    for num_requests in (0, 500, 0, 500):
        for _ in range(100):
            assert scaler.wanted(2, num_requests) == 2
            clock.move(1)


def replace_limits(**values: int) -> ReplicasConfig:
    return LIMITS.model_copy(update=values)
