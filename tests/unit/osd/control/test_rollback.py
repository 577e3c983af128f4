"""When a serving draft is judged, on what, and with which result.

Each test looks step by step, on fakes and a clock that stands still.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from osd.config.schema import GateConfig
from osd.control.rollback import RollbackMonitor
from osd.errors import ReleaseError
from osd.observe.history import History
from osd.records import DraftRelease, Event
from tests.support.clocks import HandClock
from tests.unit.osd.control.test_controller import TARGET, live_window, make_outcome

GATE = GateConfig(min_holdout_traces=8, max_holdout_traces=64)
V1 = DraftRelease(version=1, parent=0, path="/1", sha256="1", target_id=TARGET, created_at=0.0)
V2 = replace(V1, version=2, parent=1, outcome=make_outcome("/2", 1))
"""The gate measured α = 0.7."""
V3 = replace(V2, version=3, parent=2)
BAD, CHANGED_TRAFFIC, ENGINE = {2: 0.3, 1: 0.5}, {2: 0.3, 1: 0.25}, {2: 0.7, 1: 0.4}
"""Replays that tell why a draft disappoints."""


class Scene:
    """A monitor, its history, and the releases it may take back."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.history = History()
        self.alphas: dict[int, float] | None = {}
        self.replays: list[tuple[list[int], int]] = []
        self.events: list[Event] = []
        self.taken_back: list[tuple[int, str]] = []
        self.is_disk_full = False
        self.changed_at = -math.inf
        self.pin: int | None = None
        self.parent: DraftRelease | None = V1
        self.is_answering = asyncio.Event()
        self.is_answering.set()
        self.monitor = RollbackMonitor(GATE, self.history, self, self.replay, self.tell, self.clock)  # type: ignore[arg-type]

    async def replay(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float] | None:
        self.replays.append(([release.version for release in versions], num_traces))
        await self.is_answering.wait()
        return self.alphas

    async def tell(self, *records: Event) -> None:
        self.events += records

    async def pinned(self) -> int | None:
        return self.pin

    async def previous(self) -> DraftRelease | None:
        return self.parent

    async def take_back(self, current: DraftRelease, reason: str) -> bool:
        self.taken_back.append((current.version, reason))
        return not self.is_disk_full

    def serve(self, alpha: float, ago: float = 0.0, version: int = 2, **values: int) -> None:
        self.history.add(live_window(version, alpha, self.clock.now - ago, **values))

    async def look(self, current: DraftRelease = V2) -> int:
        """One look, and all that comes of it; how many replays there were by then."""
        await self.monitor.look(current)
        for _ in range(5):
            await asyncio.sleep(0)
        return len(self.replays)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
async def scene() -> Scene:
    return Scene()


# What is judged


async def test_a_draft_that_disappoints_is_replayed_beside_its_parent_and_taken_back(
    scene: Scene,
) -> None:
    scene.alphas = BAD
    scene.serve(0.3, finished=160)
    assert await scene.look() == 1
    assert scene.replays == [([2, 1], 20)], (
        "one request in eight is held out: these belong to what was served"
    )
    ((version, reason),) = scene.taken_back
    assert version == 2 and reason.startswith(
        "v2 serves with α 0.30, 0.70 was measured; on the newest requests v1"
    )
    assert scene.events == [], "who takes it back says so"


@pytest.mark.parametrize("alpha", [0.66, 0.9])
async def test_a_draft_that_serves_as_measured_is_left_alone(scene: Scene, alpha: float) -> None:
    scene.serve(alpha)
    assert await scene.look() == 0


async def test_what_nobody_measured_and_what_never_served_is_not_judged(scene: Scene) -> None:
    assert await scene.look() == 0
    scene.serve(0.1, version=1)
    assert await scene.look(V1) == 0


async def test_neither_a_pinned_draft_nor_one_without_a_parent_is_judged(scene: Scene) -> None:
    scene.serve(0.1)
    scene.pin = 2
    assert await scene.look() == 0
    scene.pin, scene.parent = None, None
    assert await scene.look() == 0
    scene.parent = V1
    assert await scene.look() == 1


