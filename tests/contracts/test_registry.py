"""The registry against a real server.

It loses nothing while the server lives, and raises one kind of error only.
"""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffers.embedded import EmbeddedValkey
from osd.errors import ConfigError, ReplayBufferError
from osd.exchange.registry import FeedRecord, Registry
from osd.records import (
    Canary,
    DraftRelease,
    Event,
    MetricPoint,
    Place,
    ReplicaStatus,
    RoundOutcome,
    SpecWindow,
    SwapReport,
    encode,
)
from tests.support import servers

RELEASE = DraftRelease(
    version=4, parent=3, path="/data/v000004", sha256="ab12", target_id="9f2c", created_at=1.7e9
)


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
def registry(server: EmbeddedValkey) -> Iterator[Registry]:
    """Of the deployment `here`, of which nothing is stored yet."""
    registry = Registry(server.url, "here")
    yield registry
    registry.close()
    with servers.admin(server) as client:
        client.flushall()


@pytest.fixture
def raw(server: EmbeddedValkey) -> Iterator[Any]:
    with servers.admin(server) as client:
        yield client


def test_replicas_are_listed_by_name_while_they_beat(registry: Registry, raw: Any) -> None:
    assert registry.replicas() == []
    first, second = status("replica-1"), status("replica-0", version=3)
    registry.heartbeat(first, ttl_s=30)
    registry.heartbeat(second, ttl_s=30)
    assert registry.replicas() == [second, first]
    raw.delete("osd:here:replica:replica-0")  # as when it has expired
    assert registry.replicas() == [first]
    assert raw.smembers("osd:here:replicas") == {b"replica-1"}, (
        "whoever is gone is asked for no more"
    )
    registry.heartbeat(second, ttl_s=30)
    assert registry.replicas() == [second, first]


def test_a_heartbeat_is_forgotten_after_its_time_and_each_one_begins_it_anew(
    registry: Registry, raw: Any
) -> None:
    key = "osd:here:replica:replica-0"
    registry.heartbeat(status("replica-0", version=3), ttl_s=500)
    assert 400_000 < raw.pttl(key) <= 500_000
    registry.heartbeat(status("replica-0", version=4), ttl_s=30.5)
    assert 20_000 < raw.pttl(key) <= 30_500
    assert [found.version for found in registry.replicas()] == [4]
    registry.heartbeat(status("replica-0"), ttl_s=0.0001)
    while raw.exists(key):
        assert raw.pttl(key) <= 1
    assert registry.replicas() == []


def test_a_heartbeat_that_cannot_be_read_hides_no_other(registry: Registry, raw: Any) -> None:
    registry.heartbeat(found := status("replica-1"), ttl_s=30)
    raw.sadd("osd:here:replicas", "replica-0", "replica-2")
    raw.mset(
        {
            "osd:here:replica:replica-0": b"\xff{",
            "osd:here:replica:replica-2": '{"replica": "replica-2"}',
        }
    )
    assert registry.replicas() == [found]


@pytest.mark.parametrize(
    "report",
    [
        7,
        "off",
        [1],
        {"plans": [1], "net": "x"},
        {"plans": {"off": {"steps": "many"}}},
        {"plans": {"draft 1": {"seconds": None}}, "decision_us": None},
        {"split": {"draft": "long"}, "by_context": {"<64": [1]}},
        {"changes": ["x", {"at": "now"}, None], "k": 1.5},
    ],
)
def test_a_report_on_speculation_that_cannot_be_read_hides_no_replica(
    registry: Registry, raw: Any, report: Any
) -> None:
    living = status("replica-0")
    fields = json.loads(encode(living)) | {"speculation": report}
    raw.sadd("osd:here:replicas", "replica-0")
    raw.set("osd:here:replica:replica-0", json.dumps(fields))
    assert registry.replicas() == [living]


def test_wanted_is_what_was_set_last_per_draft(registry: Registry, raw: Any) -> None:
    assert registry.wanted() is None
    registry.set_wanted(RELEASE)
    registry.set_wanted(other := replace(RELEASE, draft="other", version=9))
    assert registry.wanted() == RELEASE and registry.wanted("other") == other
    registry.set_wanted(newer := replace(RELEASE, version=5))
    assert registry.wanted() == newer
    assert raw.ttl("osd:here:wanted:default") == -1, "it stays although nobody says it again"
    raw.set("osd:here:wanted:default", '{"version": "newest"}')
    assert registry.wanted() is None, "as when nobody said"


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


def test_feed_passes_over_what_it_cannot_decode(registry: Registry, raw: Any) -> None:
    for _ in range(5):
        raw.xadd("osd:here:feed", {"type": "FromTheFuture", "json": "{}"})
        raw.xadd("osd:here:feed", {"type": "Event", "json": '{"at": "noon"}'})
        raw.xadd("osd:here:feed", {"type": b"\xff", "json": "{}"})
        raw.xadd("osd:here:feed", {"other": "fields"})
    assert registry.read(count=3) == []
    event = Event(at=1.0, kind="note", text="still readable")
    registry.publish(event)
    for count in (1, 3, 7, 20, 21):
        assert [record for _, record in registry.read(count=count)] == [event], (
            "a reader must not be stuck behind them"
        )


