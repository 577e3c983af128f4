"""The two loops of the controller on fakes.

What is published, taken back, written again and said, whatever the other parts do.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from osd.config.schema import Config
from osd.control.controller import Controller
from osd.errors import AwayError, ReleaseError, ReplayBufferError
from osd.exchange.registry import FeedRecord
from osd.observe.history import History
from osd.records import (
    BufferStats,
    Canary,
    DraftRelease,
    EarlierReport,
    EngineTerms,
    EvalReport,
    Event,
    Member,
    MetricPoint,
    ReplicaStatus,
    RoundOutcome,
    RoundSize,
    ServiceStatus,
    SpecWindow,
)
from osd.releases.store import ReleaseStore
from osd.service.plan import first_release
from tests.support.clocks import HandClock

TARGET = "9f2c"
STATS = BufferStats(num_traces=9, num_holdout=2, num_bytes=80, num_put=11, oldest_at=1.0)


class MemoryRegistry:
    """The registry's methods on two lists and a dict; `is_away` makes each raise as if Redis were
    gone."""

    def __init__(self) -> None:
        self.feed: list[FeedRecord] = []
        self.wishes: dict[str, DraftRelease] = {}
        self.living: list[ReplicaStatus] = []
        self.started: list[Member] = []
        self.told: EngineTerms | None = None
        self.told_canary: Canary | None = None
        self.is_away = False
        self.num_purges = 0

    def read(self, after: str = "0", count: int = 1000) -> list[tuple[str, FeedRecord]]:
        self._check()
        start = int(after)
        return [
            (str(start + i + 1), record)
            for i, record in enumerate(self.feed[start : start + count])
        ]

    def newest(self) -> str:
        self._check()
        return str(len(self.feed))

    def publish(self, *records: FeedRecord) -> None:
        self._check()
        self.feed.extend(records)

    def note_purge(self) -> None:
        self.num_purges += 1

    def replicas(self) -> list[ReplicaStatus]:
        self._check()
        return list(self.living)

    def members(self) -> list[Member]:
        self._check()
        return list(self.started)

    def wanted(self, draft: str = "default", replica: str = "") -> DraftRelease | None:
        self._check()
        if self.told_canary is not None and self.told_canary.replica == replica:
            return self.told_canary.release
        return self.wishes.get(draft)

    def terms(self) -> EngineTerms | None:
        self._check()
        return self.told

    def set_terms(self, terms: EngineTerms) -> None:
        self._check()
        self.told = terms

    def canary(self, draft: str = "default") -> Canary | None:
        self._check()
        return self.told_canary

    def set_canary(self, canary: Canary | None, draft: str = "default") -> None:
        self._check()
        self.told_canary = canary

    def set_wanted(self, release: DraftRelease) -> None:
        self._check()
        self.wishes[release.draft] = release

    def _check(self) -> None:
        if self.is_away:
            raise ReplayBufferError("Redis at redis://nowhere cannot be used: refused")


class FakeBuffer:
    def __init__(self) -> None:
        self.purged: list[tuple[str | None, float | None]] = []
        """(domain, before) of each purge"""
        self.is_failing = False
        self.num_in_the_way = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def stats(self) -> BufferStats:
        return STATS

    def make_room(self) -> int:
        num, self.num_in_the_way = self.num_in_the_way, 0
        return num

    def purge(
        self, *, domain: str | None = None, before: float | None = None, all_targets: bool = False
    ) -> int:
        assert all_targets
        self.meanwhile()
        self.purged.append((domain, before))
        if self.is_failing:
            raise ReplayBufferError("no answer within 15 s")
        return 17


class FakeTrainer:
    """Every `rounds` entry is one round. No entry = no new traces; `death` is what every call
    meets."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.rounds: list[RoundOutcome | Callable[[DraftRelease], RoundOutcome]] = []
        self.alphas: dict[int, float] = {}
        self.earlier: list[EarlierReport] = []
        self.compared: list[str] = []
        """Earlier releases beside the serving one."""
        self.calls: list[str] = []
        self.lines: list[int] = []
        self.sizes: list[RoundSize] = []
        self.since: list[float] = []
        """Of each round."""
        self.death: Exception | None = None
        self.num_new = 100
        """Traces that wait for each round."""
        self.gate_open = asyncio.Event()
        self.gate_open.set()

    async def machine(self) -> str:
        if isinstance(self.death, AwayError):
            raise self.death
        return "here"

    async def why_silent(self) -> str:
        return "nobody knows"

    async def num_new_traces(self) -> int:
        if self.death is not None:
            self.calls.append("dead")
            raise self.death
        return self.num_new if self.rounds else 0

    async def run_round(self, base: DraftRelease, line: int, size: RoundSize) -> RoundOutcome:
        self.calls.append(f"round from v{base.version}")
        self.lines.append(line)
        self.sizes.append(size)
        self.since.append(base.judged_since)
        await self.gate_open.wait()
        step = self.rounds.pop(0)
        return step(base) if callable(step) else step

    async def candidate(self, outcome: RoundOutcome) -> str:
        return outcome.path

    async def evaluate_releases(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float]:
        self.calls.append(f"replay {[release.version for release in versions]} on {num_traces}")
        return self.alphas

    async def compare_earlier(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport]:
        versions = [release.version for release in earlier]
        self.compared.append(f"v{base.version} beside {versions} on {num_traces}")
        return self.earlier

    def better(self, base: DraftRelease) -> RoundOutcome:
        """A candidate the gate lets through: α 0.4 -> 0.7."""
        return make_outcome(str(self.model), base.version, base.target_id)


