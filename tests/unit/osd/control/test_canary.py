"""A new draft serves on one of several replicas first."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from osd.errors import ReleaseError
from osd.records import DraftRelease, Member, ReplicaStatus
from tests.unit.osd.control.test_controller import TARGET, World, live_window, replica, world

__all__ = ["world"]

NAMES = ("one", "other", "third")


class Fleet:
    """Replicas that serve what they are told, and remember all they ever served."""

    def __init__(self, world: World, names: tuple[str, ...] = NAMES) -> None:
        self.world, self.names = world, names
        self.steps: tuple[str, ...] | None = None
        self.deaf: set[str] = set()
        """Those that take no other draft."""
        self.old: set[str] = set()
        """Those of a version that knew no trials."""
        self.busy = "other"
        self.changes: dict[str, dict[str, Any]] = {}
        """Name -> what its heartbeat says otherwise."""
        self.served: dict[str, list[int]] = {name: [] for name in names}

    def look(self) -> None:
        registry = self.world.registry
        living: list[ReplicaStatus] = []
        for name in self.names:
            asks_as = "" if name in self.old else name
            wanted: DraftRelease | None = registry.wanted("default", asks_as)
            known = self.served[name]
            if wanted is not None and not (known and name in self.deaf):
                known += [wanted.version] if wanted.version not in known[-1:] else []
            if known:
                status = replica(known[-1], name)
                num_running = 5 if name == self.busy else 1
                more = {"num_running": num_running, "steps": self.steps}
                more["may_try"] = name not in self.old
                living.append(replace(status, **more | self.changes.get(name, {})))
        registry.living = living

    async def looks(self) -> None:
        """As long as anything changes."""
        for _ in range(4):
            self.look()
            await self.world.a_few_looks()

    @asynccontextmanager
    async def on_trial(self) -> AsyncIterator[None]:
        """All serve v1, and v2 was just published."""
        async with self.world.running():
            await self.looks()
            await self.publish()
            yield

    async def after(self, seconds: float) -> None:
        self.world.clock.move(seconds)
        await self.looks()

    async def publish(self) -> None:
        num_before = self.world.kinds().count("published")
        self.world.trainer.rounds.append(self.world.trainer.better)
        await self.world.until(lambda: self.world.kinds().count("published") > num_before)
        await self.looks()

    def serve(
        self, name: str, version: int, alpha: float, ahead: float = 2.0, **sizes: int
    ) -> None:
        window = live_window(version, alpha, self.world.clock.now + ahead, **sizes)
        self.world.registry.publish(replace(window, replica=name))

    @property
    def versions(self) -> dict[str, int]:
        return {status.replica: status.version for status in self.world.registry.living}


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)


async def test_a_new_draft_serves_on_the_busiest_replica_and_then_on_all(fleet: Fleet) -> None:
    async with fleet.on_trial():
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        assert fleet.world.events()[-1].endswith(", first on other")
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}
        text = "rolled_out: v2 on all replicas: on other, it serves with α 0.70, as measured"
        assert fleet.world.events()[-1] == text
    assert fleet.served["other"] == [1, 2], "it kept the draft throughout"


async def test_a_harmful_draft_reaches_one_replica_only(fleet: Fleet) -> None:
    async with fleet.on_trial():
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


async def test_a_replica_that_knows_no_trials_gets_none(fleet: Fleet) -> None:
    """However busy it is, and also where the one that tries is gone."""
    fleet.old, fleet.busy = {"other"}, "other"
    async with fleet.on_trial():
        assert fleet.versions == {"one": 1, "other": 1, "third": 2}
        fleet.names = ("one", "other")
        await fleet.looks()
        await fleet.after(61)
        assert fleet.versions == {"one": 2, "other": 1}
        fleet.serve("one", 2, alpha=0.7)
        await fleet.looks()
    assert fleet.versions == {"one": 2, "other": 2}, "it follows when all do"


async def test_where_no_replica_knows_trials_all_follow_at_once(fleet: Fleet) -> None:
    fleet.old = set(NAMES)
    async with fleet.on_trial():
        assert set(fleet.versions.values()) == {2}
    assert "first on" not in fleet.world.events()[-1]


async def test_without_traffic_it_is_rolled_out_when_nothing_was_found_against_it(
    fleet: Fleet,
) -> None:
    async with fleet.on_trial():
        await fleet.after(59)
        assert fleet.versions["one"] == 1
        await fleet.after(1)
        assert set(fleet.versions.values()) == {2}
    assert "nothing was found against it in 60 s" in fleet.world.events()[-1]


async def test_a_replica_that_does_not_take_it_is_no_proof(fleet: Fleet) -> None:
    fleet.deaf = {"other"}
    async with fleet.on_trial():
        assert set(fleet.versions.values()) == {1}
        await fleet.after(61)
        assert fleet.versions == {"one": 2, "other": 1, "third": 1}, "another one serves it first"
        assert (
            fleet.world.events()[-1] == "canary_moved: v2 first on one now: other did not take it"
        )
        await fleet.after(61)
        assert fleet.versions == {"one": 2, "other": 1, "third": 2}


async def test_where_no_replica_takes_it_first_it_is_wanted_of_all(fleet: Fleet) -> None:
    fleet.deaf = set(NAMES)
    async with fleet.on_trial():
        for _ in NAMES:
            await fleet.after(61)
        assert fleet.world.wanted() == 2
    assert "no other replica is left to try it first" in fleet.world.events()[-1]


@pytest.mark.parametrize("how", ["gone", "switched off", "off", "target"])
async def test_one_that_cannot_take_it_is_not_waited_for(fleet: Fleet, how: str) -> None:
    async with fleet.world.running():
        await fleet.looks()
        fleet.deaf = {"other"}
        await fleet.publish()
        if how == "gone":
            fleet.names = ("one", "third")
        else:
            fleet.changes["other"] = {
                "switched off": {"steps": ("observe",)},
                "off": {"off": {"swap": "gone"}},
                "target": {"target_id": "another"},
            }[how]
        await fleet.looks()
        assert fleet.versions["one"] == 2 and fleet.versions["third"] == 1


@pytest.mark.parametrize("by", ["steps", "off", "target_id"])
def test_one_that_cannot_take_it_is_not_chosen(fleet: Fleet, by: str) -> None:
    watch = fleet.world.controller._loops._canary
    living = [replace(replica(1, name), num_running=i) for i, name in enumerate(NAMES)]
    assert watch.choose(living, TARGET) == "third"
    value: Any = {"steps": (), "off": {"swap": "gone"}, "target_id": "another"}[by]
    living[2] = replace(living[2], **{by: value})
    assert watch.choose(living, TARGET) == "other"


# -- it took the draft, and is lost ---------------------------------------------------------------


async def test_a_replica_that_is_away_for_a_moment_stays_the_first(fleet: Fleet) -> None:
    async with fleet.on_trial():
        fleet.names = ("one", "third")
        await fleet.after(30)
        fleet.names = NAMES
        await fleet.looks()
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}


async def test_a_draft_that_ends_its_engine_twice_is_taken_back(fleet: Fleet) -> None:
    """It is started again by its supervisor, and takes the draft again."""
    async with fleet.on_trial():
        for started_at in (2.0, 3.0):
            assert fleet.versions["one"] == 1
            fleet.changes["other"] = {"started_at": started_at}
            await fleet.looks()
        await fleet.looks()
        assert set(fleet.versions.values()) == {1} and fleet.world.releases.is_bad(2)
    assert fleet.served["one"] == fleet.served["third"] == [1]
    text = "other had to be started again after it took v2, as another time before"
    assert text in fleet.world.events()[-1]


async def test_one_that_the_disk_does_not_let_go_is_tried_again_and_never_rolled_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(version: int, reason: str) -> None:
        asked.append(version)
        raise ReleaseError("the disk is full")

    async with fleet.on_trial():
        with monkeypatch.context() as patch:
            patch.setattr(fleet.world.releases, "mark_bad", refuse)
            for started_at in (2.0, 3.0):
                fleet.changes["other"] = {"started_at": started_at}
                await fleet.looks()
            fleet.serve("other", 2, alpha=0.7)
            await fleet.looks()
            assert asked == [2], "not in each look"
            assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        await fleet.after(61)
        assert set(fleet.versions.values()) == {1} and fleet.world.releases.is_bad(2)


async def test_two_machines_lost_with_a_draft_take_it_back(fleet: Fleet) -> None:
    async with fleet.on_trial():
        fleet.names = ("one", "third")
        await fleet.looks()
        await fleet.after(61)
        assert fleet.versions == {"one": 2, "third": 1}, "one loss may be chance"
        fleet.names = ("third",)
        await fleet.looks()
        await fleet.after(61)
        assert fleet.versions == {"third": 1} and fleet.world.releases.is_bad(2)


async def test_one_absence_is_one_loss_also_where_no_other_replica_is_there(
    fleet: Fleet,
) -> None:
    """All are on a machine that is started anew, which takes longer than a trial."""
    async with fleet.on_trial():
        fleet.names = ()
        await fleet.looks()
        await fleet.after(61)
        await fleet.after(61)
        assert not fleet.world.releases.is_bad(2), "it was lost once"
        fleet.names, fleet.changes = NAMES, {name: {"started_at": 2.0} for name in NAMES}
        await fleet.looks()
        await fleet.looks()
        assert not fleet.world.releases.is_bad(2), "that it came back is no other loss"
        assert sorted(fleet.versions.values()) == [1, 1, 2]
        (first,) = (name for name in NAMES if fleet.versions[name] == 2)
        fleet.changes[first] = {"started_at": 3.0}
        await fleet.looks()
        assert fleet.world.releases.is_bad(2), "the next one counts"


async def test_a_replica_that_is_drained_hands_the_trial_on_and_its_end_is_no_loss(
    fleet: Fleet,
) -> None:
    async with fleet.on_trial():
        fleet.world.registry.started = [member("other", "draining"), member("one"), member("third")]
        await fleet.looks()
        first = {name for name in ("one", "third") if fleet.versions[name] == 2}
        assert len(first) == 1
        assert fleet.world.events()[-1].endswith(": other is drained")
        fleet.names = ("one", "third")
        fleet.world.registry.started = [member("one"), member("third")]
        await fleet.after(120)
        assert set(fleet.versions.values()) == {2}
    assert "rolled_back" not in fleet.world.kinds()


async def test_one_that_is_drained_is_not_chosen(fleet: Fleet) -> None:
    fleet.world.registry.started = [member("other", "draining"), member("one"), member("third")]
    async with fleet.on_trial():
        assert fleet.versions["other"] == 1 and 2 in fleet.versions.values()


def member(name: str, state: str = "serving") -> Member:
    return Member(replica=name, state=state, since=0.0)


async def test_other_replicas_do_not_lag_meanwhile(fleet: Fleet) -> None:
    async with fleet.on_trial():
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
    async with fleet.on_trial():
        pass
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
    async with fleet.on_trial():
        controller = fleet.world.controller
        await (controller.rollback() if act == "rollback" else getattr(controller, act)(2))
        await fleet.looks()
        assert set(fleet.versions.values()) == {1 if act == "rollback" else 2}


async def test_while_a_draft_is_on_trial_no_other_is_published(fleet: Fleet) -> None:
    """Otherwise rounds that follow close would keep every draft from being proved. Six of them end
    no training."""
    async with fleet.on_trial():
        meter = fleet.world.controller._loops.payback
        before = meter._progress.of_rounds(1)
        fleet.world.trainer.rounds += [fleet.world.trainer.better] * 6
        await fleet.world.until(lambda: fleet.world.kinds().count("refused") == 6)
        assert any("v2 is on trial on other; the next" in text for text in fleet.world.events())
        assert meter._progress.of_rounds(1) > 0.5 * before
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        await fleet.publish()
        assert fleet.versions == {"one": 2, "other": 3, "third": 2}


async def test_a_decision_about_a_draft_rolls_out_no_other(fleet: Fleet) -> None:
    async with fleet.on_trial():
        releases = fleet.world.controller._releases
        await releases.roll_out(1, "an older one served well")
        await releases.move_canary(1, "third", "so it was decided of an older one")
        assert releases.canary is not None and releases.canary.replica == "other"
        await fleet.looks()
        assert fleet.versions["one"] == 1


# -- what proves it -------------------------------------------------------------------------------


async def test_few_tokens_or_those_of_others_prove_nothing(fleet: Fleet) -> None:
    async with fleet.world.running():
        await fleet.looks()
        fleet.serve("other", 1, alpha=0.7)
        await fleet.publish()
        fleet.serve("one", 2, alpha=0.7)
        fleet.serve("other", 2, alpha=0.6, tested=24)
        await fleet.looks()
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}


async def test_what_serves_plainly_worse_is_not_rolled_out_before_it_is_judged(
    fleet: Fleet,
) -> None:
    """So few requests have ended that no replay is asked for."""
    async with fleet.on_trial():
        fleet.serve("other", 2, alpha=0.1, tested=5000, finished=3)
        await fleet.after(100)
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        fleet.world.trainer.alphas = {2: 0.1, 1: 0.1}
        fleet.serve("other", 2, alpha=0.1, tested=5000, ahead=5)
        await fleet.world.until(lambda: "stays" in fleet.world.kinds())
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}, "the traffic changed, for all drafts alike"


async def test_time_counts_from_when_it_serves(fleet: Fleet) -> None:
    fleet.deaf = {"other"}
    async with fleet.on_trial():
        await fleet.after(50)
        fleet.deaf = set()
        await fleet.looks()
        await fleet.after(59)
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        await fleet.after(1)
        assert set(fleet.versions.values()) == {2}


async def test_while_a_replay_runs_nothing_is_rolled_out(fleet: Fleet) -> None:
    async with fleet.on_trial():
        goes_on, own = asyncio.Event(), fleet.world.trainer.evaluate_releases

        async def slow(versions: list[DraftRelease], num: int) -> dict[int, float]:
            await goes_on.wait()
            return await own(versions, num)

        fleet.world.trainer.evaluate_releases = slow  # type: ignore[method-assign]
        fleet.world.trainer.alphas = {2: 0.3, 1: 0.5}
        fleet.serve("other", 2, alpha=0.3)
        await fleet.looks()
        await fleet.after(100)
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}
        goes_on.set()
        await fleet.world.until(lambda: fleet.world.kinds()[-1] == "rolled_back")


# -- what is remembered ---------------------------------------------------------------------------


async def test_a_trial_that_redis_lost_goes_on(fleet: Fleet) -> None:
    async with fleet.on_trial():
        fleet.world.registry.told_canary = None
        fleet.world.registry.wishes.clear()
        await fleet.looks()
        assert fleet.versions["one"] == 1 and fleet.world.registry.told_canary is not None


@pytest.mark.parametrize("what", ["gone", "bad", "pinned"])
async def test_after_a_restart_the_disk_decides_whether_it_goes_on(fleet: Fleet, what: str) -> None:
    async with fleet.on_trial():
        pass
    if what == "gone":
        shutil.rmtree(fleet.world.releases.get(1).path)
    elif what == "bad":
        fleet.world.releases.mark_bad(1, "damaged")
    else:
        fleet.world.releases.pin(2)
    fleet.world.restart()
    async with fleet.world.running():
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}
        assert fleet.world.registry.told_canary is None


async def test_no_trials_are_wanted_any_more(fleet: Fleet) -> None:
    async with fleet.on_trial():
        pass
    fleet.world.configure("gate", canary_seconds=0)
    async with fleet.world.running():
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}


async def test_what_the_others_serve_is_never_pruned(fleet: Fleet) -> None:
    fleet.world.configure("releases", keep=2)
    async with fleet.world.running():
        await fleet.looks()
        for version in (2, 3, 4):
            await fleet.publish()
            fleet.world.registry.living = []
            fleet.serve("other", version, alpha=0.7)
            assert fleet.world.releases.get(version - 1)
            await fleet.looks()
            await fleet.looks()


@pytest.mark.parametrize("act", ["rollback", "disappoint"])
async def test_a_rollback_within_a_trial_is_to_what_the_others_serve(
    fleet: Fleet, act: str
) -> None:
    async with fleet.on_trial():
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        await fleet.publish()
        if act == "rollback":
            await fleet.world.controller.rollback()
        else:
            fleet.world.trainer.alphas = {3: 0.3, 2: 0.5}
            fleet.serve("other", 3, alpha=0.3)
            await fleet.world.until(lambda: fleet.world.kinds()[-1] == "rolled_back")
        await fleet.looks()
        assert set(fleet.versions.values()) == {2}
    assert fleet.served["one"] == [1, 2]


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
    async with fleet.on_trial():
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        fleet.world.trainer.alphas = {2: 0.7, 1: 0.4}
        for name in ("one", "third"):
            for _ in range(10):
                fleet.serve(name, 2, alpha=0.7)
        fleet.serve("other", 2, alpha=0.1)
        fleet.serve("other", 2, alpha=0.1)
        await fleet.world.until(lambda: "alarm" in fleet.world.kinds())
        alarm = (await fleet.world.controller.status()).alarm
        assert alarm.startswith("on other, v2 serves with α 0.")
        fleet.serve("one", 2, alpha=0.7, ahead=5)
        await fleet.looks()
        assert (await fleet.world.controller.status()).alarm == alarm, "others do not end it"
        fleet.serve("other", 2, alpha=0.7, ahead=5)
        await fleet.looks()
        assert (await fleet.world.controller.status()).alarm == ""
    assert fleet.world.wanted() == 2


async def test_two_that_serve_too_badly_are_judged_in_turn(fleet: Fleet) -> None:
    """One with harder traffic hides no other."""
    async with fleet.on_trial():
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        fleet.world.trainer.alphas = {2: 0.7, 1: 0.4}
        for _ in range(20):
            fleet.serve("other", 2, alpha=0.7)
        for _ in range(6):
            for name in ("one", "third"):
                fleet.serve(name, 2, alpha=0.1, ahead=5)
            await fleet.after(20)
        told = [text for text in fleet.world.events() if text.startswith("alarm: ")]
        assert any("on one, " in text for text in told)
        assert any("on third, " in text for text in told)


async def test_the_alarm_of_a_replica_that_is_gone_ends(fleet: Fleet) -> None:
    async with fleet.on_trial():
        fleet.serve("other", 2, alpha=0.7)
        await fleet.looks()
        fleet.world.trainer.alphas = {2: 0.7, 1: 0.4}
        for _ in range(20):
            fleet.serve("one", 2, alpha=0.7)
        fleet.serve("third", 2, alpha=0.1)
        await fleet.world.until(lambda: "alarm" in fleet.world.kinds())
        fleet.names = ("one", "other")
        await fleet.after(30)
        assert (await fleet.world.controller.status()).alarm, "it may come back"
        await fleet.after(31)
        assert (await fleet.world.controller.status()).alarm == ""


async def test_an_engine_at_fault_is_not_the_first_for_long(fleet: Fleet) -> None:
    async with fleet.on_trial():
        fleet.world.trainer.alphas = {2: 0.7, 1: 0.4}
        fleet.serve("other", 2, alpha=0.1)
        await fleet.world.until(lambda: "alarm" in fleet.world.kinds())
        await fleet.after(30)
        assert fleet.versions == {"one": 1, "other": 2, "third": 1}, "nothing is rolled out"
        await fleet.after(61)
        assert fleet.versions["one"] == 2 and fleet.versions["third"] == 1