def test_what_cannot_be_decoded_does_not_look_like_the_feeds_end(
    registry: Registry, raw: Any
) -> None:
    """A part that is not whole says that there is no more."""
    events = [Event(at=float(i), kind="note", text="x") for i in range(10)]
    for event in events:
        registry.publish(event)
        raw.xadd("osd:here:feed", {"type": "FromTheFuture", "json": "{}"})
    first = registry.read(count=6)
    rest = registry.read(after=first[-1][0], count=6)
    assert [record for _, record in first] == events[:6]
    assert [record for _, record in rest] == events[6:]


def test_feed_is_read_in_parts_of_a_thousand(registry: Registry) -> None:
    registry.publish(*(MetricPoint(at=float(i), name="n", value=0.0) for i in range(1001)))
    first = registry.read()
    assert [record.at for _, record in first] == [float(i) for i in range(1000)]
    assert [record.at for _, record in registry.read(after=first[-1][0])] == [1000.0]


def test_feed_is_bounded_and_keeps_the_newest(server: EmbeddedValkey) -> None:
    registry = Registry(server.url, "bounded", feed_length=100)
    for start in range(0, 1000, 50):
        registry.publish(
            *(Event(at=float(i), kind="n", text="x") for i in range(start, start + 50))
        )
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
        assert registry.replicas() == []
        server.stop()
        for call in (
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
        assert registry.replicas() == []
        registry.close()
        server.stop()


class Deaf:
    """A server that greets; of a later command it hears the name, and then closes the connection
    (the first `num_closed` times), says nothing, or answers `answer`."""

    def __init__(self, *, num_closed: int = 0, answer: bytes = b"") -> None:
        self.heard: list[bytes] = []
        self._num_closed, self._answer = num_closed, answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0?protocol=2"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Deaf:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                if b"CLIENT\r\n" in data:
                    connection.sendall(b"+OK\r\n" * data.count(b"CLIENT\r\n"))
                    continue
                self.heard += [name for name in (b"XADD", b"MGET") if name in data]
                if len(self.heard) <= self._num_closed:
                    return
                connection.sendall(self._answer)


def test_a_connection_that_breaks_is_tried_once_more() -> None:
    with Deaf(num_closed=1, answer=b"*2\r\n$-1\r\n$-1\r\n") as server:
        assert Registry(server.url, "d").wanted() is None
        assert server.heard == [b"MGET", b"MGET"]
    with Deaf(num_closed=2, answer=b"*2\r\n$-1\r\n$-1\r\n") as server:
        with pytest.raises(ReplayBufferError):
            assert Registry(server.url, "d").wanted() is None
        assert server.heard == [b"MGET", b"MGET"]


def test_what_was_not_answered_in_time_is_not_said_again() -> None:
    """It may have been heard: the feed would have it twice."""
    with Deaf() as server:
        with pytest.raises(ReplayBufferError, match="cannot be used: Timeout reading from"):
            Registry(server.url, "d", timeout_s=0.1).publish(Event(at=1.0, kind="n", text="x"))
        assert server.heard == [b"XADD"]


def test_stale_connections_survive_a_restart(server: EmbeddedValkey, registry: Registry) -> None:
    """Connections that the server has closed since are replaced without anybody noticing."""
    registry.set_wanted(RELEASE)
    raw = servers.admin(server)
    assert raw.client_kill_filter(_type="normal", skipme=True) >= 1, "there was one to go stale"
    assert registry.wanted() == RELEASE
    raw.client_kill_filter(_type="normal", skipme=True)
    registry.publish(event := Event(at=1.0, kind="note", text="after"))
    raw.close()
    assert [record for _, record in registry.read()] == [event]


def test_user_and_password_never_show() -> None:
    registry = Registry("redis://me:s3cret@127.0.0.1:1/0", "d", timeout_s=0.2)
    with pytest.raises(
        ReplayBufferError, match="^Redis at redis://127.0.0.1:1/0 cannot be used: "
    ) as caught:
        registry.replicas()
    assert "s3cret" not in str(caught.value) and "me:" not in str(caught.value)
    for url in ("http://me:s3cret@host", "redis://me:12/s3cret@host"):
        with pytest.raises(
            ConfigError, match=r"^buffer\.redis_url=.*: not a Redis URL; give one like"
        ) as refused:
            Registry(url, "d")
        assert "s3cret" not in str(refused.value) and "me:12" not in str(refused.value)


def test_each_part_has_the_place_where_it_was_started_last(registry: Registry) -> None:
    assert registry.places() == []
    first = Place(part="trainer", host="a", node="1", log="/a.log")
    control = Place(part="control", host="b", node="2", log="/b.log")
    for place in (first, control, replace(first, host="c")):
        registry.set_place(place)
    assert registry.places() == [control, replace(first, host="c")]


WINDOW = SpecWindow(
    at=1.0,
    replica="r",
    version=2,
    seconds=1.0,
    k=2,
    num_drafts=1,
    num_draft_tokens=2,
    num_accepted_tokens=1,
    num_accepted_tokens_per_pos=(1, 0),
    num_tested_per_pos=(1, 1),
)
SWAP = SwapReport(at=2.0, replica="r", version=2, previous=1, ok=True, stage_s=0.1, pause_s=0.01)


@pytest.mark.parametrize("wrong_by", [-3600.0, -30.0, 0.0, 30.0, 3600.0])
def test_a_replica_whose_clock_is_wrong_hides_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    """What it says ended so many seconds before it was sent, which is now."""
    now = time.time()
    at = {"window": now + wrong_by - 4, "swap": now + wrong_by - 2}
    window, swap = replace(WINDOW, at=at["window"]), replace(SWAP, at=at["swap"])
    monkeypatch.setattr("osd.exchange.registry.time.time", lambda: now + wrong_by)
    registry.publish(window, swap)
    monkeypatch.undo()
    (read_window, read_swap) = [record for _, record in registry.read()]
    assert read_window.at == pytest.approx(now - 4, abs=1.5)
    assert read_swap.at == pytest.approx(now - 2, abs=1.5)
    assert [record for _, record in registry.read()] == [read_window, read_swap]
    if not wrong_by:
        assert [read_window, read_swap] == [window, swap]


def test_what_is_published_again_under_its_number_is_appended_once(
    registry: Registry, raw: Any
) -> None:
    """Whoever sent it was not answered in time."""
    for number in (1, 1, 2, 1, 2, 3):
        registry.publish(replace(SWAP, version=number), SWAP, once=("r:1.0", number))
    registry.publish(replace(SWAP, version=4), once=("other", 1))
    found = [record.version for _, record in registry.read() if isinstance(record, SwapReport)]
    assert found == [1, 2, 2, 2, 3, 2, 4]
    assert 0 < raw.ttl("osd:here:published:other") <= 86400, "nothing is left of those that ended"


def test_what_two_calls_publish_at_once_under_one_number_is_appended_once(
    registry: Registry,
) -> None:
    """The first is still on its way when it is sent again."""

    def publish() -> None:
        with suppress(ReplayBufferError):
            registry.publish(SWAP, once=("r", 1))

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record for _, record in registry.read()] == [SWAP]