def make_outcome(path: str, base_version: int, target_id: str = TARGET) -> RoundOutcome:
    report = EvalReport(
        num_traces=40,
        num_tokens=1600,
        k=2,
        alpha_base=0.4,
        alpha_candidate=0.7,
        alpha_base_per_pos=(0.4, 0.4),
        alpha_candidate_per_pos=(0.7, 0.7),
        diff=0.3,
        diff_low=0.25,
        diff_high=0.35,
    )
    return RoundOutcome(
        base_version=base_version,
        target_id=target_id,
        path=path,
        num_steps=4,
        num_tokens=99,
        loss_first=2.0,
        loss_last=0.5,
        seconds=1.0,
        trace_age_mean_s=1.0,
        trace_age_max_s=2.0,
        eval=report,
        num_new_rows=900,
        num_contradicting=7,
    )


def no_gain(base: DraftRelease) -> RoundOutcome:
    """A candidate the gate refuses, as after most rounds once there is nothing left to learn."""
    outcome = make_outcome("", base.version, base.target_id)
    assert outcome.eval is not None
    return replace(outcome, eval=replace(outcome.eval, diff_low=-0.01))


def live_window(
    version: int, alpha: float, at: float, tested: int = 1000, finished: int = 160
) -> SpecWindow:
    return SpecWindow(
        at=at,
        replica="replica-0",
        version=version,
        seconds=1.0,
        k=1,
        num_drafts=tested,
        num_draft_tokens=tested,
        num_accepted_tokens=round(alpha * tested),
        num_accepted_tokens_per_pos=(round(alpha * tested),),
        num_tested_per_pos=(tested,),
        num_output_tokens=tested,
        num_finished=finished,
        num_captured=finished,
    )


def replica(version: int, name: str = "replica-0") -> ReplicaStatus:
    return ReplicaStatus(
        at=time.time(),
        replica=name,
        url="http://127.0.0.1:8000",
        version=version,
        target_id=TARGET,
        may_try=True,
        k=2,
        pid=1,
        started_at=1.0,
        engine="fake",
    )


class LoopClock(HandClock):
    """Stands still, but the loops really pause; `turns`: loop -> how often it has come to its end
    and begun anew. `at_sleep` is called whenever one does."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.turns = Counter[str]()
        self.at_sleep: Callable[[], object] = lambda: None

    async def sleep(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.at_sleep()
        self.turns[task.get_name()] += 1
        await asyncio.sleep(seconds)


class World:
    """A controller and everything around it; `restart` starts another one on the same disk and
    feed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "candidate"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"vocab_size": 8}')
        save_file({"w": np.zeros(8, np.float32)}, self.model / "model.safetensors")
        self.config = Config.model_validate(
            {
                "data_dir": str(directory),
                "control": {"seconds_between_looks": 0.005},
                "trainer": {"min_new_traces": 32},
                "releases": {"keep": 2},
                "serving": {"served_model_name": "tiny"},
                "speculation": {"mode": "fixed", "proposers": ["memory"]},
            }
        )
        self.registry = MemoryRegistry()
        self.trainer, self.is_training = FakeTrainer(self.model), True
        self.buffer = FakeBuffer()
        self.clock = LoopClock(time.time() + 60)
        """A minute ahead of the time at which releases are made: all of them are from before."""
        self.restart()

    def restart(self, target_id: str = TARGET) -> None:
        """As a service that is started again: what serves is settled first, then the controller
        begins."""
        first_release(self.config, self.model, target_id, 8)
        self.releases = ReleaseStore(self.config.releases_path)
        self.history = History()
        self.controller = Controller(
            self.config,
            self.registry,
            self.releases,
            self.history,
            self.trainer if self.is_training else None,
            self.buffer,
            target_id=target_id,
            backoff_s=0.01,
            clock=self.clock,
        )

    def configure(self, section: str, **values: object) -> None:
        """Start again with another configuration."""
        part = getattr(self.config, section).model_copy(update=values)
        self.config = self.config.model_copy(update={section: part})
        self.restart()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.controller.run())
        await self.until(lambda: self.wanted() is not None)
        try:
            yield
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing of it goes on"

    def serve(self, version: int, alpha: float, ahead: float = 2.0, num: int = 1) -> None:
        """Windows that say with what α a version serves now; `ahead`: what the replica's clock is
        by."""
        self.registry.publish(*[live_window(version, alpha, self.clock.now + ahead)] * num)

    async def publish(self, version: int) -> None:
        """Have rounds run until this version is current."""
        num_before = self.kinds().count("published")
        self.trainer.rounds.append(self.trainer.better)
        await self.until(
            lambda: self.wanted() == version and self.kinds().count("published") > num_before
        )

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"never happened; events: {self.events()}"
            await asyncio.sleep(0.005)

    async def a_few_looks(self) -> None:
        """Three turns of each loop: what they would have done of what is there now, they have
        done."""
        loops = ("watch", "train") if self.is_training else ("watch",)
        goals = {name: self.clock.turns[name] + 3 for name in loops}
        await self.until(
            lambda: all(self.clock.turns[name] >= goal for name, goal in goals.items())
        )

    def says(self, line: str) -> bool:
        """Whether `/metrics` has this line."""
        return line in self.history.prometheus().splitlines()

    def wanted(self) -> int | None:
        release = self.registry.wishes.get("default")
        return None if release is None else release.version

    def events(self) -> list[str]:
        return [
            f"{record.kind}: {record.text}"
            for record in self.registry.feed
            if isinstance(record, Event)
        ]

    def kinds(self) -> list[str]:
        return [record.kind for record in self.registry.feed if isinstance(record, Event)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_where_acceptance_has_just_fallen_a_round_waits_for_half_as_many_traces(
    world: World,
) -> None:
    async with world.running():
        await world.publish(2)
        world.trainer.num_new = 16  # of 32
        world.trainer.rounds.append(world.trainer.better)
        world.serve(2, 0.7, num=10)
        await world.a_few_looks()
        world.serve(2, 0.3)
        await world.a_few_looks()
        assert world.trainer.calls == ["round from v1"], "most of them are of before"
        world.serve(2, 0.3)
        await world.until(lambda: world.wanted() == 3)


async def test_first_start_publishes_the_configured_draft_and_tells_the_replicas(
    world: World,
) -> None:
    async with world.running():
        await world.until(lambda: world.wanted() == 1)
    assert world.releases.get(1).parent == 0
    world.restart()
    assert [release.version for release in world.releases.list()] == [1], "only once"


async def test_a_few_traces_wait_for_more_but_not_forever(world: World) -> None:
    world.trainer.num_new = 9  # a batch is 8, a round 32
    async with world.running():
        world.trainer.rounds += [world.trainer.better, world.trainer.better]
        for num_rounds in (0, 1):
            await world.a_few_looks()
            world.clock.move(world.config.trainer.max_wait_seconds - 1)
            await world.a_few_looks()
            assert len(world.trainer.calls) == num_rounds, "each round waits anew"
            assert (await world.controller.status()).phase_detail == "9 of 32 new traces"
            world.clock.move(1)
            await world.until(lambda: len(world.kinds()) > num_rounds)  # noqa: B023


async def test_traces_that_were_deleted_do_not_hasten_a_round(world: World) -> None:
    world.trainer.num_new = 9
    async with world.running():
        for _ in range(2):
            world.trainer.rounds = [world.trainer.better]
            await world.a_few_looks()
            world.clock.move(world.config.trainer.max_wait_seconds - 1)
            await world.a_few_looks()
            world.trainer.rounds = []
            await world.a_few_looks()
            assert (await world.controller.status()).phase_detail == "0 of 32 new traces"
    assert world.trainer.calls == []


async def test_the_status_tells_of_the_newest_round(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.publish(3)
        await world.until(lambda: world.history.total("osd_round_total") == 2)
        status = await world.controller.status()
    assert status.last_round == world.releases.get(3).outcome != world.releases.get(2).outcome


async def test_better_candidate_is_published_told_and_explained(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.until(lambda: world.history.total("osd_round_total") == 1)
        status = await world.controller.status()
    assert world.trainer.calls == ["round from v1"]
    assert world.registry.wishes["default"] == world.releases.current()
    assert world.releases.get(2).origin == world.releases.get(1).origin != ""
    assert world.events() == [
        "published: v2: held-out α 0.40 -> 0.70 on 40 requests, at least +0.250"
    ]
    assert (status.version, status.num_rounds) == (2, 1)
    assert (status.mode, status.proposers) == ("fixed", ("memory",))
    assert status.last_round == world.releases.get(2).outcome
    text = world.history.prometheus()
    assert 'osd_round_total{outcome="published"} 1.0' in text
    assert 'osd_round_rows_total{kind="trainable"} 900.0' in text
    assert 'osd_round_rows_total{kind="contradicting"} 7.0' in text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"eval": None},
            "refused: not judged: fewer than 8 held-out requests so far (gate.min_holdout_traces); "
            "what was learnt is kept",
        ),
        ({"base_version": 7}, "refused: base is no longer current: trained from v7, v1 serves"),
        (
            {"loss_last": float("nan")},
            "refused: not finite: the loss or the measured acceptance is NaN or infinite",
        ),
        (
            {"discarded": "non-finite loss", "path": "", "loss_last": float("nan"), "eval": None},
            "discarded: round discarded: non-finite loss",
        ),
    ],
)
async def test_other_candidates_change_nothing(
    world: World, fields: dict[str, object], expected: str
) -> None:
    async with world.running():
        world.trainer.rounds.append(replace(make_outcome(str(world.model), 1), **fields))  # type: ignore[arg-type]
        await world.until(lambda: bool(world.events()))
        await world.until(lambda: len(world.history.rounds()) == 1)
    assert world.events() == [expected]
    assert world.wanted() == 1
    assert [release.version for release in world.releases.list()] == [1]


