"""The registry against a real server: nothing said is lost while it lives, and nothing but one error leaves it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffers.embedded import EmbeddedValkey
from osd.errors import ConfigError, ReplayBufferError
from osd.records import DraftRelease, Event, MetricPoint, ReplicaStatus, RoundOutcome, SpecWindow, SwapReport
from osd.registry import FeedRecord, Registry, mask_password

RELEASE = DraftRelease(version=4, parent=3, path="/data/v000004", sha256="ab12", target_id="9f2c", created_at=1.7e9)


def status(name: str, version: int = 4) -> ReplicaStatus:
    return ReplicaStatus(
        at=time.time(),
        replica=name,
        url="http://127.0.0.1:8000",
        version=version,
        target_id="9f2c",
        k=4,
        pid=1,
        started_at=1.7e9,
        engine="fake",
        capture_rows={"rejected": 7},
    )


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with (
        tempfile.TemporaryDirectory(prefix="osd") as directory,
        EmbeddedValkey(Path(directory), 32 << 20) as valkey,
    ):
        yield valkey


@pytest.fixture
def registry(server: EmbeddedValkey, request: pytest.FixtureRequest) -> Iterator[Registry]:
    registry = Registry(server.url, request.node.name)
    yield registry
    registry.close()


def test_replicas_are_listed_while_they_beat(registry: Registry) -> None:
    assert registry.replicas() == []
    first, second = status("replica-1"), status("replica-0", version=3)
    registry.heartbeat(first, ttl_s=30)
    registry.heartbeat(second, ttl_s=0.05)
    assert registry.replicas() == [second, first]
    time.sleep(0.15)
    assert registry.replicas() == [first]
    registry.heartbeat(second, ttl_s=30)
    assert registry.replicas() == [second, first]


def test_wanted_is_what_was_set_last_per_draft(registry: Registry) -> None:
    assert registry.wanted() is None
    registry.set_wanted(RELEASE)
    assert registry.wanted() == RELEASE
    assert registry.wanted("other") is None


def test_deployments_do_not_meet(server: EmbeddedValkey, registry: Registry) -> None:
    registry.set_wanted(RELEASE)
    registry.publish(Event(at=1.0, kind="note", text="mine"))
    stranger = Registry(server.url, "stranger")
    assert stranger.wanted() is None
    assert stranger.read() == []
    stranger.close()


def test_feed_returns_every_kind_in_order_and_continues_where_left(registry: Registry) -> None:
    records: list[FeedRecord] = [
        SpecWindow(
            at=1.0,
            replica="r",
            version=1,
            seconds=1.0,
            k=2,
            num_drafts=2,
            num_draft_tokens=4,
            num_accepted_tokens=3,
            num_accepted_tokens_per_pos=(2, 1),
            num_tested_per_pos=(2, 2),
        ),
        SwapReport(at=2.0, replica="r", version=2, previous=1, ok=True, stage_s=0.1, pause_s=0.01),
        Event(at=3.0, kind="published", text="v2", version=2),
        RoundOutcome(
            base_version=1,
            path="/x",
            num_steps=1,
            num_tokens=2,
            loss_first=2.0,
            loss_last=1.0,
            seconds=0.5,
            trace_age_mean_s=1.0,
            trace_age_max_s=2.0,
            eval=None,
        ),
        MetricPoint(at=4.0, name="alpha", value=0.5),
    ]
    registry.publish(*records)
    first = registry.read(count=2)
    rest = registry.read(after=first[-1][0])
    assert [record for _, record in first + rest] == records
    assert registry.read(after=rest[-1][0]) == []
    registry.publish(records[2])
    assert [record for _, record in registry.read(after=rest[-1][0])] == [records[2]]


def test_feed_passes_over_what_it_cannot_decode(server: EmbeddedValkey, registry: Registry) -> None:
    raw = redis.Redis.from_url(server.url)
    feed = "osd:test_feed_passes_over_what_it_cannot_decode:feed"
    for _ in range(5):
        raw.xadd(feed, {"type": "FromTheFuture", "json": "{}"})
        raw.xadd(feed, {"type": "Event", "json": '{"at": "noon"}'})
        raw.xadd(feed, {"other": "fields"})
    event = Event(at=1.0, kind="note", text="still readable")
    registry.publish(event)
    assert [record for _, record in registry.read(count=2)] == [event], "a reader must not be stuck behind them"
    raw.close()


def test_feed_is_bounded_and_keeps_the_newest(server: EmbeddedValkey) -> None:
    registry = Registry(server.url, "bounded", feed_length=100)
    for start in range(0, 1000, 50):
        registry.publish(*(Event(at=float(i), kind="n", text="x") for i in range(start, start + 50)))
    kept = [record.at for _, record in registry.read(count=2000) if isinstance(record, Event)]
    assert 100 <= len(kept) < 300
    assert kept == [float(i) for i in range(1000 - len(kept), 1000)]
    registry.close()


def test_threads_share_one_registry(registry: Registry) -> None:
    def publish(writer: int) -> None:
        for i in range(50):
            registry.publish(MetricPoint(at=float(i), name=str(writer), value=0.0))

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [record for _, record in registry.read() if isinstance(record, MetricPoint)]
    for writer in range(4):
        assert [r.at for r in records if r.name == str(writer)] == [float(i) for i in range(50)]


def test_server_gone_is_one_error_and_its_return_is_noticed() -> None:
    with tempfile.TemporaryDirectory(prefix="osd") as directory:
        server = EmbeddedValkey(Path(directory), 32 << 20).start()
        registry = Registry(server.url, "gone")
        registry.ping()
        server.stop()
        for call in (
            registry.ping,
            registry.replicas,
            registry.wanted,
            registry.read,
            lambda: registry.set_wanted(RELEASE),
            lambda: registry.heartbeat(status("r"), 1.0),
            lambda: registry.publish(Event(at=1.0, kind="n", text="x")),
        ):
            with pytest.raises(ReplayBufferError) as caught:
                call()
            assert "\n" not in str(caught.value)
        server.restart()
        registry.ping()
        registry.close()
        server.stop()


def test_stale_connections_survive_a_restart(server: EmbeddedValkey, registry: Registry) -> None:
    """Connections that the server has closed since are replaced without anybody noticing."""
    registry.set_wanted(RELEASE)
    raw = redis.Redis.from_url(server.url)
    assert raw.client_kill_filter(_type="normal", skipme=True) >= 1, "there was one to go stale"
    assert registry.wanted() == RELEASE
    raw.client_kill_filter(_type="normal", skipme=True)
    registry.publish(event := Event(at=1.0, kind="note", text="after"))
    raw.close()
    assert [record for _, record in registry.read()] == [event]


def test_password_never_shows() -> None:
    registry = Registry("redis://me:s3cret@127.0.0.1:1/0", "d", timeout_s=0.2)
    with pytest.raises(ReplayBufferError) as caught:
        registry.ping()
    assert "s3cret" not in str(caught.value)
    assert "redis://me:***@127.0.0.1:1/0" in str(caught.value)
    assert mask_password("unix:///run/v.sock?db=0&password=s3cret") == "unix:///run/v.sock?db=0&password=***"
    with pytest.raises(ConfigError, match=r"buffer\.redis_url=http://:\*\*\*@host"):
        Registry("http://:s3cret@host", "d")
