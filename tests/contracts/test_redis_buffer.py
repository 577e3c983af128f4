"""What the buffer on a server promises beyond the protocol.

What it counts, what it leaves behind, and what it survives.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffers import scripts
from buffers.codec import encode_trace
from buffers.embedded import EmbeddedValkey
from buffers.link import Link
from buffers.redis_stream import RedisTraceBuffer
from osd.errors import ReplayBufferError
from osd.exchange.registry import Registry
from osd.observe.exposition import Totals
from osd.records import ReplicaStatus, Trace
from tests.support import servers
from tests.support.builders import ids, make_trace, make_traces

OpenBuffer = Callable[..., RedisTraceBuffer]


@pytest.fixture(scope="module", params=servers.PROGRAMS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedValkey]:
    """Small, and without an append-only file."""
    with servers.start(
        request.param, tmp_path_factory.mktemp("server"), max_memory=24 << 20
    ) as running:
        with servers.admin(running) as client:
            client.config_set("appendonly", "no")
        yield running


@pytest.fixture
def admin(server: EmbeddedValkey) -> Iterator[Any]:
    with servers.admin(server) as client:
        client.flushall()
        yield client


@pytest.fixture
def open_buffer(server: EmbeddedValkey, admin: Any) -> Iterator[OpenBuffer]:
    with ExitStack() as stack:

        def open_one(**options: Any) -> RedisTraceBuffer:
            settings = {
                "url": server.url,
                "deployment": "a",
                "target_id": "target-a",
                "put_seconds": 10,
            } | options
            buffer = RedisTraceBuffer(**settings)
            stack.callback(buffer.close)
            return buffer

        yield open_one


@pytest.fixture
def buffer(open_buffer: OpenBuffer) -> RedisTraceBuffer:
    return open_buffer()


def train(domain: str = "") -> str:
    return f"osd:a:{{default:{domain}}}:target-a:train"


def holdout(domain: str = "") -> str:
    return f"osd:a:{{default:{domain}}}:target-a:holdout"


# -- what cannot be read --------------------------------------------------------------------------


def of_schema(version: int) -> bytes:
    """A whole trace of another schema."""
    data = bytearray(encode_trace(make_trace())[:-4])
    struct.pack_into("<H", data, 4, version)
    return bytes(data) + struct.pack("<I", zlib.crc32(data))


def append(client: Any, stream: str, *fields: dict[str, Any]) -> None:
    """Entries behind the last of a stream."""
    last = int(client.xinfo_stream(stream)["last-generated-id"].split(b"-")[0])
    for i, entry in enumerate(fields, last + 1):
        client.xadd(stream, entry, id=f"{i}-0")


def test_what_cannot_be_read_is_passed_over_and_counted_once(
    open_buffer: OpenBuffer, admin: Any
) -> None:
    buffer = open_buffer()
    good = make_traces(6, domain="code")
    buffer.put(good[:2])
    rubbish = ({"t": "x", "p": payload} for payload in (of_schema(77), b"rubbish", b""))
    append(admin, train("code"), *rubbish, {"strange": "fields"})
    buffer.put(good[2:])
    append(admin, train("code"), {"t": "5", "p": b"rubbish at the end"})
    assert buffer.num_unread({}) == 11
    traces, cursor = buffer.read({}, 6)
    assert ids(traces) == ids(good)
    assert buffer.dropped == {"schema": 1, "corrupt": 4}
    assert buffer.num_unread(cursor) == 0 and buffer.read(cursor, 6) == ([], cursor)
    for client in (buffer, open_buffer()):
        assert sorted(ids(client.sample(11, np.random.default_rng(0), cursor))) == sorted(ids(good))
        assert len(client.read({}, 99)[0]) == 6
    assert buffer.num_unread(buffer.skip_to_newest({}, 3)) == 3
    assert buffer.stats().oldest_at == good[0].finished_at
    assert buffer.stats().dropped == buffer.dropped == {"schema": 1, "corrupt": 4}, (
        "however often it is looked at"
    )


def test_a_bad_held_out_trace_is_counted_once_in_a_deployment(
    open_buffer: OpenBuffer, admin: Any
) -> None:
    trainer, control = open_buffer(), open_buffer()
    good = make_traces(3, holdout=True)
    trainer.put(good)
    append(admin, holdout(), {"t": "5", "p": b"rubbish"}, {"t": "6", "p": of_schema(2)})
    for _ in range(3):
        assert ids(trainer.holdout(5)) == ids(good)
        assert ids(control.holdout(5)) == ids(good)
    assert (trainer.dropped, control.dropped) == ({"corrupt": 1, "schema": 1}, {})
    restarted = open_buffer()
    assert ids(restarted.holdout(5)) == ids(good)
    assert restarted.dropped == {}
    assert control.stats().dropped == restarted.stats().dropped == {"corrupt": 1, "schema": 1}
    shown = Totals()
    shown.observe([], control.stats())
    for reason in ("corrupt", "schema"):
        assert f'osd_buffer_dropped_total{{reason="{reason}"}} 1.0' in shown.render(), (
            "what the trainer met is shown"
        )
    append(admin, holdout(), {"t": "7", "p": b"more rubbish"})
    control.holdout(5)
    assert control.dropped == {"corrupt": 1}
    assert trainer.stats().dropped == {"corrupt": 2, "schema": 1}, (
        "what others found is in everybody's figures"
    )


def test_what_this_client_could_not_store_stands_beside_what_nobody_could_read(
    open_buffer: OpenBuffer, admin: Any
) -> None:
    buffer = open_buffer()
    buffer.put([make_trace(), make_trace(index=1, target_id="other")])
    append(admin, train(), {"t": "5", "p": b"rubbish"})
    open_buffer().read({}, 9)
    assert (buffer.dropped, buffer.stats().dropped) == (
        {"mismatch": 1},
        {"mismatch": 1, "corrupt": 1},
    )


def test_marks_of_entries_that_left_are_forgotten_and_the_total_stays(
    open_buffer: OpenBuffer, admin: Any
) -> None:
    buffer = open_buffer(max_traces=4)
    for i in range(0, 30, 3):
        buffer.put(make_traces(2, start=i))
        append(admin, train(), {"t": "5", "p": b"rubbish"})
        buffer.read({}, 99)
    assert admin.zcard(f"{train()}:unreadable") <= 4
    assert buffer.stats().dropped == {"corrupt": 10}
    buffer.purge()
    assert admin.keys("osd:a:*") == [b"osd:a:unreadable"]
    assert buffer.stats().dropped == {"corrupt": 10}, "a counter does not fall"


def test_an_unreadable_anchor_is_counted_once_and_its_slot_emptied(
    open_buffer: OpenBuffer, admin: Any
) -> None:
    buffer = open_buffer()
    anchors = "osd:a:{default}:target-a:anchors"
    good = make_traces(3)
    buffer.set_anchors(dict(enumerate(good)))
    admin.hset(anchors, mapping={1: b"rubbish", 7: of_schema(2), 9: b"rubbish"})
    for _ in range(2):
        assert ids(buffer.anchors([0, 1, 2, 7])) == ids([good[0], good[2]])
    assert buffer.dropped == {"corrupt": 1, "schema": 1}
    assert sorted(admin.hkeys(anchors)) == [b"0", b"2", b"9"]
    assert buffer.purge(before=1.0) == 0
    assert sorted(admin.hkeys(anchors)) == [b"0", b"2"], "nobody knows when that was"
    buffer.set_anchors({1: good[1]})
    assert ids(buffer.anchors([0, 1, 2])) == ids(good)


# -- purges ---------------------------------------------------------------------------------------


class Between:
    """Stands between client and server. Of a client's messages with `words`, `act` is called before
    the one after the next `num_first`; where it raises `OSError`, the connection is cut."""

    def __init__(self, server: EmbeddedValkey) -> None:
        port = int(server.url.rpartition(":")[2].split("/")[0])
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = server.url.replace(f":{port}/", f":{self._listener.getsockname()[1]}/")
        self.num_left = -1
        self._act: Callable[[], object] = lambda: None
        self._words = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, num_first: int, act: Callable[[], object], words: bytes = b"") -> None:
        self.num_left, self._act, self._words = num_first, act, words

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                behind = socket.create_connection(self._server)
                threading.Thread(
                    target=self._hand_on, args=(client, behind, True), daemon=True
                ).start()
                threading.Thread(
                    target=self._hand_on, args=(behind, client, False), daemon=True
                ).start()

    def _hand_on(self, source: socket.socket, to: socket.socket, is_request: bool) -> None:
        with suppress(OSError), source, to:
            while data := source.recv(1 << 20):
                if is_request and self._words in data:
                    self.num_left -= 1
                    if self.num_left == -1:
                        self._act()
                to.sendall(data)


@pytest.fixture
def between(server: EmbeddedValkey) -> Iterator[Between]:
    between = Between(server)
    yield between
    between.close()


def assert_all_is_known(admin: Any, open_buffer: OpenBuffer) -> None:
    """Whatever is stored can be read, and is found by a purge of somebody else."""
    num_stored = sum(admin.xlen(key) for key in admin.scan_iter(_type="stream"))
    stats = open_buffer().stats()
    assert stats.num_traces + stats.num_holdout == num_stored
    assert open_buffer(target_id="stranger").purge(all_targets=True) == num_stored
    assert admin.keys("osd:a:*") == []


LATE = [
    make_trace(index=1, domain="new"),
    make_trace(index=2, domain="old"),
    make_trace(index=3, holdout=True),
]


def test_what_is_stored_while_all_is_purged_goes_too_or_stays_known(
    open_buffer: OpenBuffer, between: Between, admin: Any
) -> None:
    """Another client puts, between any two steps of a purge, into a domain that is new, and into
    one that is not."""
    purging, putting = open_buffer(url=between.url), open_buffer()
    purging.num_unread({})
    num_steps = 0
    while True:
        putting.put([make_trace(domain="old"), make_trace(index=9)])
        between.arm(num_steps, lambda: putting.put(LATE))
        assert purging.purge() >= 2
        if between.num_left >= 0:
            break  # it needs no more steps than these
        assert_all_is_known(admin, open_buffer)
        num_steps += 1
    assert num_steps >= 5
    assert_all_is_known(admin, open_buffer)


def test_what_is_purged_while_traces_are_stored_stays_known_too(
    open_buffer: OpenBuffer, between: Between, admin: Any
) -> None:
    purging, putting = open_buffer(), open_buffer(url=between.url)
    putting.put(LATE)
    num_steps = 0
    while True:
        between.arm(num_steps, purging.purge)
        assert putting.put(LATE) == 3
        if between.num_left >= 0:
            break
        assert_all_is_known(admin, open_buffer)
        num_steps += 1
    assert num_steps >= 2


def test_a_purge_of_all_targets_leaves_nothing_of_this_deployment(
    open_buffer: OpenBuffer, admin: Any
) -> None:
    buffer, other = open_buffer(), open_buffer(target_id="target-b", draft="small")
    neighbour = open_buffer(deployment="b")
    buffer.put(make_traces(3, domain="code"))
    other.put(make_traces(4, target_id="target-b", draft="small", domain="chat"))
    other.set_anchors({0: make_trace(target_id="target-b", draft="small")})
    neighbour.put(make_traces(5))
    assert buffer.purge() == 3
    assert other.stats().num_traces == 4, "unless it is asked for all"
    assert buffer.purge(all_targets=True) == 4
    assert neighbour.stats().num_traces == 5
    assert admin.keys("osd:a:*") == []


def test_age_and_domain_are_looked_at_in_all_targets_too(open_buffer: OpenBuffer) -> None:
    buffer, other = open_buffer(), open_buffer(target_id="target-b")
    buffer.put(make_traces(3, domain="code"))
    other.put(
        make_traces(4, target_id="target-b", domain="code")
        + make_traces(2, start=9, target_id="target-b")
    )
    assert buffer.purge(before=1002.0, all_targets=True) == 4
    assert buffer.purge(domain="code", all_targets=True) == 3
    assert (buffer.stats().num_traces, other.stats().num_traces) == (0, 2)


def files_with(directory: Path, *words: str) -> list[str]:
    """Which of the append-only files hold any of these."""
    return [
        path.name
        for path in (directory / "appendonlydir").glob("*")
        if any(word.encode() in path.read_bytes() for word in words)
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_after_a_purge_the_append_only_file_holds_nothing_of_it(
    open_buffer: OpenBuffer, admin: Any, between: Between
) -> None:
    """Nor of anchors alone; also where the server was lost before it was told to write the file
    anew."""
    directory = Path(admin.config_get("dir")["dir"])
    buffer = open_buffer(url=between.url)
    traces = {
        name: make_trace(trace_id=f"{name}-secret", domain=name)
        for name in ("old", "all", "code", "cut")
    }
    stays = make_trace(trace_id="stays", domain="other", finished_at=9e9)

    def store(name: str) -> None:
        buffer.put([traces[name], stays])
        wait_for(lambda: files_with(directory, f"{name}-secret") != [])

    def is_gone(name: str) -> bool:
        return not admin.info("persistence")["aof_rewrite_in_progress"] and not files_with(
            directory, f"{name}-secret"
        )

    admin.config_set("appendonly", "yes")
    try:
        wait_for(lambda: not admin.info("persistence")["aof_rewrite_in_progress"])
        store("old")
        assert buffer.purge(before=2000.0) == 1
        wait_for(lambda: is_gone("old"))
        store("code")
        assert buffer.purge(domain="code") == 1
        wait_for(lambda: is_gone("code"))
        buffer.set_anchors({0: make_trace(trace_id="anchor-secret")})
        wait_for(lambda: files_with(directory, "anchor-secret") != [])
        assert buffer.purge(before=2000.0) == 0
        wait_for(lambda: is_gone("anchor"))
        assert files_with(directory, "stays") != []
        begun = num_rewrites(admin)
        assert buffer.purge(before=2000.0) == open_buffer().purge(before=2000.0) == 0
        assert num_rewrites(admin) == begun > 0, "where nothing went, nothing is written"
        store("cut")
        between.arm(0, lose, b"persistence")
        with pytest.raises(ReplayBufferError):
            buffer.purge(before=2000.0)
        assert buffer.stats().num_traces == 3 and files_with(directory, "cut-secret") != []
        assert buffer.purge(before=2000.0) == 0
        wait_for(lambda: is_gone("cut"))
        store("all")
        assert buffer.purge() == 5
        wait_for(lambda: is_gone("all"))
    finally:
        admin.config_set("appendonly", "no")


def lose() -> None:
    raise OSError


def num_rewrites(admin: Any) -> int:
    return int(admin.info("commandstats").get("cmdstat_bgrewriteaof", {"calls": 0})["calls"])


# -- bounds ---------------------------------------------------------------------------------------


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


def test_a_server_full_of_other_data_drops_and_counts(buffer: RedisTraceBuffer, admin: Any) -> None:
    assert buffer.put([make_trace()]) == 1
    append(admin, train(), {"t": "5", "p": b"rubbish"})
    fill(admin)
    assert buffer.put(make_traces(5, start=1, domain="new", num_prompt=50_000)) == 0
    assert buffer.dropped == {"memory": 5}
    assert ids(buffer.read({}, 10)[0]) == ids([make_trace()]), (
        "what cannot be marked is passed over all the same"
    )
    admin.delete(*admin.keys("other:*"))
    assert buffer.put([make_trace(index=9)]) == 1
    assert ids(buffer.read({}, 10)[0]) == ids([make_trace(), make_trace(index=9)])
    assert buffer.dropped == {"memory": 5, "corrupt": 1}


def test_a_server_full_of_traces_lets_the_oldest_go(open_buffer: OpenBuffer) -> None:
    """More traces than memory holds, well before max_traces: the newest are taken all the same, in
    every domain."""
    buffer, old = open_buffer(), open_buffer(target_id="replaced")
    size = {"num_prompt": 12_000, "num_output": 1, "num_rows": 1, "top_k": 2, "seed": 0}
    assert old.put(make_traces(100, start=10_000, target_id="replaced", **size)) == 100
    held_out = make_traces(100, start=20_000, holdout=True, **size)
    assert buffer.put(held_out) == 100
    num_stored = 0
    for i in range(0, 360, 20):
        num_stored += buffer.put(make_traces(20, start=i, domain="abc"[i % 3], **size))
    assert num_stored == 360
    assert buffer.dropped == {}
    stats = buffer.stats()
    assert 3 * 64 <= stats.num_traces < 360
    newest = ids(buffer.read(buffer.skip_to_newest({}, 20), 20)[0])
    assert newest == ids(make_traces(20, start=340))
    assert 64 <= old.stats().num_traces < 100 and 64 <= stats.num_holdout < 100, (
        "all give something up"
    )
    assert ids(buffer.holdout(999)) == ids(held_out[-stats.num_holdout :])


def test_room_is_made_for_heartbeats_without_traffic(
    server: EmbeddedValkey, buffer: RedisTraceBuffer, admin: Any
) -> None:
    size = {"num_prompt": 24_000, "num_output": 1, "num_rows": 1, "top_k": 2, "seed": 0}
    traces = make_traces(160, **size)
    assert buffer.put(traces) == 160 and buffer.make_room() == 0
    status = ReplicaStatus(
        **dict.fromkeys(("replica", "url", "target_id", "engine"), ""),
        **dict.fromkeys(("at", "version", "k", "pid", "started_at"), 1),
    )
    most = admin.config_get("maxmemory")["maxmemory"]
    # Below what is used, so that nothing that is let go meanwhile makes room.
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] - (64 << 10))
    try:
        with closing(Registry(server.url, "a")) as registry:
            with pytest.raises(ReplayBufferError, match="OOM|maxmemory"):
                registry.heartbeat(status, ttl_s=5)
            assert buffer.make_room() == 20
            registry.heartbeat(status, ttl_s=5)
            assert registry.replicas() == [status]
        assert ids(buffer.read({}, 999)[0]) == ids(traces[20:])
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", admin.info("memory")["used_memory"])
        assert buffer.make_room() == 0, "it makes room itself"
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", most)
    assert buffer.make_room() == 0


def test_on_a_server_full_of_other_data_no_trace_is_deleted_in_vain(
    buffer: RedisTraceBuffer, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All traces together would not make the room that is missing."""
    admin.set("other", b"x" * (8 << 20))
    traces = make_traces(100, num_prompt=1000)
    assert buffer.put(traces) == 100
    most = admin.config_get("maxmemory")["maxmemory"]
    try:
        for _ in range(2):
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] + (300 << 10))
            assert [buffer.make_room() for _ in range(3)] == [0, 0, 0]
            admin.config_set("maxmemory", most)
            assert buffer.make_room() == 0
        assert ids(buffer.read({}, 999)[0]) == ids(traces)
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] - (20 << 10))
        assert buffer.make_room() == 13, "whatever is written now is refused"
    finally:
        admin.config_set("maxmemory", most)
    said = [record.message for record in caplog.records]
    assert len(said) == 3, "once each time"
    assert "the server's memory is full of other data" in said[0]