def test_events_keep_the_time_they_were_given(registry: Registry) -> None:
    event = Event(at=5.0, kind="note", text="long ago")
    registry.publish(event)
    assert [record for _, record in registry.read()] == [event]


def test_a_server_whose_clock_is_wrong_changes_no_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: all others are an hour ahead of it."""
    later = time.time() + 3600
    monkeypatch.setattr("osd.exchange.registry.time.time", lambda: later)
    window = replace(WINDOW, at=later - 4)
    registry.publish(window)
    assert [record for _, record in registry.read()] == [window]


def test_the_newest_record_is_told_by_its_id(registry: Registry, raw: Any) -> None:
    assert registry.newest() == "0"
    registry.publish(*(Event(at=float(i), kind="note", text="") for i in range(3)))
    assert registry.newest() == registry.read()[-1][0]
    raw.xadd("osd:here:feed", {"type": "Event", "json": "no record"})
    assert registry.newest() > registry.read()[-1][0]


def test_one_replica_is_told_first(registry: Registry, raw: Any) -> None:
    newer = replace(RELEASE, version=5)
    assert registry.canary() is None
    registry.set_wanted(RELEASE)
    canary = Canary(replica="one", release=newer, before=RELEASE)
    registry.set_canary(canary)
    assert registry.canary() == canary
    assert registry.wanted("default", "one") == newer
    assert registry.wanted("default", "other") == registry.wanted() == RELEASE
    assert registry.wanted("other", "one") is None, "of another draft"
    raw.set("osd:here:canary:default", '{"replica": "one"}')
    assert registry.wanted("default", "one") == RELEASE and registry.canary() is None
    registry.set_canary(None)
    assert registry.wanted("default", "one") == RELEASE


def test_windows_of_replicas_that_do_not_say_when_they_sent_them_keep_their_times(
    registry: Registry, raw: Any
) -> None:
    """Of an earlier version."""
    window = replace(WINDOW, at=5.0)
    raw.xadd("osd:here:feed", {"type": "SpecWindow", "json": encode(window)})
    assert [record for _, record in registry.read()] == [window]


def test_a_server_whose_clock_was_set_back_puts_nothing_into_the_future(
    registry: Registry, raw: Any
) -> None:
    """Its ids go on from where they were."""
    now = time.time()
    ahead = f"{round(1000 * (now + 3600))}-0"
    window = replace(WINDOW, at=now, sent_at=now)
    raw.xadd("osd:here:feed", {"type": "SpecWindow", "json": encode(window)}, id=ahead)
    ((_, found),) = registry.read()
    assert found.at == pytest.approx(now, abs=2)


def test_purges_are_counted_for_all_who_ask(registry: Registry) -> None:
    assert registry.num_purges() == 0
    registry.note_purge()
    registry.note_purge()
    assert registry.num_purges() == 2
