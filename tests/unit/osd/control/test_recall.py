"""An earlier draft serves again when the traffic it was best at returns."""

from __future__ import annotations

import pytest

from osd.config.schema import GateConfig
from osd.control.drift import FadingAlpha
from osd.control.policy import earlier_to_recall
from osd.control.recall import LookTimes, choose_earlier
from osd.errors import ReleaseError
from osd.records import DraftRelease, EarlierReport
from tests.unit.osd.control.test_controller import TARGET, World, world

__all__ = ["world"]
GATE = GateConfig()


def report(version: int, alpha: float, base: float = 0.72, low: float = 0.01) -> EarlierReport:
    return EarlierReport(version=version, num_traces=16, alpha_base=base, alpha=alpha, diff_low=low)


def release(version: int) -> DraftRelease:
    return DraftRelease(
        version=version, parent=0, path="/d", sha256="a", target_id="t", created_at=1.0
    )


def alpha_of(value: float, tested: float = 2000) -> FadingAlpha:
    return FadingAlpha(4000, tested=tested, accepted=value * tested)


# Which


def test_the_best_of_those_that_are_surely_better_serves_again() -> None:
    found = [report(1, 0.79), report(2, 0.85, low=-0.01), report(3, 0.80), report(4, 0.73)]
    best = earlier_to_recall(found, GATE)
    assert best is not None and best.version == 3, "v2 may be chance"
    assert earlier_to_recall([report(4, 0.73)], GATE) is None, "a trifle"
    assert earlier_to_recall([report(1, 0.79, low=0.0)], GATE) is None
    assert earlier_to_recall([], GATE) is None
    strict = GATE.model_copy(update={"min_gain": 0.02})
    assert earlier_to_recall([report(1, 0.79, low=0.02)], strict) is None


def test_the_first_and_those_that_served_most_are_compared() -> None:
    tested = {2: 5, 3: 900, 4: 0, 5: 70, 6: 8000}
    chosen = choose_earlier([release(v) for v in (6, 5, 4, 3, 2, 1)], release(6), tested.get)  # type: ignore[arg-type]
    assert [one.version for one in chosen] == [1, 3, 5]
    chosen = choose_earlier([release(1), release(2)], release(1), lambda _: 0)
    assert [one.version for one in chosen] == [2], "the first one serves"
    assert choose_earlier([release(1)], release(1), lambda _: 0) == []


# When


def test_a_look_waits_for_enough_new_traces_and_longer_each_time_nothing_moved() -> None:
    times, recent = LookTimes(16), alpha_of(0.6)
    looks = []
    for num in range(1, 400):
        if times.is_due(num, recent):
            looks.append(num)
            times.note(recent)
    assert looks == [16, 48, 112, 240, 368], "twice as many each time, eight times at most"


@pytest.mark.parametrize("moved_to", [0.5, 0.7])
def test_where_alpha_moved_to_either_side_a_look_waits_no_longer(moved_to: float) -> None:
    times = LookTimes(16)
    for num in (16, 48, 112):
        assert times.is_due(num, alpha_of(0.6))
        times.note(alpha_of(0.6))
    assert not times.is_due(127, alpha_of(moved_to)), "the newest 16 are not all new"
    assert not times.is_due(128, alpha_of(0.605)), "chance"
    assert not times.is_due(128, alpha_of(moved_to, tested=9)), "hardly known"
    assert times.is_due(128, alpha_of(moved_to))
    times.note(alpha_of(moved_to))
    assert not times.is_due(143, alpha_of(moved_to))
    assert times.is_due(144, alpha_of(moved_to)), "the traffic may still be changing"


def test_traces_that_a_round_has_learnt_are_not_compared_on() -> None:
    times, recent = LookTimes(16), alpha_of(0.6)
    assert times.is_due(16, recent)
    times.note(recent)
    assert not times.is_due(30, recent)
    times.note_round()
    for num, is_due in ((15, False), (16, False), (17, False), (18, True)):
        assert times.is_due(num, recent) == is_due, "14 before the round and 18 after it"


# In the service


async def with_three(world: World) -> None:
    """v2 has served for long, v3 serves."""
    world.trainer.num_new = 40
    await world.publish(2)
    world.serve(2, 0.7)
    await world.publish(3)