@pytest.mark.parametrize(("before", "since", "is_judged"), [(0.1, 0.7, False), (0.7, 0.1, True)])
async def test_it_is_judged_on_what_it_served_since_it_was_told_to(
    scene: Scene, before: float, since: float, is_judged: bool
) -> None:
    """It served for long, another one took its place, and it came back a minute ago."""
    scene.changed_at = scene.clock.monotonic() - 60
    scene.serve(before, ago=70, tested=9000)
    scene.serve(since, ago=50, tested=900)
    assert (await scene.look() == 1) == is_judged


@pytest.mark.parametrize(("ago", "is_judged"), [(3599.4, True), (3601, False)])
async def test_after_a_restart_it_is_judged_on_the_last_hour(
    scene: Scene, ago: float, is_judged: bool
) -> None:
    scene.serve(0.1, ago=ago)
    assert (await scene.look() == 1) == is_judged


@pytest.mark.parametrize(("ahead", "is_judged"), [(10.4, True), (11.4, False)])
async def test_a_replicas_clock_may_be_ahead_by_a_little(
    scene: Scene, ahead: float, is_judged: bool
) -> None:
    scene.changed_at = scene.clock.monotonic()
    scene.serve(0.1, ago=-ahead)
    assert (await scene.look() == 1) == is_judged


async def test_one_replay_at_a_time(scene: Scene) -> None:
    scene.is_answering.clear()
    scene.alphas = BAD
    scene.serve(0.3)
    assert [await scene.look() for _ in range(3)] == [1, 1, 1]
    scene.is_answering.set()
    await scene.look()
    assert len(scene.taken_back) == 1


async def test_an_error_of_a_judgement_is_raised_at_the_next_look(scene: Scene) -> None:
    async def fail(current: DraftRelease, reason: str) -> bool:
        raise KeyError("a mistake of ours")

    scene.take_back = fail  # type: ignore[method-assign]
    scene.alphas = BAD
    scene.serve(0.3)
    await scene.look()
    with pytest.raises(KeyError, match="a mistake of ours"):
        await scene.look()


async def test_a_disk_that_refuses_is_told_of_once_and_the_draft_is_judged_again_later(
    scene: Scene,
) -> None:
    """As where `state.json` cannot be read for a moment."""
    taking_back = scene.take_back

    async def refuse(current: DraftRelease, reason: str) -> bool:
        raise ReleaseError("state.json: damaged; repair the file or delete it")

    scene.take_back = refuse  # type: ignore[method-assign]
    scene.alphas = BAD
    scene.serve(0.3, ago=1)
    assert await scene.look() == 1
    with pytest.raises(ReleaseError, match="repair the file"):
        await scene.look()
    scene.take_back = taking_back  # type: ignore[method-assign]
    scene.clock.move(5)
    scene.serve(0.3)
    assert await scene.look() == 1, "too early"
    scene.clock.move(5)
    scene.serve(0.3)
    assert await scene.look() == 2
    assert [version for version, _ in scene.taken_back] == [2]


async def test_closing_drops_the_judgement_under_way(scene: Scene) -> None:
    await scene.monitor.close()
    scene.is_answering.clear()
    scene.alphas = BAD
    scene.serve(0.3)
    await scene.look()
    await scene.monitor.close()
    scene.is_answering.set()
    await asyncio.sleep(0)
    assert scene.taken_back == []


# When it stays


async def test_one_that_stays_is_judged_again_on_newer_traffic_at_growing_intervals(
    scene: Scene,
) -> None:
    scene.alphas = CHANGED_TRAFFIC
    scene.serve(0.3, ago=1)
    assert await scene.look() == 1
    judged: list[float] = []
    waited = 0.0
    while len(judged) < 8:
        scene.clock.move(5)
        waited += 5
        before = len(scene.replays)
        scene.serve(0.3)
        if await scene.look() > before:
            judged.append(waited)
            waited = 0.0
    assert judged == [10, 20, 40, 80, 160, 300, 300, 300]
    assert scene.kinds() == ["stays"], "said once"
    assert scene.events[0].version == 2 and scene.events[0].text.startswith(
        "the traffic changed: v2 serves with α 0.3"
    )
    assert scene.taken_back == []