async def test_candidate_that_cannot_be_stored_is_an_event_and_life_goes_on(world: World) -> None:
    async with world.running():
        world.trainer.rounds.append(make_outcome("/nowhere", 1))
        await world.until(lambda: world.kinds() == ["publish_failed"])
        await world.publish(2)
    assert "/nowhere: no config.json" in world.events()[0]


async def test_trainer_that_dies_is_retried_and_said_once(world: World) -> None:
    async with world.running():
        world.trainer.death = RuntimeError("the actor\ndied")
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: len(world.trainer.calls) >= 3)
        assert (await world.controller.status()).trainer == "away"
        await world.until(lambda: world.says("osd_trainer_up 0.0"))
        world.trainer.death = None
        await world.until(lambda: world.wanted() == 2 and world.kinds()[-1] == "published")
        num_dead = world.trainer.calls.count("dead")
        await world.until(lambda: world.says("osd_trainer_up 1.0"))
        await world.until(lambda: world.says(f"osd_trainer_failures_total {num_dead}.0"))
    assert world.events()[0] == "trainer_failed: RuntimeError: the actor died"
    assert world.kinds() == ["trainer_failed", "trainer_back", "published"]


async def test_a_trainer_that_answers_and_fails_every_round_is_counted(world: World) -> None:
    def fail(base: DraftRelease) -> RoundOutcome:
        raise RuntimeError("out of memory")

    async with world.running():
        await world.until(lambda: world.says("osd_trainer_failures_total 0.0"))
        world.trainer.rounds += [fail] * 3
        await world.until(lambda: world.says("osd_trainer_failures_total 3.0"))
        assert (await world.controller.status()).trainer_trouble == "RuntimeError: out of memory"
        await world.publish(2)
    assert world.kinds() == ["trainer_failed", "trainer_back", "published"], "each told once"


async def test_a_trainer_that_is_not_wanted_is_not_down(world: World) -> None:
    async with world.running():
        world.trainer.death = RuntimeError("the actor died")
        await world.until(lambda: world.says("osd_trainer_up 0.0"))
        await world.controller.pause()
        await world.until(lambda: world.says("osd_trainer_up 1.0"))


