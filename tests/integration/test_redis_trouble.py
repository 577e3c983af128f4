"""The Redis buffer when its server dies, hangs, is full, is too old, or holds what we cannot read."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffers.codec import encode_trace
from buffers.embedded import EmbeddedValkey
from buffers.redis_stream import RedisTraceBuffer
from osd.errors import ReplayBufferError
from osd.records import Event
from osd.registry import Registry
from tests import servers
from tests.builders import ids, make_trace, make_traces

IMPATIENT = 0.4
"""Seconds that a put may take."""


@pytest.fixture(params=servers.PROGRAMS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedValkey]:
    with servers.start(request.param, tmp_path / "server", max_memory=24 << 20) as running:
        yield running


@pytest.fixture
def buffer(server: EmbeddedValkey) -> Iterator[RedisTraceBuffer]:
    with closing(open_buffer(server.url)) as buffer:
        yield buffer


@pytest.fixture
def impatient(server: EmbeddedValkey) -> Iterator[RedisTraceBuffer]:
    """For what is said of time; elsewhere a busy machine must not matter."""
    with closing(open_buffer(server.url, put_seconds=IMPATIENT)) as buffer:
        yield buffer


def open_buffer(url: str, **options: Any) -> RedisTraceBuffer:
    return RedisTraceBuffer(url, **({"deployment": "a", "target_id": "target-a", "put_seconds": 10} | options))


def timed_put(buffer: RedisTraceBuffer, traces: list) -> tuple[int, float]:
    begun = time.monotonic()
    num = buffer.put(traces)
    return num, time.monotonic() - begun


def put_until_stored(buffer: RedisTraceBuffer, traces: list, *, seconds: float = 10) -> int:
    """Put again and again; return how many puts it took."""
    deadline = time.monotonic() + seconds
    num_tries = 1
    while not buffer.put(traces):
        assert time.monotonic() < deadline, "the buffer did not recover"
        time.sleep(0.02)
        num_tries += 1
    return num_tries


READING = {
    "read": lambda b: b.read({}, 1),
    "num_unread": lambda b: b.num_unread({}),
    "skip_to_newest": lambda b: b.skip_to_newest({}, 1),
    "sample": lambda b: b.sample(1, np.random.default_rng(0), {}),
    "holdout": lambda b: b.holdout(1),
    "stats": lambda b: b.stats(),
    "purge": lambda b: b.purge(),
    "ping": lambda b: b.ping(),
}


def test_server_killed_while_putting(server: EmbeddedValkey, impatient: RedisTraceBuffer):
    num_stored, slowest = 0, 0.0
    killer = threading.Timer(0.3, servers.kill, [server])
    killer.start()
    for i in range(0, 10_000, 20):
        num, seconds = timed_put(impatient, make_traces(20, start=i))
        num_stored, slowest = num_stored + num, max(slowest, seconds)
        if impatient.dropped.get("redis", 0) >= 200:
            break
    killer.join()
    assert num_stored > 0
    assert slowest < 1
    dropped = impatient.dropped["redis"]
    assert dropped >= 200
    server.restart()
    late = make_trace(index=999_999)
    num_tries = put_until_stored(impatient, [late])
    assert impatient.dropped["redis"] == dropped + num_tries - 1
    stored = ids(impatient.read({}, 100_000)[0])
    assert num_stored <= len(stored) - 1 <= num_stored + 20
    assert stored[-1] == late.trace_id
    assert len(set(stored)) == len(stored)


def test_while_backing_off_put_does_not_even_try(impatient: RedisTraceBuffer, server: EmbeddedValkey):
    server.stop()
    for _ in range(6):
        impatient.put([make_trace()])
        time.sleep(0.12)
    seconds = [timed_put(impatient, make_traces(4))[1] for _ in range(50)]
    assert sorted(seconds)[45] < 0.001
    assert impatient.dropped == {"redis": 206}


def test_a_server_that_hangs_costs_put_less_than_a_second(impatient: RedisTraceBuffer, server: EmbeddedValkey):
    assert impatient.put([make_trace()]) == 1
    pid = servers.server_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        num, seconds = timed_put(impatient, [make_trace(index=1, domain="new")])
        assert (num, impatient.dropped) == (0, {"redis": 1})
        assert seconds < 1
        with pytest.raises(ReplayBufferError, match="imeout"):
            open_buffer(server.url, read_seconds=0.3).read({}, 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    put_until_stored(impatient, [make_trace(index=2)])


def test_a_server_busy_for_a_second_costs_no_trace_with_the_default_limit(server: EmbeddedValkey):
    buffer = RedisTraceBuffer(server.url, deployment="a", target_id="target-a")
    pid = servers.server_pid(server)
    with closing(buffer), ThreadPoolExecutor() as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            put = pool.submit(buffer.put, [make_trace()])
            time.sleep(1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (put.result(), buffer.dropped) == (1, {})


def test_a_server_that_never_answers_costs_put_less_than_a_second():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        buffer = open_buffer(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", put_seconds=IMPATIENT)
        num, seconds = timed_put(buffer, make_traces(3))
    assert (num, buffer.dropped) == (0, {"redis": 3})
    assert seconds < 1


@pytest.mark.parametrize("method", READING)
def test_reading_without_a_server_is_one_clear_line(method: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    buffer = open_buffer(f"redis://user:s3cret@127.0.0.1:{port}/0")
    with pytest.raises(ReplayBufferError) as caught:
        READING[method](buffer)
    line = str(caught.value)
    assert "\n" not in line
    assert f"redis://127.0.0.1:{port}/0" in line and "--redis-url" in line
    assert "s3cret" not in line


def test_a_wrong_password_is_never_shown(
    server: EmbeddedValkey, buffer: RedisTraceBuffer, caplog: pytest.LogCaptureFixture
):
    port = server.url.rpartition(":")[2]
    stranger = open_buffer(f"redis://:wr0ng-s3cret@127.0.0.1:{port}")
    with caplog.at_level(logging.DEBUG), pytest.raises(ReplayBufferError) as caught:
        assert stranger.put([make_trace()]) == 0
        stranger.ping()
    assert "WRONGPASS" in str(caught.value) or "invalid username-password" in str(caught.value)
    assert stranger.dropped == {"redis": 1}
    assert "traces are dropped" in caplog.text
    assert "wr0ng" not in str(caught.value) + caplog.text


def test_a_server_behind_tls(tmp_path: Path):
    """`rediss://`, as a managed Redis wants it; a certificate nobody vouches for is refused in one line."""
    with servers.start_tls(tmp_path) as server:
        with closing(open_buffer(server.trusted_url)) as buffer, closing(Registry(server.trusted_url, "a")) as registry:
            buffer.ping()
            assert buffer.put(make_traces(3)) == 3
            assert ids(buffer.read({}, 9)[0]) == ids(make_traces(3))
            registry.publish(Event(at=1.0, kind="paused", text="over TLS"))
            assert [record.text for _, record in registry.read()] == ["over TLS"]
        with closing(open_buffer(server.url)) as buffer:
            assert (buffer.put(make_traces(3)), buffer.dropped) == (0, {"redis": 3})
            with pytest.raises(ReplayBufferError, match="(?i)certificate") as caught:
                buffer.ping()
    assert "\n" not in str(caught.value) and server.password not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:6379", "http://h/0", "redis://h:port/0"])
def test_what_is_no_redis_url_is_refused(url: str):
    with pytest.raises(ReplayBufferError, match="not a Redis URL"):
        open_buffer(url)


@pytest.mark.parametrize("place", [{"deployment": "a:b"}, {"draft": "a}"}, {"target_id": ""}, {"draft": "x y"}])
def test_names_that_cannot_be_part_of_a_key_are_refused(place: dict[str, str]):
    with pytest.raises(ValueError, match=next(iter(place))):
        open_buffer("redis://127.0.0.1:1/0", **place)


def test_a_server_full_of_other_data_drops_and_counts(buffer: RedisTraceBuffer, server: EmbeddedValkey):
    assert buffer.put([make_trace()]) == 1
    with servers.admin(server) as client:
        fill(client)
        assert buffer.put(make_traces(5, start=1, domain="new")) == 0
        assert buffer.dropped == {"memory": 5}
        client.delete(*client.keys("other:*"))
    assert buffer.put([make_trace(index=9)]) == 1
    assert ids(buffer.read({}, 10)[0]) == ids([make_trace(), make_trace(index=9)])


def fill(client: Any) -> None:
    """Write until the server refuses."""
    size = 1 << 20
    for i in range(10_000):
        try:
            client.set(f"other:{i}", b"x" * size)
        except Exception as error:  # noqa: BLE001
            assert "OOM" in str(error) or "maxmemory" in str(error)
            size //= 4
            if not size:
                return


def test_a_server_full_of_traces_lets_the_oldest_go(server: EmbeddedValkey):
    """More traces than memory holds, well before max_traces: the newest are taken all the same, in every domain."""
    old = open_buffer(server.url, target_id="replaced")
    old.put(make_traces(500, start=10_000, target_id="replaced", num_output=400, num_rows=100, top_k=64))
    buffer = open_buffer(server.url)
    num_stored = 0
    for i in range(0, 1500, 20):
        num_stored += buffer.put(make_traces(20, start=i, domain="abc"[i % 3], num_output=400, num_rows=100, top_k=64))
    assert num_stored == 1500
    assert buffer.dropped == {}
    stats = buffer.stats()
    assert 64 < stats.num_traces < 1000
    newest = ids(buffer.read(buffer.skip_to_newest({}, 20), 20)[0])
    assert newest == ids(make_traces(20, start=1480))
    assert old.stats().num_traces < 500


def test_entries_that_cannot_be_read_are_skipped_and_counted(buffer: RedisTraceBuffer, server: EmbeddedValkey):
    good = make_traces(6, domain="code")
    buffer.put(good[:2])
    key = "osd:a:{default:code}:target-a:train"
    newer = bytearray(encode_trace(make_trace())[:-4])
    struct.pack_into("<H", newer, 4, 77)
    bad = [bytes(newer) + struct.pack("<I", zlib.crc32(newer)), b"rubbish", b""]
    with servers.admin(server) as client:
        last = int(client.xinfo_stream(key)["last-generated-id"].split(b"-")[0])
        for i, payload in enumerate(bad):
            client.xadd(key, {"t": "x", "p": payload}, id=f"{last + 1 + i}-0")
        client.xadd(key, {"strange": "fields"}, id=f"{last + 4}-0")
    buffer.put(good[2:])
    with servers.admin(server) as client:
        client.xadd(key, {"t": "5", "p": b"rubbish at the end"}, id=f"{last + 9}-0")
    assert buffer.num_unread({}) == 11
    traces, cursor = buffer.read({}, 6)
    assert ids(traces) == ids(good)
    assert buffer.dropped == {"schema": 1, "corrupt": 4}
    assert buffer.num_unread(cursor) == 0
    assert buffer.read(cursor, 6) == ([], cursor)
    assert sorted(ids(buffer.sample(11, np.random.default_rng(0), cursor))) == sorted(ids(good))
    assert buffer.stats().dropped == {"schema": 2, "corrupt": 8}
    assert buffer.num_unread(buffer.skip_to_newest({}, 3)) == 3
    assert buffer.stats().oldest_at == good[0].finished_at


def test_scripts_are_sent_again_to_a_server_that_forgot_them(buffer: RedisTraceBuffer, server: EmbeddedValkey):
    buffer.put([make_trace()])
    with servers.admin(server) as client:
        client.script_flush()
    assert buffer.put(make_traces(3, start=1, domain="code")) == 3
    with servers.admin(server) as client:
        client.script_flush()
    assert len(buffer.read({}, 10)[0]) == 4
    assert buffer.dropped == {}


def test_data_lost_with_the_server_does_not_hide_what_comes_after(buffer: RedisTraceBuffer, server: EmbeddedValkey):
    buffer.put(make_traces(500))
    _, cursor = buffer.read({}, 1000)
    with servers.admin(server) as client:
        client.flushall()
    buffer.put(make_traces(3, start=500))
    assert buffer.num_unread(cursor) == 3
    assert ids(buffer.read(cursor, 10)[0]) == ids(make_traces(3, start=500))


def test_ids_are_dense_and_the_hash_tag_holds_draft_and_domain(buffer: RedisTraceBuffer, server: EmbeddedValkey):
    for i in range(0, 90, 9):
        buffer.put(make_traces(9, start=i, domain="code"))
    with servers.admin(server) as client:
        entry_ids = [entry_id for entry_id, _ in client.xrange("osd:a:{default:code}:target-a:train")]
        sequence = [int(entry_id.removesuffix(b"-0")) for entry_id in entry_ids]
    assert sequence == list(range(sequence[0], sequence[0] + 90))


def test_a_large_put_travels_in_pieces(tmp_path: Path):
    with servers.start("valkey", tmp_path) as server:
        buffer = open_buffer(server.url)
        traces = [make_trace(index=i, num_output=2000, num_rows=2000, top_k=64, seed=0) for i in range(30)]
        assert buffer.put(traces) == 30
        assert ids(buffer.read({}, 100)[0]) == ids(traces)


def test_traces_that_cannot_be_encoded_are_dropped_and_counted(buffer: RedisTraceBuffer):
    assert buffer.put([make_trace(finished_at=float("nan")), make_trace(index=1)]) == 1
    assert buffer.dropped == {"invalid": 1}


def test_purge_of_all_targets(server: EmbeddedValkey, buffer: RedisTraceBuffer):
    other = open_buffer(server.url, target_id="target-b")
    neighbour = open_buffer(server.url, deployment="b")
    buffer.put(make_traces(3, domain="code"))
    other.put(make_traces(4, target_id="target-b", domain="chat"))
    neighbour.put(make_traces(5))
    assert buffer.purge(all_targets=True) == 7
    assert neighbour.stats().num_traces == 5
    with servers.admin(server) as client:
        assert client.keys("osd:a:*") == []


def test_a_server_too_old_is_refused():
    """A server that answers like Redis 6.2 (hand-written: no such server is at hand)."""
    info = b"# Server\r\nredis_version:6.2.14\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_info, args=(listener, info), daemon=True).start()
        with pytest.raises(ReplayBufferError, match="6.2.14 is too old; use Redis 7.0 or later"):
            open_buffer(f"redis://127.0.0.1:{listener.getsockname()[1]}").ping()


def answer_info(listener: socket.socket, info: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65536):
            if b"INFO\r\n" in data:
                data = data.replace(b"INFO\r\n", b"", 1)
                connection.sendall(b"$%d\r\n%s\r\n" % (len(info), info))
            else:
                connection.sendall(b"+OK\r\n" * data.count(b"CLIENT\r\n"))


def test_ping_asks_the_server_and_accepts_both_kinds(buffer: RedisTraceBuffer, server: EmbeddedValkey):
    with servers.admin(server) as client:
        before = client.info("stats")["total_connections_received"]
        buffer.ping()
        assert client.info("stats")["total_connections_received"] == before + 1
    server.stop()
    with pytest.raises(ReplayBufferError, match="--redis-url"):
        buffer.ping()
    server.restart()
    buffer.ping()
    assert buffer.put([make_trace()]) == 1, "what ping accepts also stores"
