"""The control plane alone, over a Redis that may be lost: it finds its history again."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from buffers.embedded import EmbeddedValkey
from osd.config.schema import Config
from osd.control.plane import ControlPlane, keep
from osd.exchange.registry import Registry
from osd.observe.history import History
from osd.records import SpecWindow, SwapReport
from tests.support.browser import Open
from tests.support.dashboards import write_week

TOKEN = "correct-horse"


@contextmanager
def running(
    data: Path, redis_dir: Path, looks_s: float = 0.05
) -> Iterator[tuple[ControlPlane, Registry]]:
    """A control plane that trains nothing, and the registry its replicas would write to."""
    config = Config.model_validate(
        {
            "data_dir": str(data),
            "serving": {"target": "tiny", "draft": "tiny"},
            "control": {"port": free_port(), "seconds_between_looks": looks_s},
        }
    )
    with EmbeddedValkey(redis_dir) as valkey:
        buffer = {"url": valkey.url, "deployment": config.deployment, "target_id": "9f2c"}
        plane = ControlPlane(
            config,
            redis_url=valkey.url,
            buffer_settings=buffer,
            target_id="9f2c",
            token=TOKEN,
            trainer=None,
        )
        try:
            plane.wait_ready()
            yield plane, Registry(valkey.url, config.deployment)
        finally:
            plane.stop()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(plane: ControlPlane, path: str) -> Any:
    answer = httpx.get(f"{plane.url}{path}", timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(plane: ControlPlane, path: str, holds: Any) -> Any:
    deadline = time.monotonic() + 30
    while not holds(found := get(plane, path)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def window(at: float, **fields: Any) -> SpecWindow:
    positions = {"num_accepted_tokens_per_pos": (8, 6), "num_tested_per_pos": (10, 8)}
    counts = {
        "num_drafts": 10,
        "num_draft_tokens": 20,
        "num_accepted_tokens": 14,
        "num_output_tokens": 24,
    }
    return SpecWindow(
        at=at, replica="replica-0", version=3, k=2, seconds=1.0, **positions, **counts, **fields
    )


@pytest.mark.parametrize("is_redis_lost", [True, False])
def test_history_survives_a_restart_and_the_loss_of_redis(
    tmp_path: Path, is_redis_lost: bool
) -> None:
    now = time.time()
    swap = SwapReport(
        at=now - 3000,
        replica="replica-0",
        version=3,
        previous=2,
        ok=True,
        stage_s=0.1,
        pause_s=0.01,
    )
    with running(tmp_path / "data", tmp_path / "redis") as (plane, registry):
        registry.publish(swap, *(window(now - ago, domain="sql") for ago in range(4000, 100, -10)))
        path = "/osd/history?since=-7200&bucket=60&by=class"
        before = until(
            plane, path, lambda h: sum(n or 0 for n in h["series"]["tested"]) == 390 * 18
        )
        plane._history.save()
    with running(tmp_path / "data", tmp_path / ("other" if is_redis_lost else "redis")) as (
        plane,
        registry,
    ):
        after = until(plane, path, lambda h: sum(n or 0 for n in h["series"]["tested"]) == 390 * 18)
        assert after["series"] == before["series"] and after["lines"] == before["lines"]
        assert [mark["version"] for mark in after["marks"]] == [3]
        assert [event["kind"] for event in get(plane, "/osd/events")] == ["swapped"]
        registry.publish(window(now))
        until(plane, path, lambda h: sum(n or 0 for n in h["series"]["tested"]) == 391 * 18)


def test_a_disk_that_cannot_hold_the_history_does_not_keep_it_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data" / "history.db").mkdir(parents=True)
    with running(tmp_path / "data", tmp_path / "redis") as (plane, registry):
        registry.publish(window(time.time()))
        until(plane, "/osd/history", lambda h: h["series"]["at"])
    assert "history is not kept on disk" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError("no space left"), sqlite3.OperationalError("disk I/O error")]
)
async def test_a_disk_that_refuses_for_a_while_is_said_once_and_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    class Refusing(History):
        def save(self, now: float | None = None) -> None:
            tries.append(len(tries))
            if len(tries) < 3:
                raise error

    task = asyncio.create_task(keep(Refusing(), seconds=0.01))
    while len(tries) < 5:
        assert not task.done(), task
        await asyncio.sleep(0.01)
    task.cancel()
    said = [
        message.split(":")[0] for message in caplog.messages if "history is not kept" in message
    ]
    assert said == ["history is not kept on disk", "works again"]


def test_viewers_add_no_command_to_redis_and_little_work(tmp_path: Path, visit: Open) -> None:
    """Redis is the one road between the control plane and the engines. Goal for one viewer of an
    idle service with a week behind it: 2 % of a core; printed, and bounded loosely, for the machine
    may be a slow one."""
    seconds = 4.0
    (tmp_path / "data").mkdir()
    write_week(tmp_path / "data" / "history.db")
    with running(tmp_path / "data", tmp_path / "redis", looks_s=1.0) as (plane, registry):

        def watched() -> tuple[float, float]:
            """(Redis commands a second, share of a core of this process, the control plane)"""
            commands, cpu = num_commands(registry), time.process_time()
            time.sleep(seconds)
            return (num_commands(registry) - commands) / seconds, (
                time.process_time() - cpu
            ) / seconds

        costs = [watched()]
        for viewers in (1, 9):
            for _ in range(viewers):
                # The service ends before its viewers.
                visit(f"{plane.url}/dashboard#range=7d", expect_errors=True)
            time.sleep(3)  # whoever opened a page reads it now
            costs.append(watched())
        for viewers, (commands, share) in zip((0, 1, 10), costs, strict=True):
            print(f"{viewers} viewers: {commands:.1f} Redis commands/s, {share:.1%} of a core")
        (none, idle), (one, share), (ten, _) = costs
        assert none > 0 and max(one, ten) <= 1.5 * none + 3, (
            "nine viewers would add at least one a second each"
        )
        assert share - idle < 0.5


def num_commands(registry: Registry) -> int:
    return int(registry._redis.info("stats")["total_commands_processed"])
