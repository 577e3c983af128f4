"""The Redis buffer when its server dies, hangs, is full, is too old, or holds unreadable data."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffers.embedded import EmbeddedValkey
from buffers.redis_stream import RedisTraceBuffer
from osd.errors import ReplayBufferError
from osd.exchange.registry import Registry
from osd.records import Event
from tests.support import servers
from tests.support.builders import ids, make_trace, make_traces

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
    return RedisTraceBuffer(
        url, **({"deployment": "a", "target_id": "target-a", "put_seconds": 10} | options)
    )


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


def test_while_backing_off_put_does_not_even_try(
    impatient: RedisTraceBuffer, server: EmbeddedValkey
):
    server.stop()
    for _ in range(6):
        impatient.put([make_trace()])
        time.sleep(0.12)
    seconds = [timed_put(impatient, make_traces(4))[1] for _ in range(50)]
    assert sorted(seconds)[45] < 0.001
    assert impatient.dropped == {"redis": 206}


def test_a_server_that_hangs_costs_put_less_than_a_second(
    impatient: RedisTraceBuffer, server: EmbeddedValkey
):
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
        buffer = open_buffer(
            f"redis://127.0.0.1:{silent.getsockname()[1]}/0", put_seconds=IMPATIENT
        )
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
    """`rediss://`, as a managed Redis wants it; a certificate nobody vouches for is refused in one
    line."""
    with servers.start_tls(tmp_path) as server:
        with (
            closing(open_buffer(server.trusted_url)) as buffer,
            closing(Registry(server.trusted_url, "a")) as registry,
        ):
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


def test_a_large_put_travels_in_pieces(tmp_path: Path):
    with servers.start("valkey", tmp_path) as server:
        buffer = open_buffer(server.url)
        traces = [
            make_trace(index=i, num_output=2000, num_rows=2000, top_k=64, seed=0) for i in range(30)
        ]
        assert buffer.put(traces) == 30
        assert ids(buffer.read({}, 100)[0]) == ids(traces)


def test_ping_asks_the_server_and_accepts_both_kinds(
    buffer: RedisTraceBuffer, server: EmbeddedValkey
):
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