async def test_one_that_cannot_be_taken_back_is_tried_again_later_and_later(scene: Scene) -> None:
    scene.alphas, scene.is_disk_full = BAD, True
    scene.serve(0.3, ago=1)
    assert await scene.look() == 1
    tried = []
    for second in range(5, 800, 5):
        scene.clock.move(5)
        scene.serve(0.3)
        before = len(scene.taken_back)
        await scene.look()
        tried += [second] * (len(scene.taken_back) - before)
    assert tried == [10, 30, 70, 150, 310, 610]
    assert not scene.monitor.has_judged(""), "nobody has found that it is not the draft"


async def test_one_that_stays_for_weeks_is_judged_on(scene: Scene) -> None:
    scene.alphas = CHANGED_TRAFFIC
    for num in range(1, 1100):
        scene.serve(0.3)
        assert await scene.look() == num
        scene.clock.move(300)


@pytest.mark.parametrize("ahead", [-20, 0, 9])
async def test_what_it_was_judged_on_is_not_held_against_it_again(
    scene: Scene, ahead: float
) -> None:
    scene.alphas = CHANGED_TRAFFIC
    scene.serve(0.3, ago=-ahead)
    assert await scene.look() == 1
    scene.clock.move(300)
    assert await scene.look() == 1, "nothing was served since"


async def test_another_draft_has_all_patience_anew(scene: Scene) -> None:
    scene.alphas = ENGINE
    scene.serve(0.3)
    assert await scene.look() == 1
    assert scene.monitor.alarm
    scene.alphas, scene.parent = {3: 0.3, 2: 0.25}, V2
    scene.serve(0.3, version=3)
    assert await scene.look(V3) == 2, "no wait"
    assert scene.monitor.alarm == ""
    assert scene.kinds() == ["alarm", "stays"]


# The alarm


async def test_an_engine_that_serves_something_else_is_an_alarm_until_it_serves_as_measured(
    scene: Scene,
) -> None:
    scene.alphas = ENGINE
    scene.serve(0.3, ago=1)
    await scene.look()
    assert scene.monitor.alarm == scene.events[0].text
    assert "the engine is not running what we think" in scene.monitor.alarm
    scene.clock.move(1)
    scene.serve(0.7, tested=20)
    await scene.look()
    assert scene.monitor.alarm, "too little was tested to say that it is over"
    scene.serve(0.7)
    await scene.look()
    assert scene.monitor.alarm == ""
    assert scene.kinds() == ["alarm"] and scene.taken_back == []


@pytest.mark.parametrize(
    ("replays", "said"),
    [
        ([ENGINE, ENGINE, ENGINE], ["alarm"]),
        ([ENGINE, CHANGED_TRAFFIC, CHANGED_TRAFFIC], ["alarm", "stays"]),
        ([CHANGED_TRAFFIC, CHANGED_TRAFFIC, ENGINE], ["stays", "alarm"]),
        ([CHANGED_TRAFFIC, ENGINE, CHANGED_TRAFFIC], ["stays", "alarm", "stays"]),
    ],
)
async def test_only_what_is_new_is_said(
    scene: Scene, replays: list[dict[int, float]], said: list[str]
) -> None:
    for alphas in replays:
        scene.alphas = alphas
        scene.serve(0.3, ago=-1)
        await scene.look()
        assert bool(scene.monitor.alarm) == (alphas is ENGINE)
        scene.clock.move(100)
    assert len(scene.replays) == len(replays)
    assert scene.kinds() == said


# When no replay can be made


@pytest.mark.parametrize("answer", [None, {}])
async def test_without_a_replay_it_is_tried_again_later_and_later(
    scene: Scene, answer: dict[int, float] | None
) -> None:
    scene.alphas = answer
    scene.serve(0.3)
    for _ in range(11):
        await scene.look()
    assert scene.clock.slept == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert scene.events == [] and scene.taken_back == []
    scene.alphas = CHANGED_TRAFFIC
    assert await scene.look() == 12, "what was served is still to be judged"
    assert scene.kinds() == ["stays"]
    scene.alphas = answer
    scene.clock.move(100)
    scene.serve(0.3)
    await scene.look()
    assert scene.clock.slept[11:] == [1], "and then from the beginning"


async def test_a_trainer_that_is_away_for_weeks_ends_nothing(scene: Scene) -> None:
    scene.alphas = None
    scene.serve(0.3)
    for _ in range(1100):
        await scene.look()
    assert scene.clock.slept[-1] == 300
    scene.alphas = CHANGED_TRAFFIC
    await scene.look()
    assert scene.kinds() == ["stays"]