async def test_redis_away_is_no_failure_of_the_trainer(world: World) -> None:
    async with world.running():
        world.trainer.rounds.append(world.trainer.better)
        world.trainer.death = ReplayBufferError("Redis cannot be used")
        await world.until(lambda: len(world.trainer.calls) >= 2)
        assert (await world.controller.status()).trainer == "away"
        world.trainer.death = KeyError("x" * 900)
        await world.until(lambda: "trainer_failed" in world.kinds())
        world.trainer.death = None
        await world.until(lambda: "published" in world.kinds())
    assert world.events()[0] == f"trainer_failed: KeyError: '{'x' * 489}", (
        "500 characters are enough"
    )
    assert world.kinds() == ["trainer_failed", "trainer_back", "published"]
    assert world.trainer.calls[-1] == "round from v1"


@pytest.mark.parametrize("trouble", ["redis", "disk"])
async def test_trouble_is_said_once_each_time(
    world: World, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = world.releases.root / "state.json"
    async with world.running():
        for num in (1, 2):
            world.registry.is_away = trouble == "redis"
            if trouble == "disk":
                state.write_text("{")
            num_before = world.clock.turns["watch"]
            await world.until(lambda: world.clock.turns["watch"] >= num_before + 3)  # noqa: B023
            assert world.says(f"osd_redis_up {float(trouble == 'disk')}")
            world.registry.is_away = False
            state.unlink(missing_ok=True)
            await world.until(lambda: caplog.text.count("works again: ") == num)  # noqa: B023
            await world.until(lambda: world.says("osd_redis_up 1.0"))
    assert caplog.text.count("trying again until it works") == 2
    assert ("history stands still: Redis at redis://nowhere" in caplog.text) == (trouble == "redis")


async def test_the_whole_feed_is_heard_before_the_first_round_each_record_once(
    world: World,
) -> None:
    """Of a long feed the end counts most: there it says that training rests."""
    point = MetricPoint(
        at=world.clock.now, name="osd_round_total", value=1, labels={"outcome": "refused"}
    )
    world.registry.publish(*[point] * 2500)
    for _ in range(6):
        world.registry.publish(
            no_gain(world.releases.get(1)), Event(at=world.clock.now, kind="refused", text="")
        )
    world.trainer.rounds.append(world.trainer.better)
    async with world.running():
        await world.a_few_looks()
        assert world.trainer.calls == []
        assert world.history.total("osd_round_total") == 2500


def noted(world: World) -> list[str]:
    return [event.text for event in world.history.events() if event.kind == "note"]


def notes(num: int) -> list[Event]:
    return [Event(at=float(i), kind="note", text=f"{i}") for i in range(num)]


async def test_the_feed_of_another_redis_is_heard_whose_clock_is_behind(world: World) -> None:
    """Its ids begin below those of the one that is gone."""
    events = notes(7)
    world.registry.feed += events[:5]
    async with world.running():
        await world.until(lambda: len(noted(world)) == 5)
        world.registry.feed.clear()
        await world.a_few_looks()
        world.registry.publish(*events[5:])
        await world.until(lambda: len(noted(world)) == 7)
    assert noted(world) == [str(i) for i in range(7)]


@pytest.mark.parametrize("num_left", [1, 4])
async def test_of_a_feed_that_lost_its_end_no_record_is_heard_again(
    world: World, num_left: int
) -> None:
    events = notes(7)
    world.registry.feed += events[:5]
    async with world.running():
        await world.until(lambda: len(noted(world)) == 5)
        del world.registry.feed[num_left:]
        await world.a_few_looks()
        world.registry.publish(*events[5:])
        await world.until(lambda: len(noted(world)) == 7)
    assert noted(world) == [str(i) for i in range(7)]


async def test_without_redis_rounds_that_bring_nothing_count_too(world: World) -> None:
    async with world.running():
        world.registry.is_away = True
        world.trainer.rounds += [no_gain] * 8
        await world.until(lambda: len(world.trainer.calls) == 6)
        num_turns = world.clock.turns["train"]
        await world.until(lambda: world.clock.turns["train"] >= num_turns + 3)
        assert (await world.controller.status()).phase_detail.startswith(
            "at rest: 6 rounds in a row"
        )
    assert len(world.trainer.calls) == 6


class Meanwhile:
    """What happens in the 20 seconds between two rounds."""

    @staticmethod
    async def nothing(world: World) -> None:
        await world.a_few_looks()
        world.clock.set(3600)  # which is no time that there is

    @staticmethod
    async def pause(world: World) -> None:
        await world.controller.pause()
        await world.a_few_looks()
        await world.controller.resume()

    @staticmethod
    async def trainer_away(world: World) -> None:
        num_before = world.trainer.calls.count("dead")
        world.trainer.death = AwayError("its machine is gone")
        await world.until(lambda: world.trainer.calls.count("dead") > num_before)
        world.trainer.death = None


@pytest.mark.parametrize(
    ("trainer", "meanwhile", "replayed"),
    [
        ({"payback_seconds": 0.0}, Meanwhile.nothing, [8, 25, 25]),
        ({"payback_seconds": 0.0}, Meanwhile.pause, [8, 8, 8]),
        ({"payback_seconds": 0.0}, Meanwhile.trainer_away, [8, 8, 8]),
        ({"payback_seconds": 600.0}, Meanwhile.nothing, [8, 8, 8]),
        (
            {"payback_seconds": 0.0, "patience_rounds": 1, "max_idle_seconds": 15.0},
            Meanwhile.nothing,
            [8, 8, 8],
        ),
    ],
)
async def test_a_round_replays_as_much_as_there_is_time_for_and_engines_can_spare(
    world: World,
    trainer: dict[str, float],
    meanwhile: Callable[[World], Awaitable[None]],
    replayed: list[int],
) -> None:
    """A step takes a quarter of a second, and 20 seconds pass from one round to the next: half of
    that is 40 steps, and 12 new traces are 1.5. What rounds take from this engine nobody knows. The
    last case rests after every round."""
    world.trainer.num_new = 12
    world.configure("trainer", **trainer, min_new_traces=12)
    async with world.running():
        for num in (1, 2, 3):
            world.trainer.rounds.append(no_gain)
            await world.until(lambda num=num: world.kinds().count("refused") == num)  # type: ignore[misc]
            await meanwhile(world)
            world.clock.move(20)
    assert [size.replay_batches for size in world.trainer.sizes] == replayed
    rests = "patience_rounds" in trainer
    assert {size.new_traces for size in world.trainer.sizes[1:]} == {24 if rests else 512}


async def test_redis_away_stops_nothing_and_is_caught_up(world: World) -> None:
    async with world.running():
        await world.until(lambda: world.wanted() == 1)
        world.registry.is_away = True
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: len(world.releases.list()) == 2)
        assert world.wanted() == 1
        status = await world.controller.status()
        await world.until(lambda: [event.kind for event in world.history.events()] == ["published"])
        await world.until(lambda: world.says("osd_redis_up 0.0"))
        world.registry.is_away = False
        await world.until(lambda: world.wanted() == 2)
        await world.until(lambda: world.says("osd_redis_up 1.0"))
    assert status.redis == "away"


