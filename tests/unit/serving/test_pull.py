"""A replica's pull loop against a hand-written engine and registry.

What is swapped in, and what is reported about it.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from typing import Any

import msgspec
import pytest

from osd.errors import ReplayBufferError
from osd.records import (
    DraftRelease,
    ReplicaStatus,
    SpeculationReport,
    SpecWindow,
    SwapReport,
    decode,
)
from serving.activity import Activity
from serving.pull import DraftPuller
from serving.swap.ranks import Ranks
from serving.vllm import names


def release(version: int, target_id: str = "target") -> DraftRelease:
    return DraftRelease(
        version=version,
        parent=version - 1,
        path=f"/v{version}",
        sha256="ab",
        target_id=target_id,
        created_at=0.0,
    )


class FakeEngine:
    """Answers as the worker extension of one rank does. Versions in `refused` fail to stage, and
    all to be put in while there is a `commit_error`; staging takes `seconds_to_stage` of the clock,
    asked about every 100 seconds."""

    def __init__(self, world: Pulled) -> None:
        self.live, self.staged = 1, 0
        self.refused: set[int] = set()
        self.commit_error = self.confirm_error = ""
        self.calls: list[str] = []
        self.releases: list[DraftRelease] = []
        """What it was asked to stage."""
        self.num_windows, self.windows_at_once = 0, 1
        self.seconds_to_stage = 0.0
        self.sleeps: bool | Exception = False
        self._world = world

    async def is_sleeping(self) -> bool:
        if isinstance(self.sleeps, Exception):
            raise self.sleeps
        return self.sleeps

    async def call(self, method: str, *args: Any) -> list[str]:
        self.calls.append(method)
        return [self._answer(method, *args)]

    def _answer(self, method: str, *args: Any) -> str:
        if method == "osd_stage":
            self.releases.append(decode(args[0], DraftRelease))
            self.staged = self.releases[-1].version
            self._done_at = self._world.now + self.seconds_to_stage
            return "{}"
        if method == "osd_staging":
            is_done = self._world.now >= self._done_at
            self._world.now += 0.0 if is_done else 100.0
            error = "does not fit" if self.staged in self.refused else ""
            return json.dumps({"done": is_done, "error": error, "seconds": 0.5})
        if method == "osd_put":
            assert args == (self.staged, True) and self.staged not in self.refused
            return json.dumps({"version": self.live, "seconds": 0.01, "error": self.commit_error})
        if method == "osd_put_back":
            return json.dumps({"version": self.live})
        if method in ("osd_disown", "osd_drop"):
            return "{}"
        if method == "osd_confirm":
            if self.confirm_error:
                return json.dumps({"error": self.confirm_error})
            self.live = self.live if self.commit_error else self.staged
            return json.dumps({"version": self.live})
        assert method == "osd_report" and args == ("replica-0", "default")
        windows = [self._window() for _ in range(self.windows_at_once)]
        return msgspec.json.encode({"windows": windows, **COUNTERS}).decode()

    def _window(self) -> SpecWindow:
        self.num_windows += 1
        return SpecWindow(
            at=float(self.num_windows),
            replica="replica-0",
            version=self.live,
            seconds=1.0,
            k=2,
            num_drafts=1,
            num_draft_tokens=2,
            num_accepted_tokens=1,
            num_accepted_tokens_per_pos=(1, 0),
            num_tested_per_pos=(1, 1),
        )


COUNTERS = {
    "rows": {"rejected": 7},
    "skipped": {"opted_out": 3},
    "num_traces": 5,
    "dropped": {"redis": 4},
    "num_running": 2,
    "split": {"model": 0.25},
}


class FakeSteering:
    """The control of speculation: remembers which drafts it began anew with."""

    def __init__(self) -> None:
        self.restarts: list[int] = []
        self.forgotten: list[bool] = []
        self.answers = True

    async def forget(self) -> bool:
        self.forgotten.append(self.answers)
        return self.answers

    async def restart(self, release: DraftRelease) -> None:
        self.restarts.append(release.version)

    async def report(self) -> SpeculationReport:
        return SpeculationReport(k=3, num_probes=len(self.restarts))


class FakeRegistry:
    """Remembers what it was told. `is_away` stands for a Redis that cannot be reached."""

    def __init__(self) -> None:
        self.num_heartbeats = 0
        self.ttls: set[float] = set()
        self.takes_feed = self.answers_feed = True
        self.published: dict[str, int] = {}
        self.want: DraftRelease | None = None
        self.said: list[Any] = []
        self.status: ReplicaStatus | None = None
        self.is_away = False
        self.num_replicas = 1
        self.purges = 7

    def num_purges(self) -> int:
        self._answer()
        return self.purges

    def wanted(self, draft: str, replica: str) -> DraftRelease | None:
        assert (draft, replica) == ("default", "replica-0")
        self._answer()
        return self.want

    def heartbeat(self, status: ReplicaStatus, ttl_s: float) -> int:
        self._answer()
        self.status = status
        self.num_heartbeats += 1
        self.ttls.add(ttl_s)
        return self.num_replicas

    def publish(self, *records: Any, once: tuple[str, int] | None = None) -> None:
        self._answer()
        if not self.takes_feed:
            raise ReplayBufferError("full")
        if once is None or self.published.get(once[0], 0) < once[1]:
            self.said += records
        if once is not None:
            self.published[once[0]] = max(once[1], self.published.get(once[0], 0))
        if not self.answers_feed:
            raise ReplayBufferError("timeout")

    def _answer(self) -> None:
        if self.is_away:
            raise ReplayBufferError("away")

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.said if isinstance(record, kind)]


class Pulled:
    """A puller between the two fakes, with a clock that is moved by hand."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.engine, self.registry, self.activity = (
            FakeEngine(self),
            FakeRegistry(),
            Activity(self.clock),
        )
        self.ranks = Ranks(self.engine.call, self.clock, self.engine.is_sleeping)
        self.speculation_client = FakeSteering()
        self.puller = DraftPuller(
            self.registry,  # type: ignore[arg-type]
            self.ranks,
            self.activity,
            name="replica-0",
            url="http://127.0.0.1:1",
            k=2,
            release=release(1),
            clock=self.clock,
            **({"speculation_client": self.speculation_client} | options),
        )

    def clock(self) -> float:
        return self.now

    async def look(self, seconds_later: float = 0.0) -> None:
        self.now += seconds_later
        await self.puller.look()