async def test_an_earlier_draft_serves_again_and_the_next_round_starts_from_it(
    world: World,
) -> None:
    async with world.running():
        await with_three(world)
        world.trainer.earlier = [report(1, 0.70), report(2, 0.79)]
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: "recalled" in world.kinds())
        await world.until(lambda: world.wanted() == 4)
    assert world.trainer.compared[-1] == "v3 beside [1, 2] on 16"
    text = "v2 serves again: on the newest 16 requests its α is 0.79, that of v3 0.72"
    assert f"recalled: {text}" in world.events()
    assert world.trainer.calls[-1] == "round from v2"
    assert world.trainer.lines[-1] > world.trainer.lines[-2], "the weights belong to another line"
    assert world.releases.get(4).parent == 2
    assert not world.releases.bad(), "nothing is wrong with v3: its traffic may return, too"
    assert not world.history.total("osd_rollback_total")


@pytest.mark.parametrize("earlier", [[], [report(2, 0.73)]])
async def test_the_serving_draft_stays_where_no_earlier_one_is_clearly_better(
    world: World, earlier: list[EarlierReport]
) -> None:
    async with world.running():
        await with_three(world)
        world.trainer.earlier = earlier
        num_before = len(world.trainer.compared)
        await world.publish(4)
    assert len(world.trainer.compared) > num_before and "recalled" not in world.kinds()
    assert world.trainer.calls[-1] == "round from v3"


async def test_a_pinned_draft_stays(world: World) -> None:
    async with world.running():
        await with_three(world)
        await world.controller.pin(3)
        num_before = len(world.trainer.compared)
        world.trainer.earlier = [report(2, 0.79)]
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: world.trainer.calls.count("round from v3") == 1)
    assert len(world.trainer.compared) == num_before and world.wanted() == 3


async def test_a_draft_that_was_changed_by_hand_meanwhile_stays(world: World) -> None:
    async with world.running():
        await with_three(world)
        current = world.releases.get(3)
        await world.controller.promote(1)
        manager = world.controller._loops.releases
        assert not await manager.recall(current, report(2, 0.79))
        assert world.wanted() == 1
        await world.controller.pause()
        assert not await manager.recall(world.releases.get(1), report(2, 0.79))
        assert await manager.serving_and_others() == (None, [])


async def test_a_draft_that_was_left_by_hand_comes_back_by_hand_alone(world: World) -> None:
    world.configure("releases", keep=8)
    async with world.running():
        await with_three(world)
        await world.controller.rollback()
        assert world.wanted() == 2
        world.trainer.earlier = [report(1, 0.5)]
        num_before = len(world.trainer.compared)
        await world.publish(4)
        await world.publish(5)
        assert world.trainer.compared[num_before:], "v4 was not compared"
        assert all("3" not in each.split("beside")[1][:-6] for each in world.trainer.compared)
        await world.controller.promote(3)
        world.serve(2, 0.7)
        await world.publish(6)
    assert 3 in [one.version for one in world.releases.recallable(TARGET)]


async def test_a_bad_draft_is_not_compared(world: World) -> None:
    async with world.running():
        await with_three(world)
        world.releases.mark_bad(2, "by a test")
        num_before = len(world.trainer.compared)
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: len(world.trainer.compared) > num_before)
    assert world.trainer.compared[-1] == "v3 beside [1] on 16"


async def test_what_is_compared_keeps_its_place_on_disk(world: World) -> None:
    async with world.running():  # releases.keep is 2
        await with_three(world)
        for version in (4, 5, 6):
            await world.publish(version)
    kept = [one.version for one in world.releases.list()]
    assert kept == [1, 2, 5, 6], "the first, the one that served, and the newest two"


async def test_it_can_be_switched_off(world: World) -> None:
    world.configure("gate", recall_traces=0)
    async with world.running():
        await with_three(world)
        world.trainer.earlier = [report(2, 0.79)]
        await world.publish(4)
    assert world.trainer.compared == [] and world.trainer.calls[-1] == "round from v3"


async def test_a_comparison_that_fails_does_not_end_the_rounds(world: World) -> None:
    async def fails(*_: object) -> list[EarlierReport]:
        raise ReleaseError("v2 cannot be read")

    async with world.running():
        await with_three(world)
        world.trainer.compare_earlier = fails  # type: ignore[method-assign]
        await world.publish(4)
    assert world.trainer.calls[-1] == "round from v3"
    assert "trainer_failed: v2 cannot be read" in world.events()