async def test_wanted_lost_with_redis_is_written_again_from_disk(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.registry.wishes.clear()
        await world.until(lambda: world.wanted() == 2)


async def test_draft_that_disappoints_is_taken_back_and_never_offered_again(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.trainer.alphas = {2: 0.3, 1: 0.5}
        world.serve(2, alpha=0.3)
        await world.until(lambda: world.wanted() == 1)
        await world.until(lambda: world.history.total("osd_rollback_total") == 1)
        assert world.releases.is_bad(2)
        with pytest.raises(ReleaseError, match="not offered again"):
            await world.controller.promote(2)
        await world.publish(3)
    assert world.trainer.calls[1:] == ["replay [2, 1] on 20", "round from v1"]
    assert world.events()[1].startswith(
        "rolled_back: v2 -> v1: v2 serves with α 0.30, 0.70 was measured; on the newest"
    )
    assert 'osd_rollback_total{reason="disappointed"} 1.0' in world.history.prometheus()


@pytest.mark.parametrize("by", [-3600, 3600])
async def test_a_clock_that_is_set_hides_no_draft_that_disappoints(world: World, by: float) -> None:
    async with world.running():
        await world.publish(2)
        world.serve(2, alpha=0.7)
        await world.a_few_looks()
        world.clock.set(by)
        world.trainer.alphas = {2: 0.3, 1: 0.5}
        world.serve(2, alpha=0.3)
        await world.until(lambda: world.wanted() == 1)
    assert world.releases.is_bad(2)


async def test_a_draft_that_replays_well_stays_and_the_contradiction_is_said(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.trainer.alphas = {2: 0.7, 1: 0.4}
        world.serve(2, alpha=0.1)
        await world.until(lambda: "alarm" in world.kinds())
        status = await world.controller.status()
        assert status.alarm and world.events()[-1] == f"alarm: {status.alarm}"
        await world.until(lambda: world.says("osd_alarm 1.0"))
        world.serve(2, alpha=0.7, ahead=5)
        await world.a_few_looks()
        assert (await world.controller.status()).alarm == "", "it serves as it should again"
        await world.until(lambda: world.says("osd_alarm 0.0"))
    assert world.wanted() == 2
    assert "the engine is not running what we think" in world.events()[-1]
    assert world.history.total("osd_rollback_total") == 0


async def test_changed_traffic_is_no_reason_to_go_back_and_is_said_once(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.trainer.alphas = {2: 0.3, 1: 0.2}
        world.serve(2, alpha=0.3)
        await world.until(lambda: "stays" in world.kinds())
        calls = len(world.trainer.calls)
        await world.a_few_looks()
        assert len(world.trainer.calls) == calls, "not judged again on the same window"
        world.serve(2, alpha=0.3, ahead=5)
        await world.a_few_looks()
        world.clock.move(2.19)  # what it was judged on ended in two seconds; it has 0.2 of patience
        await world.a_few_looks()
        assert len(world.trainer.calls) == calls, "nor soon"
        world.clock.move(0.02)
        await world.until(lambda: len(world.trainer.calls) > calls)
        await world.a_few_looks()
    assert world.wanted() == 2
    assert world.kinds() == ["published", "stays"]


async def test_good_draft_is_never_replayed(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.serve(2, alpha=0.68)
        await world.a_few_looks()
    assert world.trainer.calls == ["round from v1"]


async def test_rollback_does_not_wait_for_a_training_round(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.trainer.gate_open.clear()
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: world.trainer.calls[-1] == "round from v2")
        world.trainer.alphas = {2: 0.3, 1: 0.5}
        world.serve(2, alpha=0.3)
        await world.until(lambda: world.wanted() == 1)
        world.trainer.gate_open.set()
        await world.until(lambda: "refused" in world.kinds())
    assert world.wanted() == 1
    assert world.events()[-1] == "refused: base is no longer current: trained from v2, v1 serves"


async def test_pinned_draft_serves_whatever_happens(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.controller.pin(1)
        assert world.wanted() == 1
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: world.events()[-1] == "refused: v1 is pinned")
        for change in (world.controller.promote(2), world.controller.rollback()):
            with pytest.raises(ReleaseError):
                await change
        await world.controller.unpin()
        await world.publish(3)
    assert world.kinds() == ["published", "pinned", "refused", "unpinned", "published"]


async def test_pinned_draft_is_not_taken_back(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.controller.pin(2)
        world.trainer.alphas = {2: 0.3, 1: 0.5}
        world.serve(2, alpha=0.3)
        await world.a_few_looks()
    assert world.wanted() == 2


async def test_pause_holds_over_a_restart_and_refuses_the_round_under_way(world: World) -> None:
    async with world.running():
        world.trainer.gate_open.clear()
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: world.trainer.calls == ["round from v1"])
        status = await world.controller.status()
        assert (status.phase, status.phase_detail) == (
            "training",
            "from v1, 8 stored batches for each new one",
        )
        await world.controller.pause()
        world.trainer.gate_open.set()
        await world.until(lambda: world.kinds() == ["paused", "refused"])
        assert (await world.controller.status()).phase == "waiting"
    assert world.events()[0] == "paused: no training, no publishing"
    world.restart()
    world.trainer.rounds.append(world.trainer.better)
    async with world.running():
        await world.a_few_looks()
        assert (await world.controller.status()).paused is True
        assert world.trainer.calls == ["round from v1"]
        await world.controller.resume()
        await world.until(lambda: world.wanted() == 2)
    assert "resumed: training and publishing" in world.events()


async def test_restart_finds_releases_history_and_wishes_again(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.serve(2, alpha=0.65)
        await world.until(lambda: world.history.window(2) is not None)
        before = await world.controller.status(), world.history.events(), world.history.window(2)
    world.restart()
    world.registry.wishes.clear()
    async with world.running():
        await world.until(lambda: world.wanted() == 2)
        await world.until(lambda: world.history.window(2) is not None)
        after = await world.controller.status(), world.history.events(), world.history.window(2)
    names = ("version", "num_rounds", "num_rollbacks", "last_round", "paused", "pinned")
    assert [getattr(after[0], name) for name in names] == [
        getattr(before[0], name) for name in names
    ]
    assert after[1:] == before[1:]


async def test_changed_target_starts_a_line_of_its_own(world: World) -> None:
    async with world.running():
        await world.publish(2)
    world.restart(target_id="other")
    async with world.running():
        await world.until(lambda: world.wanted() == 3)
    assert (world.releases.get(3).parent, world.releases.get(3).target_id) == (0, "other")
    world.restart()
    async with world.running():
        await world.until(lambda: world.wanted() == 2)


async def test_lagging_replica_is_shown_and_said_once(world: World) -> None:
    async with world.running():
        world.registry.living = [replica(0, "replica-1"), replica(1)]
        await world.a_few_looks()
        world.clock.move(14.9)
        await world.a_few_looks()
        assert world.kinds() == []
        world.clock.move(0.1)
        await world.until(lambda: "lagging" in world.kinds())
        await world.a_few_looks()
        shown = (await world.controller.status()).replicas
        assert [(r.replica, r.lagging, r.wanted) for r in shown] == [
            ("replica-1", True, 1),
            ("replica-0", False, 1),
        ]
        await world.until(lambda: world.says('osd_replica_lagging{replica="replica-1"} 1.0'))
        assert world.says("osd_replicas 2.0")
        assert world.says('osd_replica_lagging{replica="replica-0"} 0.0')
        world.registry.living = [replica(1, "replica-1"), replica(1)]
        await world.a_few_looks()
        await world.until(lambda: world.says('osd_replica_lagging{replica="replica-1"} 0.0'))
        assert not any(r.lagging for r in (await world.controller.status()).replicas)
    assert world.events() == ["lagging: replica-1 still serves v0, wanted is v1"]


async def test_an_engine_in_which_no_draft_is_swapped_never_lags(world: World) -> None:
    async with world.running():
        world.registry.living = [
            replace(replica(0, "one"), steps=("observe",)),
            replace(replica(0, "two"), steps=("observe", "swap")),
        ]
        await world.a_few_looks()
        world.clock.move(15)
        await world.until(lambda: "lagging" in world.kinds())
        shown = (await world.controller.status()).replicas
        assert {r.replica: r.lagging for r in shown} == {"one": False, "two": True}


async def test_a_replica_lags_with_a_newer_draft_too_and_only_while_it_does(world: World) -> None:
    """A rollback that a replica does not follow leaves it ahead."""
    async with world.running():
        for version, seconds, is_lagging in (
            (9, 14, False),
            (1, 14, False),
            (9, 14, False),
            (9, 1, True),
        ) * 2:
            world.registry.living = [replica(version)]
            await world.a_few_looks()
            world.clock.move(seconds)
            await world.a_few_looks()
            (shown,) = (await world.controller.status()).replicas
            assert shown.lagging == is_lagging
            if is_lagging:
                world.registry.living = [replica(1)]
                await world.a_few_looks()
    assert world.events() == ["lagging: replica-0 still serves v9, wanted is v1"] * 2


async def test_old_releases_are_pruned_but_not_those_that_serve(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.controller.keep(2)
        await world.publish(3)
        world.registry.living = [replica(3)]
        await world.a_few_looks()
        for version in (4, 5, 6):
            await world.publish(version)
        await world.until(lambda: world.kinds().count("published") == 5)
    assert [release.version for release in world.releases.list()] == [1, 2, 3, 5, 6]


async def test_administration_by_hand(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.publish(3)
        await world.controller.promote(1)
        assert world.wanted() == 1
        await world.controller.promote(3)
        await world.controller.rollback()
        assert world.wanted() == 2
        with pytest.raises(
            ReleaseError, match="draft v9: no such release in .*; there are: v1, v2, v3"
        ):
            await world.controller.promote(9)
        drafts = {draft.version: draft for draft in await world.controller.drafts()}
        await world.publish(4)
    assert world.kinds() == [
        "published",
        "published",
        "promoted",
        "promoted",
        "rolled_back",
        "published",
    ]
    assert [version for version, draft in drafts.items() if draft.serving] == [2]
    assert drafts[3].eval is not None and drafts[3].eval.alpha_candidate == 0.7
    assert not drafts[3].bad, "a rollback by hand condemns nothing"
    assert world.trainer.calls[-1] == "round from v2"


async def test_what_the_service_is_doing(world: World) -> None:
    async with world.running():
        await world.publish(2)
        world.registry.living = [replica(2)]
        world.serve(2, alpha=0.6, num=2)
        await world.until(lambda: world.history.served(2) == (2000, 1200))
        await world.controller.pin(2)
        await world.a_few_looks()
        world.clock.move(90)
        status, drafts = await world.controller.status(), await world.controller.drafts()
        (round_,), (shown,) = world.history.rounds(), status.replicas
    assert status == ServiceStatus(
        deployment="default",
        target=world.config.serving.target,
        draft=world.config.serving.draft,
        served_model_name="tiny",
        target_id=TARGET,
        version=2,
        predicted_alpha=0.7,
        served_alpha=0.6,
        pinned=2,
        paused=False,
        training=True,
        phase="waiting",
        phase_detail="0 of 32 new traces",
        k=world.config.speculation.k_max,
        mode="fixed",
        proposers=("memory",),
        replicas=(shown,),
        buffer=STATS,
        alarm="",
        redis="ok",
        trainer="ok",
        last_round=round_,
        num_rounds=1,
        num_swaps=0,
        num_rollbacks=0,
        started_at=world.clock.now - 90,
        uptime_s=90,
    )
    assert (shown.replica, shown.version, shown.wanted, shown.lagging) == ("replica-0", 2, 2, False)
    alphas = [(d.version, d.predicted_alpha, d.served_alpha, d.served_tested) for d in drafts]
    assert alphas == [(1, None, None, 0), (2, 0.7, 0.6, 2000)]


async def test_without_a_release_nothing_is_trained_nor_said_to_serve(world: World) -> None:
    async with world.running():
        shutil.rmtree(world.releases.get(1).path)
        world.trainer.rounds.append(world.trainer.better)
        await world.a_few_looks()
        status = await world.controller.status()
    assert (status.version, status.predicted_alpha, status.phase) == (0, None, "waiting")
    assert world.trainer.calls == []


async def test_a_purge_says_what_may_have_learnt_from_what_is_gone(world: World) -> None:
    async with world.running():
        assert await world.controller.purge("sql", 12.5) == {"purged": 17, "trained_on": []}
        await world.publish(2)
        await world.publish(3)
        assert await world.controller.purge() == {"purged": 17, "trained_on": [2, 3]}
        assert world.registry.num_purges == 2, "engines forget, too"
    said = [text for text in world.events() if text.startswith("purged")]
    assert said[0] == "purged: 17 traces deleted"
    assert said[1] == "purged: 17 traces deleted; drafts that may have learnt from them: v2, v3"
    assert world.buffer.purged == [("sql", 12.5), (None, None)]


async def test_engines_forget_after_the_traces_are_gone_and_where_some_may_be(
    world: World,
) -> None:
    """Before, what is not gone yet could be remembered again."""
    told_by_then: list[int] = []
    world.buffer.meanwhile = lambda: told_by_then.append(world.registry.num_purges)
    async with world.running():
        await world.controller.purge()
        world.buffer.is_failing = True
        with pytest.raises(ReplayBufferError):
            await world.controller.purge()
    assert told_by_then == [0, 1] and world.registry.num_purges == 2


async def disappoint(world: World) -> None:
    world.trainer.alphas = {2: 0.3, 1: 0.5}
    world.serve(2, alpha=0.3)
    await world.until(lambda: world.wanted() == 1)


async def pin_and_unpin(world: World, version: int) -> None:
    await world.controller.pin(version)
    await world.controller.unpin()


@pytest.mark.parametrize("is_restarted", [True, False])
@pytest.mark.parametrize(
    ("change", "is_broken"),
    [
        (disappoint, True),
        (lambda world: world.controller.rollback(), True),
        (lambda world: world.controller.promote(1), True),
        (lambda world: world.controller.pin(1), True),
        (lambda world: pin_and_unpin(world, 1), True),
        (lambda world: world.controller.promote(2), False),
        (lambda world: pin_and_unpin(world, 2), False),
        (lambda world: world.controller.keep(1), False),
        (lambda world: world.publish(3), False),
    ],
    ids=[
        "disappoints",
        "rollback",
        "promote",
        "pin",
        "pin+unpin",
        "promote-same",
        "pin-same",
        "keep",
        "publish",
    ],
)
async def test_another_draft_than_the_newest_begins_another_line_also_after_a_restart(
    world: World, change: Callable[[World], Awaitable[object]], is_broken: bool, is_restarted: bool
) -> None:
    async with world.running():
        await world.publish(2)
        world.trainer.rounds.append(no_gain)
        await world.until(lambda: len(world.trainer.lines) == 2)
        await change(world)
        num_before = len(world.trainer.lines)
        if not is_restarted:
            world.trainer.rounds += [no_gain] * 2
            await world.until(lambda: len(world.trainer.lines) == num_before + 2)
    if is_restarted:
        world.restart()
        async with world.running():
            world.trainer.rounds += [no_gain] * 2
            await world.until(lambda: len(world.trainer.lines) == num_before + 2)
    first, second, *_, before_last, last = world.trainer.lines
    assert first == second, "a publication goes on"
    assert (last != second) == is_broken
    assert last == before_last, "once is enough"


async def test_changes_at_once_leave_disk_and_wishes_in_agreement(world: World) -> None:
    async with world.running():
        await world.publish(2)
        await world.publish(3)
        world.trainer.rounds += [world.trainer.better] * 3
        moves = [world.controller.promote(version) for version in (1, 2, 3, 2, 1, 3)]
        await asyncio.gather(*moves)
        await world.until(lambda: not world.trainer.rounds)
        await world.a_few_looks()
        current = world.releases.current()
    assert world.registry.wishes["default"] == current


async def test_damaged_state_file_stops_nothing_for_good(world: World) -> None:
    async with world.running():
        (world.releases.root / "state.json").write_text("{")
        world.trainer.rounds.append(world.trainer.better)
        await world.a_few_looks()
        assert world.wanted() == 1
        (world.releases.root / "state.json").unlink()
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: world.wanted() == 2)


async def test_loop_that_ends_ends_the_controller_by_name(world: World) -> None:
    class Broken(FakeBuffer):
        def stats(self) -> BufferStats:
            raise KeyError("a mistake of ours")

    controller = Controller(
        world.config,
        world.registry,
        world.releases,
        world.history,
        None,
        Broken(),
        target_id=TARGET,
    )
    with pytest.raises(RuntimeError, match="the controller's watch loop ended") as caught:
        await asyncio.wait_for(controller.run(), 10)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_without_a_trainer_the_first_draft_serves(world: World) -> None:
    world.is_training = False
    world.restart()
    async with world.running():
        status = await world.controller.status()
    assert (status.training, status.version, status.buffer) == (False, 1, STATS)


def test_controller_imports_no_engine() -> None:
    program = (
        "import sys, osd.control.controller;"
        "print([m for m in ('torch', 'vllm', 'ray') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_history_is_told_when_heartbeats_were_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which it corrects the clocks of replicas."""
    own, seen = world.history.observe, list[tuple[float | None, float]]()

    def observe(
        replicas: Iterable[ReplicaStatus], buffer: BufferStats | None, now: float | None = None
    ) -> None:
        seen.append((now, world.clock.now))
        own(replicas, buffer, now)

    monkeypatch.setattr(world.history, "observe", observe)
    async with world.running():
        await world.a_few_looks()
    assert seen and all(now == at for now, at in seen)


async def test_a_redis_that_is_full_gets_room_whether_there_is_traffic_or_not(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.running():
        world.buffer.num_in_the_way = 17
        await world.a_few_looks()
    assert caplog.text.count("memory of Redis is full: the oldest 17 traces were deleted") == 1


@pytest.mark.parametrize(("max_age", "between"), [(2.0, 60.0), (3600.0, 180.0)])
async def test_old_traces_are_deleted_now_and_then(
    world: World, max_age: float, between: float
) -> None:
    """A twentieth of their age, or more, lies between."""
    world.configure("buffer", max_age_seconds=max_age)
    begun = world.clock.now
    async with world.running():
        for num in (1, 2):
            await world.until(lambda: len(world.buffer.purged) == num)  # noqa: B023
            world.clock.move(between - 1)
            await world.a_few_looks()
            assert len(world.buffer.purged) == num
            world.clock.move(1)
    assert world.buffer.purged == [(None, begun - max_age), (None, begun + between - max_age)]


async def test_a_deletion_that_fails_is_tried_again_a_minute_later(world: World) -> None:
    """Not only when the next one is due, which may be days."""
    world.configure("buffer", max_age_seconds=30 * 86_400.0)
    world.buffer.is_failing = True
    async with world.running():
        for num in (1, 2):
            await world.until(lambda: len(world.buffer.purged) == num)  # noqa: B023
            world.clock.move(59)
            await world.a_few_looks()
            assert len(world.buffer.purged) == num
            world.buffer.is_failing = False
            world.clock.move(1)
        await world.a_few_looks()
        assert len(world.buffer.purged) == 2, "it succeeded"


async def test_without_an_age_no_trace_is_deleted(world: World) -> None:
    async with world.running():
        world.clock.move(1e9)
        await world.a_few_looks()
    assert world.buffer.purged == []


async def test_training_rests_and_says_so(world: World) -> None:
    """Six rounds without a gain, then none, also after a restart; until another draft is chosen by
    hand."""
    world.serve(1, alpha=0.9, ahead=-3600, num=9)  # from before the first release
    async with world.running():
        await world.publish(2)
        world.trainer.rounds += [no_gain] * 8
        await world.until(lambda: "rests" in world.kinds())
        await world.a_few_looks()
        status = await world.controller.status()
    num_rounds = world.trainer.calls.count("round from v2")
    assert num_rounds in (6, 7), "one more may have begun before the sixth was heard of"
    assert any(text.startswith("rests: at rest: ") for text in world.events()[-2:])
    assert status.phase_detail == f"at rest: {num_rounds} rounds in a row brought no gain"

    world.restart()
    async with world.running():
        await world.a_few_looks()
        assert world.trainer.calls.count("round from v2") == num_rounds
        assert world.kinds().count("rests") == 1, "it is known, and not said again"
        await world.controller.promote(1)
        await world.until(lambda: "learns: another draft serves (promoted)" in world.events())
        await world.until(lambda: "round from v1" in world.trainer.calls)


@pytest.mark.parametrize("came_before", [False, True], ids=["new target", "target of before"])
async def test_a_target_inherits_no_rest_of_another(world: World, came_before: bool) -> None:
    """Six fruitless rounds of one target; then another one is served, for the first time or
    again."""
    if came_before:
        world.restart("other")
        async with world.running():
            await world.a_few_looks()
        world.restart()
    async with world.running():
        world.trainer.rounds += [no_gain] * 6
        await world.until(lambda: "rests" in world.kinds())
        world.serve(world.wanted() or 0, alpha=0.9, num=9)
    world.restart("other")
    async with world.running():
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: world.kinds()[-1] == "published")
    assert world.kinds().count("rests") == 1 and "learns" not in world.kinds()


async def test_a_fall_of_acceptance_ends_the_rest(world: World) -> None:
    world.serve(1, alpha=0.8, num=30)
    for _ in range(6):
        world.registry.publish(
            replace(make_outcome("", 1), discarded="held-out loss rose", eval=None)
        )
        world.registry.publish(
            Event(at=world.clock.now, kind="discarded", text="held-out loss rose")
        )
    async with world.running():
        world.trainer.rounds.append(world.trainer.better)
        await world.a_few_looks()
        assert world.trainer.calls == []
        world.serve(1, alpha=0.2, num=3)
        await world.until(lambda: "round from v1" in world.trainer.calls)
        await world.until(lambda: "learns" in world.kinds())
    (said,) = [text for text in world.events() if text.startswith("learns")]
    assert said.startswith("learns: α fell from 0.")
