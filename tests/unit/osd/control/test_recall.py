"""An earlier draft serves again when the traffic it was best at returns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest

from osd.config.schema import GateConfig
from osd.control import policy
from osd.control.drift import FadingAlpha
from osd.control.policy import earlier_to_recall
from osd.control.recall import LookTimes, Recall, choose_earlier
from osd.errors import AwayError, ReleaseError
from osd.records import Canary, DraftRelease, EarlierReport
from tests.support.clocks import HandClock
from tests.unit.osd.control.test_controller import TARGET, World, live_window, no_gain, world

__all__ = ["world"]


def report(version: int, alpha: float, base: float = 0.72, low: float = 0.01) -> EarlierReport:
    return EarlierReport(
        version=version, num_traces=16, alpha_base=base, alpha=alpha, diff_low=low, since=1234.5
    )


def release(version: int, parent: int = 0) -> DraftRelease:
    return DraftRelease(
        version=version, parent=parent, path="/d", sha256="a", target_id="t", created_at=1.0
    )


def alpha_of(value: float, tested: float = 2000) -> FadingAlpha:
    variance = value * (1 - value) / tested
    return FadingAlpha(4000, tested=tested, weight=1, total=value, variance=variance)


# Which


def test_the_best_of_those_that_are_surely_better_serves_again() -> None:
    found = [report(1, 0.79), report(2, 0.85, low=-0.01), report(3, 0.80), report(4, 0.73)]
    best = earlier_to_recall(found)
    assert best is not None and best.version == 3, "v2 may be chance"
    assert earlier_to_recall([report(4, 0.73)]) is None, "a trifle"
    assert earlier_to_recall([report(1, 0.79, low=0.0)]) is None
    assert earlier_to_recall([]) is None
    assert earlier_to_recall([report(1, math.nan), report(2, 0.9, low=math.nan)]) is None


def test_the_first_the_last_of_another_line_and_the_one_that_served_most_are_compared() -> None:
    # v1 ─ v2 ─ v3 ─ v4 ─ v5, then v3 again ─ v6
    releases = [
        release(v, parent) for v, parent in ((6, 3), (5, 4), (4, 3), (3, 2), (2, 1), (1, 0))
    ]
    tested = {2: 5, 3: 900, 4: 0, 5: 70, 6: 8000}
    chosen = choose_earlier(releases, releases[0], lambda version: tested[version])
    assert [one.version for one in chosen] == [1, 5, 3], "v5 is the last of the line that was left"
    chosen = choose_earlier(releases, releases[1], lambda version: tested[version])
    assert [one.version for one in chosen] == [1, 6, 3], "v5 serves again"
    chosen = choose_earlier(releases, releases[-1], lambda _: 0)
    assert [one.version for one in chosen] == [2, 5, 6], "the first one serves"
    line = releases[2:]
    chosen = choose_earlier(line, line[0], lambda version: tested[version])
    assert [one.version for one in chosen] == [1, 3], "there is no other line"
    assert choose_earlier([release(1)], release(1), lambda _: 0) == []


# When


@dataclass
class Traffic:
    num_captured: int
    recent: FadingAlpha = field(default_factory=lambda: alpha_of(0.6))
    num_since_fall: int | None = None


def looks(times: LookTimes, *, is_resting: bool, most: int = 400) -> list[int]:
    found = []
    for num in range(1, most):
        if times.is_due(Traffic(num), is_resting=is_resting):
            found.append(num)
            times.note(Traffic(num), is_resting=is_resting)
    return found


def test_at_rest_a_look_waits_for_enough_requests_and_longer_each_time_nothing_moved() -> None:
    found = looks(LookTimes(16), is_resting=True)
    assert found == [16, 48, 112, 240, 368], "twice as many each time, eight times at most"


def test_while_rounds_go_on_looks_stay_as_frequent() -> None:
    """Where traffic returns α may be what it was on the one that was learnt last."""
    assert looks(LookTimes(16), is_resting=False, most=70) == [16, 32, 48, 64]


@pytest.mark.parametrize("moved_to", [0.5, 0.7])
def test_where_alpha_moved_to_either_side_a_look_at_rest_waits_no_longer(moved_to: float) -> None:
    times = LookTimes(16)
    assert looks(times, is_resting=True, most=113) == [16, 48, 112]

    def is_due(num: int, recent: FadingAlpha) -> bool:
        return times.is_due(Traffic(num, recent), is_resting=True)

    assert not is_due(127, alpha_of(moved_to)), "the newest 16 are not all new"
    assert not is_due(128, alpha_of(0.605)), "chance"
    assert not is_due(128, alpha_of(moved_to, tested=9)), "hardly known"
    assert is_due(128, alpha_of(moved_to))
    times.note(Traffic(128, alpha_of(moved_to)), is_resting=True)
    assert not is_due(143, alpha_of(moved_to))
    assert is_due(144, alpha_of(moved_to)), "the traffic may still be changing"


@pytest.mark.parametrize("is_resting", [False, True])
def test_where_alpha_has_just_fallen_half_as_many_requests_are_enough(is_resting: bool) -> None:
    times = LookTimes(16)

    def is_due(num: int, num_since_fall: int | None = 0) -> bool:
        traffic = Traffic(num, num_since_fall=num_since_fall)
        return times.is_due(traffic, is_resting=is_resting)

    assert not is_due(7) and is_due(8) and not is_due(8, None)
    times.note(Traffic(20), is_resting=is_resting)
    assert not is_due(27) and is_due(28)


def test_looks_of_before_a_rest_make_none_of_it_wait() -> None:
    times = LookTimes(16)
    assert looks(times, is_resting=False, most=97)[-1] == 96
    assert [num for num in looks(times, is_resting=True, most=300) if num > 96] == [112, 144, 208]


# In the service


async def with_three(world: World) -> None:
    """v2 has served for long, v3 serves."""
    await world.publish(2)
    world.serve(2, 0.7)
    await world.publish(3)
    world.serve(3, 0.7, num=4)
    await world.a_few_looks()


async def rest(world: World) -> None:
    """A round brings no gain. For a trainer that has patience for one."""
    world.trainer.rounds.append(no_gain)
    await world.until(lambda: "rests" in world.kinds())


async def one_round(world: World) -> None:
    """One round begins and ends, whatever comes of it."""
    num = len(world.trainer.calls)
    world.trainer.rounds.append(world.trainer.better)
    await world.until(lambda: len(world.trainer.calls) > num and not world.trainer.rounds)
    await world.a_few_looks()


async def test_an_earlier_draft_serves_again_and_the_next_round_starts_from_it(
    world: World,
) -> None:
    async with world.running():
        await with_three(world)
        changed_at = world.controller._loops.releases.changed_at
        world.clock.move(5)
        world.trainer.earlier = [report(1, 0.70), report(2, 0.79)]
        await one_round(world)
        assert world.controller._loops.releases.changed_at > changed_at
    assert world.trainer.compared[-1] == "v3 beside [1, 2] on 16"
    text = "v2 serves again: on the newest 16 requests its α is 0.79, that of v3 0.72"
    assert f"recalled: {text}" in world.events()
    assert world.trainer.calls[-1] == "round from v2"
    assert world.trainer.lines[-1] > world.trainer.lines[-2], "the weights belong to another line"
    assert world.wanted() == 4 and world.releases.get(4).parent == 2
    assert world.trainer.since == [0.0, 0.0, 1234.5], "candidates are judged on what came since"
    assert not world.releases.bad(), "nothing is wrong with v3: its traffic may return, too"
    assert not world.history.total("osd_rollback_total")


@pytest.mark.parametrize(
    ("alpha", "num_served", "num_new", "is_looked"),
    [
        *((0.3, 8, 8, True), (0.3, 7, 8, False), (0.3, 8, 7, False)),
        *((0.7, 15, 8, False), (0.7, 16, 8, True), (0.7, 16, 7, False)),
    ],
)
async def test_an_earlier_draft_serves_again_before_a_round_is_due(
    world: World, alpha: float, num_served: int, num_new: int, is_looked: bool
) -> None:
    """As soon as there are requests enough to compare it on: half as many, where α falls."""
    async with world.running():
        await with_three(world)
        num_rounds = len(world.trainer.calls)
        world.trainer.num_new = 8  # of the 32 that a round waits for
        world.trainer.rounds.append(world.trainer.better)
        await world.a_few_looks()
        num_before = len(world.trainer.compared)
        assert world.trainer.compared[-1] == "v3 beside [1, 2] on 16"
        world.trainer.num_new, world.trainer.earlier = num_new, [report(2, 0.79)]
        await world.a_few_looks()
        assert len(world.trainer.compared) == num_before, "nothing was served since"
        window = live_window(3, alpha, world.clock.now, finished=num_served)
        world.registry.publish(window)
        await world.a_few_looks()
        assert len(world.trainer.compared) == num_before + is_looked
        assert world.wanted() == (2 if is_looked else 3)
        assert len(world.trainer.calls) == num_rounds
        assert (await world.controller.status()).phase == "waiting"


async def test_no_look_disturbs_what_is_measured_of_the_last_round(world: World) -> None:
    """For which the trainer has to be idle for a moment."""
    async with world.running():
        await with_three(world)
        loops, num_before = world.controller._loops, len(world.trainer.compared)
        loops.payback.is_measuring = lambda now: True  # type: ignore[method-assign]
        world.trainer.num_new = 8
        world.trainer.rounds.append(world.trainer.better)
        world.serve(3, 0.7, num=4)
        await world.a_few_looks()
        assert len(world.trainer.compared) == num_before
        loops.payback.is_measuring = lambda now: False  # type: ignore[method-assign]
        await world.until(lambda: len(world.trainer.compared) > num_before)


async def test_an_earlier_draft_serves_again_while_training_rests(world: World) -> None:
    world.configure("trainer", patience_rounds=1)
    async with world.running():
        await with_three(world)
        await rest(world)
        num_rounds = len(world.trainer.calls)
        world.trainer.earlier = [report(1, 0.79)]
        world.trainer.rounds.append(world.trainer.better)  # traces wait
        world.serve(3, 0.7, num=4)
        await world.until(lambda: world.wanted() == 1)
        await world.a_few_looks()
        assert len(world.trainer.calls) == num_rounds, "it rests on: v1 had learnt to its end"
        assert (await world.controller.status()).phase == "waiting"


@pytest.mark.parametrize("is_better", [False, True])
async def test_between_looks_the_service_still_says_why_training_rests(
    world: World, is_better: bool
) -> None:
    world.configure("trainer", patience_rounds=1)
    async with world.running():
        await with_three(world)
        await rest(world)
        num_before = len(world.trainer.compared)
        world.trainer.earlier = [report(1, 0.79)] if is_better else []
        world.trainer.rounds.append(world.trainer.better)  # traces wait
        await world.a_few_looks()
        details = list[str]()
        world.clock.at_sleep = lambda: details.append(world.controller._loops.phase_detail)
        world.serve(3, 0.7, num=4)
        await world.until(lambda: len(world.trainer.compared) > num_before)
        await world.a_few_looks()
    assert "" not in details and details[-1].startswith("at rest: ")


@pytest.mark.parametrize(("is_resting", "pause_s"), [(False, 57), (True, 297)])
def test_looks_take_a_twentieth_of_the_time_and_a_hundredth_of_a_rest(
    is_resting: bool, pause_s: float
) -> None:
    clock, none = HandClock(), cast(Any, None)
    recall = Recall(GateConfig(), none, cast(Any, Traffic(1000)), lambda version: 1, none, clock)
    recall._ended_at, recall._took_s = clock.monotonic(), 3.0
    clock.move(pause_s - 1)
    assert not recall.is_due(100, is_resting=is_resting)
    clock.move(1)
    assert recall.is_due(100, is_resting=is_resting)


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_where_requests_come_fast_looks_take_a_hundredth_of_a_rest(
    world: World, is_waiting: bool
) -> None:
    """So that training that rests, or waits as the last rounds brought too little, takes next to
    nothing from the engines, however much comes."""

    async def takes_long(*_: object) -> list[EarlierReport]:
        began_at.append(world.clock.now)
        world.clock.move(3)
        return []

    world.configure("trainer", patience_rounds=1)
    async with world.running():
        await with_three(world)
        if is_waiting:
            payback = world.controller._loops.payback
            payback.is_waiting = lambda now: True  # type: ignore[method-assign]
            payback.decide = lambda now: policy.Decision(False, "")  # type: ignore[method-assign]
        else:
            await rest(world)
        began_at = list[float]()
        world.trainer.compare_earlier = takes_long  # type: ignore[method-assign]
        world.trainer.rounds.append(world.trainer.better)  # traces wait
        for _ in range(104):
            world.serve(3, 0.7, num=40)
            world.clock.move(8)
            await world.a_few_looks()
    waits = [later - earlier for earlier, later in pairwise(began_at)]
    assert len(waits) == 2 and all(300 <= wait <= 308 for wait in waits)


async def test_a_trainer_that_was_away_has_not_been_busy(world: World) -> None:
    asked = list[float]()

    async def is_cut_off(*_: object) -> list[EarlierReport]:
        asked.append(world.clock.now)
        world.clock.move(600)
        raise AwayError("cut off")

    async with world.running():
        await with_three(world)
        world.trainer.compare_earlier = is_cut_off  # type: ignore[method-assign]
        await one_round(world)
        world.serve(4, 0.7, num=80)
        await world.a_few_looks()
        await one_round(world)
    assert len(asked) == 2


async def test_a_look_that_the_disk_ends_is_over(world: World) -> None:
    phases = set[str]()

    def full(*_: object) -> DraftRelease:
        raise ReleaseError("no space left on device")

    def note_phase() -> None:
        if (task := asyncio.current_task()) and task.get_name() == "train":
            phases.add(world.controller._loops.phase)

    async with world.running():
        await with_three(world)
        world.releases.recall = full  # type: ignore[method-assign]
        world.clock.at_sleep = note_phase
        world.trainer.earlier = [report(2, 0.79)]
        await one_round(world)
        await world.until(lambda: world.wanted() == 4)
    assert phases == {"waiting"}, "whatever pauses the loop"


async def test_a_disk_that_cannot_be_read_costs_no_round_and_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """What a release store cannot say before a round it need not say after it, when a candidate
    would be lost."""

    def damaged(target_id: str) -> list[DraftRelease]:
        raise ReleaseError("state.json: Input/output error")

    caplog.set_level("INFO")
    async with world.running():
        await world.publish(2)
        intact, calls = world.releases.recallable, list(world.trainer.calls)
        world.releases.recallable = damaged  # type: ignore[method-assign]
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: "Input/output error" in caplog.text)
        await world.a_few_looks()
        assert world.trainer.calls == calls
        assert "works again" not in caplog.text, "others read the disk without it"
        world.releases.recallable = intact  # type: ignore[method-assign]
        await world.until(lambda: world.kinds()[-1] == "published")
        await world.until(lambda: "works again" in caplog.text)
    assert caplog.text.count("trying again") == 1


@pytest.mark.parametrize("earlier", [[], [report(2, 0.73)]])
async def test_the_serving_draft_stays_where_no_earlier_one_is_clearly_better(
    world: World, earlier: list[EarlierReport]
) -> None:
    async with world.running():
        await with_three(world)
        world.trainer.earlier = earlier
        num_before = len(world.trainer.compared)
        await one_round(world)
    assert len(world.trainer.compared) == num_before + 1 and "recalled" not in world.kinds()
    assert world.trainer.calls[-1] == "round from v3"


async def test_nothing_is_compared_before_enough_requests_have_come(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await one_round(world)
    assert world.trainer.compared == []


async def test_a_pinned_draft_stays(world: World) -> None:
    async with world.running():
        await with_three(world)
        await world.controller.pin(3)
        num_before = len(world.trainer.compared)
        world.trainer.earlier = [report(2, 0.79)]
        await one_round(world)
    assert len(world.trainer.compared) == num_before and world.wanted() == 3


async def test_a_draft_on_trial_and_one_that_was_changed_meanwhile_stay(world: World) -> None:
    async with world.running():
        await with_three(world)
        manager, third = world.controller._loops.releases, world.releases.get(3)
        manager.canary = Canary(replica="r1", release=third, before=world.releases.get(2))
        assert not await manager.recall(third, report(2, 0.79))
        manager.canary = None
        await world.controller.promote(1)
        assert not await manager.recall(third, report(2, 0.79))
        assert world.wanted() == 1
        await world.controller.pause()
        assert not await manager.recall(world.releases.get(1), report(2, 0.79))


async def pin_for_a_while(world: World) -> None:
    await world.controller.pin(2)
    await world.controller.unpin()


@pytest.mark.parametrize(
    "choose",
    [
        lambda world: world.controller.rollback(),
        lambda world: world.controller.promote(2),
        pin_for_a_while,
    ],
)
async def test_after_a_choice_by_hand_no_other_draft_of_before_comes_back_by_itself(
    world: World, choose: Callable[[World], Awaitable[object]]
) -> None:
    world.configure("releases", keep=8)
    async with world.running():
        await with_three(world)
        await choose(world)
        assert world.wanted() == 2
        num_before = len(world.trainer.compared)
        for version in (4, 5):
            world.serve(2, 0.7, num=4)
            await world.a_few_looks()
            await world.publish(version)
    compared = world.trainer.compared[num_before:]
    assert compared == ["v4 beside [2] on 16"]
    assert [one.version for one in world.releases.recallable(TARGET)] == [2, 4, 5]


async def test_a_bad_draft_is_not_compared(world: World) -> None:
    async with world.running():
        await with_three(world)
        world.releases.mark_bad(2, "by a test")
        await one_round(world)
    assert world.trainer.compared[-1] == "v3 beside [1] on 16"


async def test_what_is_compared_keeps_its_place_on_disk(world: World) -> None:
    async with world.running():  # releases.keep is 2
        await world.publish(2)
        world.serve(2, 0.7)
        await world.a_few_looks()
        for version in (3, 4, 5, 6):
            await world.publish(version)
    kept = [one.version for one in world.releases.list()]
    assert kept == [1, 2, 5, 6], "the first, the one that served, and the newest two"


async def test_it_can_be_switched_off(world: World) -> None:
    world.configure("gate", recall_traces=0)
    async with world.running():
        await with_three(world)
        world.trainer.earlier = [report(2, 0.79)]
        await one_round(world)
    assert world.trainer.compared == [] and world.trainer.calls[-1] == "round from v3"


async def test_a_comparison_that_fails_does_not_end_the_rounds(world: World) -> None:
    failed = []

    async def fails(*_: object) -> list[EarlierReport]:
        failed.append(1)
        raise ReleaseError("v2 cannot be read")

    async with world.running():
        await with_three(world)
        world.trainer.compare_earlier = fails  # type: ignore[method-assign]
        await one_round(world)
        await one_round(world)
    assert len(failed) == 1, "it waits for more requests, as after any look"
    assert world.trainer.calls[-2:] == ["round from v3", "round from v4"]
    assert "trainer_failed: v2 cannot be read" in world.events()
