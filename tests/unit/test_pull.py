"""A replica's pull loop against a hand-written engine and registry: what is swapped in, and what is said about it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from osd.errors import ReplayBufferError
from osd.records import DraftRelease, ReplicaStatus, SpecWindow, SwapReport, decode
from serving.pull import Activity, DraftPuller


def release(version: int, target_id: str = "target") -> DraftRelease:
    return DraftRelease(
        version=version, parent=version - 1, path=f"/v{version}", sha256="ab", target_id=target_id, created_at=0.0
    )


class FakeEngine:
    """Answers as the worker extension does. Versions in `refused` fail to stage."""

    def __init__(self) -> None:
        self.live, self.staged = 1, 0
        self.refused: set[int] = set()
        self.calls: list[str] = []
        self.num_windows = 0

    async def rpc(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if method == "osd_stage":
            self.staged = decode(args[0], DraftRelease).version
            return None
        if method == "osd_staging":
            error = "does not fit" if self.staged in self.refused else ""
            return json.dumps({"done": True, "error": error, "seconds": 0.5})
        if method == "osd_commit":
            assert args == (self.staged,) and self.staged not in self.refused
            self.live = self.staged
            return json.dumps({"pause_s": 0.01, "error": ""})
        assert method == "osd_report"
        self.num_windows += 1
        report = {"windows": [self._window()], "rows": {"rejected": 7}, "skipped": {}, "num_traces": 5, "dropped": {}}
        report |= {"num_running": 2}
        return msgspec.json.encode(report)

    def _window(self) -> SpecWindow:
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


class FakeRegistry:
    """Remembers what it was told. `is_away` stands for a Redis that cannot be reached."""

    def __init__(self) -> None:
        self.want: DraftRelease | None = None
        self.said: list[Any] = []
        self.status: ReplicaStatus | None = None
        self.is_away = False

    def wanted(self, draft: str) -> DraftRelease | None:
        self._answer()
        return self.want

    def heartbeat(self, status: ReplicaStatus, ttl_s: float) -> None:
        self._answer()
        self.status = status

    def publish(self, *records: Any) -> None:
        self._answer()
        self.said += records

    def _answer(self) -> None:
        if self.is_away:
            raise ReplayBufferError("away")

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.said if isinstance(record, kind)]


class Pulled:
    """A puller between the two fakes, with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine, self.registry, self.activity = FakeEngine(), FakeRegistry(), Activity(self.clock)
        self.puller = DraftPuller(
            self.registry,  # type: ignore[arg-type]
            self.engine.rpc,
            self.activity,
            name="replica-0",
            url="http://127.0.0.1:1",
            k=2,
            release=release(1),
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    async def look(self, seconds_later: float = 0.0) -> None:
        self.now += seconds_later
        await self.puller.look()


@pytest.fixture
def pulled() -> Pulled:
    return Pulled()


async def test_the_wanted_draft_is_swapped_in_and_reported(pulled: Pulled) -> None:
    pulled.registry.want = release(3)
    await pulled.look()
    assert pulled.engine.live == 3
    (report,) = pulled.registry.of(SwapReport)
    assert (report.version, report.previous, report.ok) == (3, 1, True)
    assert (report.stage_s, report.pause_s) == (0.5, 0.01)
    status = pulled.registry.status
    assert status is not None and (status.version, status.capture_rows, status.num_running) == (3, {"rejected": 7}, 2)
    assert status.num_traces == 5
    num_calls = pulled.engine.calls.count("osd_stage")
    await pulled.look(5)
    assert pulled.engine.calls.count("osd_stage") == num_calls, "what serves is not swapped in again"


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
    assert all(not r.ok and r.error == "does not fit" and r.pause_s == 0 for r in pulled.registry.of(SwapReport))
    pulled.registry.want = release(4)
    await pulled.look()
    assert pulled.engine.live == 4, "a better one need not wait"


async def test_what_was_to_be_said_waits_for_redis(pulled: Pulled) -> None:
    await pulled.look()
    pulled.registry.is_away = True
    for _ in range(2):
        await pulled.look(1.0)
    pulled.registry.is_away = False
    await pulled.look(1.0)
    assert [window.at for window in pulled.registry.of(SpecWindow)] == [1.0, 2.0, 3.0], "each once, in order"


async def test_an_idle_engine_is_not_asked_but_still_beats(pulled: Pulled) -> None:
    await pulled.look()
    pulled.registry.status = None
    num_asked = pulled.engine.calls.count("osd_report")
    await pulled.look(60)
    assert pulled.engine.calls.count("osd_report") == num_asked
    assert pulled.registry.status is not None

    during: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pulled.now += 100  # a long stream
        during.append(pulled.activity.is_recent())

    watched = pulled.activity.watching(app)
    await watched({"type": "http", "method": "GET"}, None, None)
    assert not pulled.activity.is_recent(), "a health check is no work"
    await watched({"type": "http", "method": "POST"}, None, None)
    assert during == [False, True]
    pulled.now += 2
    assert pulled.activity.is_recent()
    pulled.now += 2
    assert not pulled.activity.is_recent()