def test_room_is_made_where_a_user_may_not_ask_what_a_key_holds(
    buffer: RedisTraceBuffer, admin: Any
) -> None:
    traces = make_traces(160, num_prompt=2000)
    buffer.put(traces)
    most = admin.config_get("maxmemory")["maxmemory"]
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] - (64 << 10))
    admin.execute_command("ACL", "SETUSER", "default", "-memory")
    try:
        assert buffer.make_room() == 20
    finally:
        admin.execute_command("ACL", "SETUSER", "default", "+memory")
        admin.config_set("maxmemory", most)
    assert ids(buffer.read({}, 999)[0]) == ids(traces[20:])


def test_no_room_is_made_on_a_server_that_does_not_say_how_full_it_is(
    buffer: RedisTraceBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = make_traces(80)
    buffer.put(traces)
    own = buffer._link.command
    monkeypatch.setattr(
        buffer._link,
        "command",
        lambda *words: {"maxmemory": 1 << 20} if words[0] == "INFO" else own(*words),
    )
    assert buffer.make_room() == 0
    assert ids(buffer.read({}, 999)[0]) == ids(traces)


@pytest.mark.parametrize(("num", "left"), [(160, 140), (161, 140), (70, 64), (64, 64), (3, 3)])
def test_a_stream_gives_up_its_oldest_eighth_and_never_the_newest_64(
    server: EmbeddedValkey, buffer: RedisTraceBuffer, admin: Any, num: int, left: int
) -> None:
    buffer.put(make_traces(num))
    with closing(Link(server.url, timeout=10)) as link:
        assert link.script(scripts.SHRINK, [train(), holdout()], [64, 8]) == num - left
    assert ids(buffer.read({}, 999)[0]) == ids(make_traces(left, start=num - left))


def test_ids_are_dense_and_the_oldest_leave(open_buffer: OpenBuffer, admin: Any) -> None:
    buffer = open_buffer(max_traces=20)
    for i in range(0, 90, 9):
        buffer.put(
            make_traces(9, start=i, domain="code")
            + make_traces(9, start=i, domain="code", holdout=True)
        )
    for stream, num in ((train("code"), 20), (holdout("code"), 64)):
        numbers = [int(entry_id.removesuffix(b"-0")) for entry_id, _ in admin.xrange(stream)]
        assert numbers == list(range(numbers[0], numbers[0] + num))
    assert ids(buffer.read({}, 99)[0]) == ids(make_traces(20, start=70))


def test_a_label_beyond_the_bound_is_unlabelled_for_every_client(open_buffer: OpenBuffer) -> None:
    first, second = open_buffer(max_domains=2), open_buffer(max_domains=2)
    first.put([make_trace(index=1, domain="b")])
    second.put(
        [
            make_trace(index=2, domain="c"),
            make_trace(index=3, domain="a"),
            make_trace(index=4, domain="b"),
        ]
    )
    stored: list[Trace] = first.read({}, 9)[0]
    assert {trace.trace_id.split("-")[1]: trace.domain for trace in stored} == {
        "1": "b",
        "2": "",
        "3": "a",
        "4": "b",
    }


# -- a server that forgets, or is none ------------------------------------------------------------


def test_scripts_are_sent_again_to_a_server_that_forgot_them(
    buffer: RedisTraceBuffer, admin: Any
) -> None:
    buffer.put([make_trace()])
    admin.script_flush()
    assert buffer.put(make_traces(3, start=1, domain="code")) == 3
    admin.script_flush()
    assert len(buffer.read({}, 10)[0]) == 4
    assert buffer.dropped == {}


def test_data_lost_with_the_server_does_not_hide_what_comes_after(
    buffer: RedisTraceBuffer, admin: Any
) -> None:
    buffer.put(make_traces(50))
    _, cursor = buffer.read({}, 1000)
    admin.flushall()
    buffer.put(make_traces(3, start=50))
    assert buffer.num_unread(cursor) == 3
    assert ids(buffer.read(cursor, 10)[0]) == ids(make_traces(3, start=50))


def test_what_cannot_be_encoded_is_dropped_and_counted(buffer: RedisTraceBuffer) -> None:
    assert buffer.put([make_trace(finished_at=float("nan")), make_trace(index=1)]) == 1
    assert buffer.dropped == {"invalid": 1}


def test_a_key_that_is_none_of_ours_costs_its_domain_alone(
    buffer: RedisTraceBuffer, admin: Any
) -> None:
    admin.set(train("code"), "in the way")
    coded = [make_trace(index=i, domain="code") for i in (1, 2)]
    assert buffer.put([make_trace(), *coded]) == 1
    assert buffer.dropped == {"redis": 2}


@pytest.mark.parametrize(
    "place", [{"deployment": "a:b"}, {"draft": "a}"}, {"target_id": ""}, {"draft": "x y"}]
)
def test_names_that_cannot_be_part_of_a_key_are_refused(place: dict[str, str]) -> None:
    names = {"deployment": "a", "target_id": "target-a"} | place
    with pytest.raises(ValueError, match=next(iter(place))):
        RedisTraceBuffer("redis://127.0.0.1:1/0", **names)


# -- clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_by", [-7200.0, 7200.0])
def test_a_replica_whose_clock_is_wrong_empties_nothing_and_is_not_preferred(
    buffer: RedisTraceBuffer, monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    now = time.time()

    def put(index: int, ago: float, wrong_by: float = 0.0) -> None:
        """A training trace, and a held-out one."""
        finished_at = now + wrong_by - ago
        traces = [
            make_trace(index=index + i, holdout=bool(i), finished_at=finished_at) for i in (0, 1)
        ]
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: now + wrong_by)
            assert buffer.put(traces) == 2

    put(0, ago=30.0)
    put(10, ago=20.0, wrong_by=wrong_by)
    put(20, ago=10.0)
    assert buffer.purge(before=now - 3600) == 0
    times = [trace.finished_at - now for trace in (*buffer.holdout(9), *buffer.read({}, 9)[0])]
    assert times == pytest.approx([-30, -20, -10] * 2, abs=5)
    assert ids(buffer.holdout(1)) == ids([make_trace(index=21, holdout=True)])
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: now + wrong_by)
        assert buffer.purge(before=now + wrong_by - 15) == 4, "by the clock of who asks"
    assert len(buffer.read({}, 9)[0]) == 1