@pytest.fixture
def pulled() -> Pulled:
    return Pulled()


def num_stagings(pulled: Pulled) -> int:
    return pulled.engine.calls.count("osd_stage")


async def test_the_wanted_draft_is_swapped_in_and_reported(pulled: Pulled) -> None:
    pulled.registry.want = release(3)
    await pulled.look()
    assert pulled.engine.live == 3
    assert pulled.engine.releases == [release(3)]
    (report,) = pulled.registry.of(SwapReport)
    assert (report.replica, report.draft, report.version, report.previous) == (
        "replica-0",
        "default",
        3,
        1,
    )
    assert (report.ok, report.error, report.proved) == (True, "", True)
    assert (report.stage_s, report.pause_s) == (0.5, 0.01)
    assert report.at == pytest.approx(time.time(), abs=60)
    await pulled.look(5)
    assert num_stagings(pulled) == 1, "what serves is not swapped in again"
    pulled.registry.want = release(2)
    await pulled.look()
    assert [report.previous for report in pulled.registry.of(SwapReport)] == [1, 3], (
        "an older one is a wish as well"
    )


async def test_a_replica_whose_counters_cannot_be_read_lives_and_swaps(
    pulled: Pulled, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heartbeat says so, and goes on with the counters from before."""
    await pulled.look()
    own, is_broken = pulled.engine.call, True

    async def call(method: str, *args: Any) -> list[str]:
        if is_broken and method == "osd_report":
            return ['{"error": "KeyError: 7"}']
        return await own(method, *args)

    pulled.ranks._call = call
    pulled.activity._num_open = 1
    before = pulled.registry.num_heartbeats
    pulled.registry.want = release(3)
    for _ in range(4):
        await pulled.look(1.5)
    status = pulled.registry.status
    assert status is not None and pulled.registry.num_heartbeats - before >= 4
    assert (status.version, status.num_traces) == (3, 5)
    assert "KeyError: 7; what it counts stands still" in status.off["counters"]
    assert caplog.text.count("the heartbeat goes on") == 1
    is_broken = False
    await pulled.look(1.5)
    assert pulled.registry.status.off == {}


async def test_the_heartbeat_says_who_serves_what_and_what_the_worker_counted(
    pulled: Pulled,
) -> None:
    pulled.registry.want = release(3)
    await pulled.look()
    pulled.ranks.unproved = "cannot be read back"
    await pulled.look(1.0)
    status = pulled.registry.status
    assert status is not None
    assert (status.replica, status.draft, status.url) == (
        "replica-0",
        "default",
        "http://127.0.0.1:1",
    )
    assert (status.version, status.target_id, status.k, status.pid) == (3, "target", 2, os.getpid())
    assert (status.capture_rows, status.capture_skipped) == ({"rejected": 7}, {"opted_out": 3})
    assert (status.num_traces, status.buffer_dropped, status.num_running) == (5, {"redis": 4}, 2)
    assert status.unproved == "cannot be read back" and status.engine == names.engine_version()
    assert status.speculation == SpeculationReport(k=3, num_probes=1, split={"model": 0.25})
    assert status.started_at <= status.at == pytest.approx(time.time(), abs=60)
    assert pulled.registry.ttls == {10.0}


async def test_without_control_the_heartbeat_says_why() -> None:
    pulled = Pulled(speculation_client=None, off={"control": "its k is fixed"})
    pulled.registry.want = release(3)
    await pulled.look()
    assert pulled.engine.live == 3
    assert pulled.registry.status is not None
    assert pulled.registry.status.speculation == SpeculationReport(problem="its k is fixed")
    assert pulled.registry.status.off == {"control": "its k is fixed"}
    fixed = Pulled(speculation_client=None)
    await fixed.look()
    assert fixed.registry.status is not None and fixed.registry.status.speculation is None


async def test_the_heartbeat_names_the_parts_that_are_off(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COUNTERS, "off", {"capture": "the hook failed"})
    monkeypatch.setitem(COUNTERS, "awake", "the engine schedules asynchronously")
    await pulled.look()
    status = pulled.registry.status
    assert status is not None and status.off == {"capture": "the hook failed"}
    assert status.speculation is not None
    assert status.speculation.left_out == {"sleep": "the engine schedules asynchronously"}


async def test_without_swap_no_draft_is_staged_and_the_heartbeat_says_why() -> None:
    pulled = Pulled(off={"swap": "a name is gone"})
    pulled.registry.want = release(3)
    await pulled.look()
    assert pulled.engine.releases == [] and pulled.engine.live != 3
    assert pulled.registry.status is not None
    assert pulled.registry.status.off == {"swap": "a name is gone"}


async def test_control_hears_of_a_swap_and_of_no_other(pulled: Pulled) -> None:
    pulled.engine.refused = {2}
    for version, error, restarts in ((2, "", []), (3, "", [3]), (4, "out of memory", [3])):
        pulled.registry.want, pulled.engine.commit_error = release(version), error
        await pulled.look()
        assert pulled.speculation_client.restarts == restarts


async def test_a_commit_that_fails_leaves_what_serves_and_is_tried_again(pulled: Pulled) -> None:
    pulled.registry.want, pulled.engine.commit_error = release(2), "out of memory"
    await pulled.look()
    (report,) = pulled.registry.of(SwapReport)
    error = "v2: loading failed, the previous draft was restored: out of memory"
    assert (report.ok, report.error, report.pause_s, report.proved) == (False, error, 0.01, False)
    assert (report.version, report.previous) == (2, 1)
    assert pulled.registry.status is not None and pulled.registry.status.version == 1
    pulled.engine.commit_error = ""
    await pulled.look(0.99)
    assert pulled.engine.live == 1
    await pulled.look(0.01)
    assert pulled.engine.live == 2


async def test_a_replica_that_lost_its_version_is_brought_back_to_it(pulled: Pulled) -> None:
    """Else it would believe that it serves what an operator rolls back to."""
    pulled.registry.want, pulled.engine.confirm_error = release(2), "out of memory"
    await pulled.look()
    assert pulled.registry.status is not None and pulled.registry.status.version == 0
    pulled.registry.want, pulled.engine.confirm_error = release(1), ""
    await pulled.look()
    assert pulled.engine.live == 1 and pulled.registry.status.version == 1
    assert [r.version for r in pulled.engine.releases] == [2, 1]


async def test_after_a_success_what_was_refused_before_need_not_wait(pulled: Pulled) -> None:
    pulled.registry.want, pulled.engine.refused = release(2), {2}
    await pulled.look()
    for version in (3, 2):
        pulled.registry.want, pulled.engine.refused = release(version), set()
        await pulled.look()
        assert pulled.engine.live == version


@pytest.mark.parametrize("sleeps", [True, RuntimeError("Engines returned different results")])
async def test_a_swap_waits_until_the_engine_is_awake(
    pulled: Pulled, sleeps: bool | Exception
) -> None:
    """While it sleeps (vLLM's /sleep) it has no memory to put a draft into."""
    pulled.registry.want, pulled.engine.sleeps = release(2), sleeps
    for _ in range(3):
        await pulled.look(1.0)
    assert num_stagings(pulled) == 0 and pulled.registry.of(SwapReport) == []
    assert pulled.registry.num_heartbeats == 3
    pulled.engine.sleeps = False
    await pulled.look(1.0)
    assert pulled.engine.live == 2


async def test_staging_is_waited_for_while_reports_go_on(pulled: Pulled) -> None:
    pulled.registry.want, pulled.engine.seconds_to_stage = release(2), 500.0
    await pulled.look()
    assert pulled.engine.live == 2 and num_stagings(pulled) == 1
    assert pulled.registry.num_heartbeats >= 5


async def test_staging_that_takes_ten_minutes_is_given_up(pulled: Pulled) -> None:
    pulled.registry.want, pulled.engine.seconds_to_stage = release(2), 601.0
    await pulled.look()
    (report,) = pulled.registry.of(SwapReport)
    assert (report.ok, report.error, report.proved, report.pause_s) == (
        False,
        "staging took too long",
        False,
        0.0,
    )
    assert pulled.engine.live == 1 and "osd_put" not in pulled.engine.calls
    assert pulled.now == 1600.0


async def test_a_report_is_due_every_second(pulled: Pulled) -> None:
    await pulled.look()
    for seconds, num in ((0.5, 1), (0.49, 1), (0.01, 2), (0.99, 2), (5.0, 3), (0.5, 3)):
        await pulled.look(seconds)
        assert pulled.registry.num_heartbeats == num


async def test_a_swap_is_reported_at_once(pulled: Pulled) -> None:
    await pulled.look()
    await pulled.look(0.9)
    assert pulled.registry.num_heartbeats == 1
    pulled.registry.want = release(2)
    await pulled.look()
    assert len(pulled.registry.of(SwapReport)) == 1
    assert pulled.registry.status is not None and pulled.registry.status.version == 2


async def test_a_draft_of_another_target_is_left_alone(pulled: Pulled) -> None:
    pulled.registry.want = release(3, target_id="other")
    await pulled.look()
    assert pulled.engine.live == 1 and "osd_stage" not in pulled.engine.calls


async def test_a_refused_draft_is_tried_again_later_and_later(pulled: Pulled) -> None:
    pulled.registry.want = release(2)
    pulled.engine.refused = {2}
    tried_at: list[float] = []
    for _ in range(200):
        before = pulled.engine.calls.count("osd_stage")
        await pulled.look(1.0)
        if pulled.engine.calls.count("osd_stage") > before:
            tried_at.append(pulled.now - 1001)
    assert tried_at == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert pulled.engine.live == 1
    assert all(
        not r.ok and r.error == "does not fit" and r.pause_s == 0
        for r in pulled.registry.of(SwapReport)
    )
    pulled.registry.want = release(4)
    await pulled.look()
    assert pulled.engine.live == 4, "a better one need not wait"


async def test_what_was_to_be_said_waits_for_redis(pulled: Pulled) -> None:
    await pulled.look()
    pulled.registry.is_away, pulled.registry.want = True, release(2)
    for _ in range(2):
        await pulled.look(1.0)
    assert pulled.engine.live == 1, "it serves on with what it has"
    pulled.registry.is_away, pulled.registry.takes_feed = False, False
    await pulled.look(1.0)
    pulled.registry.takes_feed = True
    await pulled.look(1.0)
    await pulled.look(1.0)
    assert [window.at for window in pulled.registry.of(SpecWindow)] == [1.0, 2.0, 3.0], (
        "each once, in order"
    )
    assert len(pulled.registry.of(SwapReport)) == 1


async def test_what_redis_took_without_an_answer_in_time_is_said_once(pulled: Pulled) -> None:
    pulled.activity.is_always, pulled.registry.answers_feed = True, False
    for _ in range(3):
        await pulled.look(1.0)
    assert [window.at for window in pulled.registry.of(SpecWindow)] == [1.0]
    pulled.registry.answers_feed = True
    await pulled.look(1.0)
    assert [window.at for window in pulled.registry.of(SpecWindow)] == [1.0, 2.0, 3.0, 4.0], (
        "each once, in order"
    )


async def test_what_waits_is_bounded_and_the_oldest_leaves_first(pulled: Pulled) -> None:
    pulled.engine.windows_at_once = 1500
    await pulled.look()
    pulled.registry.is_away = True
    for _ in range(2):
        await pulled.look(1.0)
    pulled.registry.said.clear()
    pulled.registry.is_away = False
    await pulled.look(1.0)
    assert [window.at for window in pulled.registry.of(SpecWindow)] == [
        float(i) for i in range(2501, 4501)
    ]


async def test_an_idle_engine_is_not_asked_but_still_beats(pulled: Pulled) -> None:
    await pulled.look()
    pulled.registry.status = None
    num_asked = pulled.engine.calls.count("osd_report")
    await pulled.look(60)
    assert pulled.engine.calls.count("osd_report") == num_asked
    assert pulled.registry.status is not None


async def ask(activity: Activity, app: Any, **scope: str) -> None:
    await activity.watching(app)({"type": "http", "method": "POST"} | scope, None, None)


async def test_an_engine_is_active_while_it_answers_and_three_seconds_longer(
    pulled: Pulled,
) -> None:
    activity = pulled.activity
    during: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pulled.now += 100  # a long stream
        during.append(activity.is_recent())

    assert activity.is_recent(), "it has just been started"
    await ask(activity, app, method="GET", path="/health")
    await ask(activity, app, method="GET", path="/v1/models")
    await ask(activity, app, type="lifespan")
    assert not activity.is_recent(), "a health check is no work"
    await ask(activity, app)
    assert during == [False, False, False, True]
    pulled.now += 3
    await ask(activity, app, type="websocket")
    pulled.now += 3
    await ask(activity, app, method="GET", path="/v1/responses/7")
    assert during[4:] == [True, True]
    pulled.now += 2.99
    assert activity.is_recent()
    pulled.now += 0.01
    assert not activity.is_recent()


async def test_what_clients_wait_for_is_counted_with_the_time_it_takes(pulled: Pulled) -> None:
    activity = pulled.activity
    open_now: list[int] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        pulled.now += 2
        open_now.append(activity.num_open)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        pulled.now += 10
        await ask(activity, inner)
        assert activity.open_seconds() == 10 + 2 * 2
        pulled.now += 1

    pulled.now += 50
    await ask(activity, outer)
    pulled.now += 50
    assert open_now == [2]
    assert (activity.num_open, activity.open_seconds()) == (0, 15)
    await pulled.look(1)
    assert pulled.registry.status is not None
    assert (pulled.registry.status.num_open, pulled.registry.status.open_seconds) == (0, 15)
    assert pulled.registry.status.may_try, "it asks for what it is to serve first"


async def test_among_many_windows_wait_and_none_is_lost_at_the_end(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.pull.time.time", lambda: 12.0)  # soon after those of the fake
    pulled.registry.num_replicas = 256
    await pulled.look()
    pulled.registry.said.clear()
    for _ in range(3):
        await pulled.look(1.0)
    assert pulled.registry.of(SpecWindow) == []
    await pulled.puller.finish()
    (window,) = pulled.registry.of(SpecWindow)
    assert window.num_drafts >= 3
    pulled.registry.said.clear()
    await pulled.puller.finish()
    assert len(pulled.registry.of(SpecWindow)) <= 1


async def test_what_is_on_its_way_when_the_replica_stops_is_sent_once(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pulled.look()
    pulled.registry.said.clear()
    publish, may_go = pulled.registry.publish, threading.Event()

    def slowly(*records: Any, **options: Any) -> None:
        may_go.wait(5)
        publish(*records, **options)

    monkeypatch.setattr(pulled.registry, "publish", slowly)
    looking = asyncio.create_task(pulled.look(1.0))
    await asyncio.sleep(0.2)
    looking.cancel()
    may_go.set()
    await pulled.puller.finish()
    ends = [window.at for window in pulled.registry.of(SpecWindow)]
    assert len(ends) == len(set(ends)) >= 1


async def test_of_two_requests_the_later_counts_and_one_that_fails_too(pulled: Pulled) -> None:
    activity = pulled.activity
    seen: list[bool] = []

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("the client has gone")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(RuntimeError):
            await ask(activity, failing)
        pulled.now += 50
        seen.append(activity.is_recent())

    await ask(activity, app)
    pulled.now += 3
    assert (seen, activity.is_recent()) == ([True], False)


# Attached


async def test_what_is_switched_off_in_an_attached_engine_is_not_done(pulled: Pulled) -> None:
    pulled.registry.want = release(2)
    pulled.puller.steps = ()
    await pulled.look(5)
    assert pulled.engine.releases == [] and "osd_report" not in pulled.engine.calls
    assert pulled.registry.status is not None and pulled.registry.status.steps == ()
    pulled.puller.steps = ("observe",)
    pulled.activity._last_at = pulled.now + 5
    await pulled.look(5)
    assert pulled.engine.releases == [] and "osd_report" in pulled.engine.calls
    pulled.puller.steps = ("observe", "swap")
    await pulled.look(5)
    assert pulled.engine.live == 2
    assert await pulled.puller.turn_to(release(1))
    assert pulled.engine.live == 1


async def test_what_was_purged_is_forgotten_once_and_until_it_is(pulled: Pulled) -> None:
    asked = pulled.speculation_client.forgotten
    await pulled.look()
    assert asked == [True], "whatever was purged before it came"
    await pulled.look(5)
    pulled.registry.purges += 1
    pulled.speculation_client.answers = False
    await pulled.look(5)
    await pulled.look(5)
    pulled.speculation_client.answers = True
    await pulled.look(5)
    await pulled.look(5)
    assert asked == [True, False, False, True]
    pulled.registry.is_away = True
    await pulled.look(5)
    pulled.registry.is_away, pulled.registry.purges = False, 0  # a Redis that lost its numbers
    await pulled.look(5)
    assert asked == [True, False, False, True, True]


class FakeWarming:
    """Needs `left` parts, of some seconds each, and hears for which purges the engine forgot."""

    def __init__(self, left: int, pulled: Pulled | None = None) -> None:
        self.left, self.pulled = left, pulled
        self.heard: list[int | None] = []

    @property
    def is_done(self) -> bool:
        return not self.left

    async def go_on(self, num_purges: int | None) -> None:
        self.heard.append(num_purges)
        assert self.pulled is not None
        self.pulled.now += 1.0
        if num_purges is not None:
            self.left = max(0, self.left - 1)


def warmed(left: int) -> tuple[Pulled, FakeWarming]:
    warming = FakeWarming(left)
    warming.pulled = Pulled(warming=warming)
    return warming.pulled, warming


async def test_a_memory_is_filled_before_the_first_request_and_once_the_engine_forgot() -> None:
    pulled, warming = warmed(3)
    await pulled.puller.warm(60.0)
    assert warming.heard == [7, 7, 7]
    assert pulled.speculation_client.forgotten == [True]
    await pulled.look(5)
    assert pulled.speculation_client.forgotten == [True], "it does not forget what came since"


async def test_what_there_was_no_time_for_comes_while_it_serves() -> None:
    pulled, warming = warmed(5)
    await pulled.puller.warm(1.5)
    assert warming.heard == [7, 7]
    for _ in range(3):
        await pulled.look()
    assert warming.is_done


async def test_while_redis_is_away_no_engine_waits_for_its_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pulled, warming = warmed(3)
    pulled.registry.is_away = True
    await pulled.puller.warm(60.0)
    await pulled.look(5)
    assert warming.left == 3
    assert [record.message for record in caplog.records] == [
        "the memory begins empty: Redis is away, or the engine does not answer"
    ]
    pulled.registry.is_away = False
    await pulled.look(5)
    assert warming.left == 2


async def test_an_engine_without_control_has_nothing_to_forget() -> None:
    pulled = Pulled(speculation_client=None)
    await pulled.look()
    await pulled.look(5)
    assert pulled.registry.num_heartbeats == 2
