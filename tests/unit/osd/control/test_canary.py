"""A new draft serves on one of several replicas first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osd.records import DraftRelease, ReplicaStatus
from tests.unit.osd.control.test_controller import World, live_window, replica, world

__all__ = ["world"]

NAMES = ("one", "other", "third")


class Fleet:
    """Replicas that serve what they are told, and remember all they ever served."""

    def __init__(self, world: World, names: tuple[str, ...] = NAMES) -> None:
        self.world, self.names = world, names
        self.steps: tuple[str, ...] | None = None
        self.deaf: set[str] = set()
        """Those that take no other draft."""
        self.busy = "other"
        self.served: dict[str, list[int]] = {name: [] for name in names}

    def look(self) -> None:
        registry = self.world.registry
        living: list[ReplicaStatus] = []
        for name in self.names:
            wanted: DraftRelease | None = registry.wanted("default", name)
            known = self.served[name]
            if wanted is not None and not (known and name in self.deaf):
                known += [wanted.version] if wanted.version not in known[-1:] else []
            if known:
                status = replica(known[-1], name)
                num_running = 5 if name == self.busy else 1
                living.append(replace(status, num_running=num_running, steps=self.steps))
        registry.living = living

    async def looks(self) -> None:
        """As long as anything changes."""
        for _ in range(4):
            self.look()
            await self.world.a_few_looks()

    async def publish(self) -> None:
        num_before = self.world.kinds().count("published")
        self.world.trainer.rounds.append(self.world.trainer.better)
        await self.world.until(lambda: self.world.kinds().count("published") > num_before)
        await self.looks()

    def serve(self, name: str, version: int, alpha: float, ahead: float = 2.0) -> None:
        window = live_window(version, alpha, self.world.clock.now + ahead)
        self.world.registry.publish(replace(window, replica=name))

    @property
    def versions(self) -> dict[str, int]:
        return {status.replica: status.version for status in self.world.registry.living}


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)


async def test_a_new_draft_serves_on_the_busiest_replica_and_then_on_all(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        assert fleet.world.events()[-1].endswith(", first on other")
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}
        text = "rolled_out: v2 on all replicas: on other, it serves with α 0.70, as measured"
        assert fleet.world.events()[-1] == text
    assert fleet.served["other"] == [1, 2], "it kept the draft throughout"


async def test_a_harmful_draft_reaches_one_replica_only(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        fleet.world.trainer.alphas = {2: 0.3, 1: 0.5}
        fleet.serve("one", 1, alpha=0.5)
        fleet.serve("other", 2, alpha=0.3)
        await fleet.world.until(lambda: fleet.world.kinds()[-1] == "rolled_back")
        await fleet.looks()
        assert set(fleet.versions.values()) == {1}
        fleet.world.clock.move(3600)
        await fleet.looks()
    assert fleet.served == {"one": [1], "other": [1, 2, 1], "third": [1]}
    assert fleet.world.releases.is_bad(2)


async def test_without_traffic_it_is_rolled_out_when_nothing_was_found_against_it(
    fleet: Fleet,
) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        fleet.world.clock.move(59)
        await fleet.looks()
        assert fleet.versions["one"] == 1
        fleet.world.clock.move(1)
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}
    assert "nothing was found against it in 60 s" in fleet.world.events()[-1]


async def test_a_replica_that_does_not_take_it_is_no_proof(fleet: Fleet) -> None:
    fleet.deaf = {"other"}
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        assert set(fleet.versions.values()) == {1}
        fleet.world.clock.move(61)
        await fleet.looks()
        assert fleet.versions == {"one": 1, "other": 1, "third": 2}, "another one serves it first"
        fleet.world.clock.move(60)
        await fleet.looks()
        assert fleet.versions == {"one": 2, "other": 1, "third": 2}


async def test_where_the_first_replica_is_gone_another_is_the_first(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        fleet.names = ("one", "third")
        await fleet.looks()
        assert fleet.versions == {"one": 1, "third": 2}


async def test_other_replicas_do_not_lag_meanwhile(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        fleet.world.clock.move(30)
        await fleet.looks()
        shown = (await fleet.world.controller.status()).replicas
        assert {r.replica: (r.wanted, r.lagging) for r in shown} == {
            "one": (1, False),
            "other": (2, False),
            "third": (1, False),
        }
    assert "lagging" not in fleet.world.kinds()


@pytest.mark.parametrize("has_redis_lost_it", [False, True])
async def test_it_goes_on_after_the_controller_was_started_again(
    fleet: Fleet, has_redis_lost_it: bool
) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
    if has_redis_lost_it:
        fleet.world.registry.told_canary = None
    fleet.world.restart()
    async with fleet.world.running():
        await fleet.looks()
        assert fleet.versions["other"] == 2
        assert (fleet.versions["one"] == 1) is not has_redis_lost_it
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}


@pytest.mark.parametrize("act", ["promote", "pin", "rollback"])
async def test_a_change_by_hand_is_for_all_at_once(fleet: Fleet, act: str) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        controller = fleet.world.controller
        await (controller.rollback() if act == "rollback" else getattr(controller, act)(2))
        await fleet.looks()
        assert set(fleet.versions.values()) == {1 if act == "rollback" else 2}


async def test_a_newer_draft_takes_the_place_of_one_that_is_on_trial(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        await fleet.publish()
        assert fleet.versions == {"one": 1, "other": 3, "third": 1}
        fleet.serve("other", 3, alpha=0.7)
        await fleet.looks()
        assert set(fleet.versions.values()) == {3}
    assert fleet.served["one"] == [1, 3]


@pytest.mark.parametrize("why", ["one replica", "seconds", "steps"])
async def test_where_there_is_nothing_to_compare_all_serve_it_at_once(
    world: World, why: str
) -> None:
    if why == "seconds":
        world.configure("gate", canary_seconds=0)
    fleet = Fleet(world, NAMES[:1] if why == "one replica" else NAMES)
    fleet.steps = ("observe",) if why == "steps" else None
    async with world.running():
        await fleet.looks()
        await fleet.publish()
        assert set(fleet.versions.values()) == {2}
        assert world.registry.told_canary is None


# -- judged one by one ----------------------------------------------------------------------------


async def test_one_replica_that_runs_something_else_raises_the_alarm_by_its_name(
    fleet: Fleet,
) -> None:
    """Among many, it would hardly lower what they serve together."""
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        fleet.world.trainer.alphas = {2: 0.7, 1: 0.4}
        for _ in range(20):
            fleet.serve("one", 2, alpha=0.7)
        fleet.serve("third", 2, alpha=0.1)
        await fleet.world.until(lambda: "alarm" in fleet.world.kinds())
        alarm = (await fleet.world.controller.status()).alarm
        assert alarm.startswith("on third, v2 serves with α 0.10, 0.70 was measured")
        fleet.serve("one", 2, alpha=0.7, ahead=5)
        await fleet.looks()
        assert (await fleet.world.controller.status()).alarm == alarm, "others do not end it"
        fleet.serve("third", 2, alpha=0.7, ahead=5)
        await fleet.looks()
        assert (await fleet.world.controller.status()).alarm == ""
    assert fleet.world.wanted() == 2


async def test_while_there_is_an_alarm_nothing_is_rolled_out(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        await fleet.publish()
        fleet.world.trainer.alphas = {2: 0.7, 1: 0.4}
        fleet.serve("other", 2, alpha=0.1)
        await fleet.world.until(lambda: "alarm" in fleet.world.kinds())
        fleet.world.clock.move(100)
        await fleet.looks()
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
