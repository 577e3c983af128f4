"""Storing traces on a hand-written server: what is sent, and in which pieces.

Each kind of trouble has a known cost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from buffers import aof, scripts
from buffers.base import holdout_capacity
from buffers.codec import decode_trace, encode_trace
from buffers.link import Call, is_out_of_memory
from buffers.redis_keys import Keys
from buffers.redis_writer import Drops, RedisWriter
from osd.records import Trace
from tests.support.builders import ids, make_trace, make_traces

KEYS = Keys("a", "default", "target-a")


class FakeServer:
    """Stands for a `Link`: answers scripts as a server does that has room for `room` more puts of a
    domain."""

    name = "redis://there"

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.puts: list[tuple[str, list[str]]] = []
        """(domain, ids of the traces) in the order they were stored"""
        self.rounds: list[list[str]] = []
        """Names of the scripts that were sent together."""
        self.room = 1000
        self.refused_domains: set[str] = set()
        self.errors: dict[str, RedisError] = {}
        """domain -> what a put into it meets"""
        self.is_away = False
        self.dies_after = 1000
        """Rounds."""
        self.sets = {
            KEYS.buffers: {b"default target-a", b"small target-b"},
            KEYS.domains: {b"code"},
        }
        self.num_dropped_connections = 0

    def script(self, lua: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        (answer,) = self.scripts([(lua, keys, args)])
        return answer

    def scripts(self, calls: Sequence[Call]) -> list[Any]:
        if self.is_away or len(self.rounds) >= self.dies_after:
            raise RedisConnectionError("Connection refused for alice")
        self.calls += calls
        self.rounds.append([NAMES[lua] for lua, _, _ in calls])
        return [self._answer(*call) for call in calls]

    def command(self, name: str, key: str) -> set[bytes]:
        assert name == "SMEMBERS"
        return self.sets.get(key, set())

    def drop_connections(self) -> None:
        self.num_dropped_connections += 1

    def explain(self, error: RedisError) -> str:
        return str(error).replace("alice", "***")

    def sent(self, lua: str) -> list[Call]:
        return [call for call in self.calls if call[0] == lua]

    def _answer(self, lua: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        if lua == scripts.ADMIT:
            return [int(label not in self.refused_domains) for label in args[1:]]
        if lua != scripts.PUT:
            return 1
        domain = keys[0].partition(":")[2].split("}")[0].rpartition(":")[2]
        if domain in self.errors:
            return self.errors[domain]
        if not self.room:
            return OutOfMemoryError("OOM command not allowed")
        self.room -= 1
        self.puts.append((domain, ids([decode_trace(payload) for payload in args[4:-2:3]])))
        return len(args[4:-2:3])


NAMES = {getattr(scripts, name): name for name in ("ADMIT", "PUT", "SHRINK", "REGISTER")}


class World:
    """A writer before that server, with a clock that is moved by hand."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.server, self.drops = FakeServer(), Drops()
        limits = {"max_traces": 1000, "max_domains": 3, "seconds": 2.0} | options
        link: Any = self.server
        self.writer = RedisWriter(link, KEYS, self.drops, clock=lambda: self.now, **limits)

    def put(self, traces: list[Trace]) -> int:
        return self.writer.put(traces)

    @property
    def dropped(self) -> dict[str, int]:
        return self.drops.as_dict()


@pytest.fixture
def world() -> World:
    return World()


def many(num: int) -> list[Trace]:
    """Small traces, held-out ones among them."""
    first = make_trace(num_prompt=1, num_output=1, num_rows=0)
    return [replace(first, trace_id=f"t{i}") for i in range(num)]


def invalid(index: int) -> Trace:
    return make_trace(index=index, finished_at=float("nan"))


# -- what is sent ---------------------------------------------------------------------------------


def test_each_domain_is_one_script_with_training_traces_first(world: World) -> None:
    held_out = make_traces(2, start=5, holdout=True)
    plain, coded = make_traces(2), make_traces(2, start=10, domain="code")
    assert world.put([held_out[0], plain[0], coded[0], held_out[1], plain[1], coded[1]]) == 6
    assert world.server.puts == [("", ids([*plain, *held_out])), ("code", ids(coded))]
    (first, second) = world.server.sent(scripts.PUT)
    assert first[1] == [KEYS.train(""), KEYS.holdout("")] and second[1] == [
        KEYS.train("code"),
        KEYS.holdout("code"),
    ]
    assert first[2][:3] == [1000, holdout_capacity(1000), 2] and second[2][:3] == [1000, 125, 2]
    assert first[2][3:-2:3] == [repr(trace.finished_at) for trace in [*plain, *held_out]]
    assert world.dropped == {}


def test_domain_and_buffer_are_listed_after_what_is_stored_there(world: World) -> None:
    """A purge in between must find what it leaves."""
    world.put([make_trace(domain="code"), make_trace(index=1)])
    assert world.server.rounds == [["ADMIT"], ["PUT", "PUT", "REGISTER", "REGISTER"]]
    domains, buffers = world.server.sent(scripts.REGISTER)
    assert domains[1:] == ([KEYS.domains], ["code"]) and buffers[1:] == (
        [KEYS.buffers],
        ["default target-a"],
    )


def test_labels_are_asked_for_once_and_cleaned(world: World) -> None:
    world.server.refused_domains = {"b"}
    labels = ["b", "a c", "", "b", "a_c"]
    assert world.put([make_trace(index=i, domain=label) for i, label in enumerate(labels)]) == 5
    (admit,) = world.server.sent(scripts.ADMIT)
    assert admit[1:] == ([KEYS.domains], [3, "a_c", "b"])
    assert [domain for domain, _ in world.server.puts] == ["", "a_c"]
    payloads = {
        domain: args[4:-2:3]
        for (domain, _), (_, _, args) in zip(
            world.server.puts, world.server.sent(scripts.PUT), strict=True
        )
    }
    assert {trace.domain for trace in map(decode_trace, payloads[""])} == {""}, (
        "it says where it is stored"
    )
    assert {trace.domain for trace in map(decode_trace, payloads["a_c"])} == {"a_c"}


def test_nothing_is_asked_for_what_has_no_label(world: World) -> None:
    assert world.put([]) == 0
    world.put([make_trace()])
    assert world.server.rounds == [["PUT", "REGISTER"]]


@pytest.mark.parametrize(
    ("num", "sizes"), [(127, [127]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])]
)
def test_at_most_128_traces_travel_together(world: World, num: int, sizes: list[int]) -> None:
    traces = many(num)
    assert world.put(traces) == num
    assert [len(names) for _, names in world.server.puts] == sizes
    assert sorted(name for _, names in world.server.puts for name in names) == sorted(ids(traces))


def of_bytes(num_bytes: int, index: int) -> Trace:
    """A trace whose encoding has exactly so many bytes."""
    encoded = encode_trace(with_prompt(300_000, "t", index))
    room = num_bytes - len(encoded) + 4 * 300_000
    return with_prompt(room // 4, "t" * (1 + room % 4), index)


def with_prompt(num_tokens: int, name: str, index: int) -> Trace:
    return make_trace(
        index=index,
        trace_id=f"{name}{index}",
        num_rows=0,
        prompt_ids=np.zeros(num_tokens, np.int32),
    )


def test_at_most_4_mib_travel_together_and_the_trace_that_reaches_them(world: World) -> None:
    sizes = [2 << 20, (2 << 20) - 1, 2 << 20, 2 << 20, 2 << 20, 2 << 20]
    traces = [of_bytes(size, index) for index, size in enumerate(sizes)]
    assert [len(encode_trace(trace)) for trace in traces] == sizes
    assert world.put(traces) == 6
    assert [len(names) for _, names in world.server.puts] == [3, 2, 1]


# -- what is lost ---------------------------------------------------------------------------------


def test_each_trace_that_is_lost_is_counted_once(world: World) -> None:
    """Not as invalid, and then as never sent."""
    world.server.is_away = True
    assert world.put([invalid(0), *make_traces(3, start=1), invalid(9)]) == 0
    assert world.dropped == {"invalid": 2, "redis": 3}


def test_what_went_before_a_failure_is_stored_and_not_counted(world: World) -> None:
    world.server.dies_after = 2
    traces = many(300)
    assert world.put([invalid(0), *traces]) == 256
    assert world.dropped == {"invalid": 1, "redis": 44}


def test_a_domain_that_fails_costs_its_traces_alone(world: World) -> None:
    world.server.errors["code"] = ResponseError("WRONGTYPE")
    traces = [make_trace(index=i, domain=["", "code", "chat"][i % 3]) for i in range(9)]
    assert world.put(traces) == 6
    assert world.dropped == {"redis": 3}


@pytest.mark.parametrize(
    ("num", "seconds", "num_sent"), [(600, 2.5, 3 * 128), (129, 5.5, 128), (128, 9.0, 128)]
)
def test_nothing_more_is_sent_once_time_is_up(num: int, seconds: float, num_sent: int) -> None:
    """Of 5 seconds, where each piece takes so many; the last is begun when exactly all have
    passed."""
    world = World()

    class Slow(FakeServer):
        def scripts(self, calls: Sequence[Call]) -> list[Any]:
            world.now += seconds
            return super().scripts(calls)

    server: Any = Slow()
    writer = RedisWriter(
        server,
        KEYS,
        world.drops,
        max_traces=1000,
        max_domains=3,
        seconds=5.0,
        clock=lambda: world.now,
    )
    assert writer.put(many(num)) == num_sent
    assert world.dropped == ({"redis": num - num_sent} if num > num_sent else {})
    assert server.num_dropped_connections == (num > num_sent)


def test_out_of_memory_makes_room_in_every_buffer_and_tries_once_more(world: World) -> None:
    world.server.errors["code"] = OutOfMemoryError("OOM")
    other = Keys("a", "small", "target-b")
    assert world.put([make_trace(), make_trace(index=1, domain="code")]) == 1
    assert world.dropped == {"memory": 1}
    assert world.server.rounds == [
        ["ADMIT"],
        ["PUT", "PUT", "REGISTER", "REGISTER"],
        ["SHRINK"] * 3,
        ["PUT", *["REGISTER"] * 2],
    ]
    shrunk = world.server.sent(scripts.SHRINK)
    assert sorted(keys for _, keys, _ in shrunk) == sorted(
        [keys.train(domain), keys.holdout(domain)]
        for keys, domain in ((KEYS, ""), (KEYS, "code"), (other, ""))
    )
    assert all(args == [64, 8] for _, _, args in shrunk)
    assert world.server.num_dropped_connections == 0, "the server is not away"


def test_what_fits_once_there_is_room_is_stored(world: World) -> None:
    class Roomy(FakeServer):
        def _answer(self, lua: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
            self.room += lua == scripts.SHRINK
            return super()._answer(lua, keys, args)

    server: Any = Roomy()
    server.room, server.sets = 0, {KEYS.buffers: {b"default target-a"}}
    writer = RedisWriter(server, KEYS, world.drops, max_traces=9, max_domains=3, seconds=2.0)
    assert writer.put(make_traces(4)) == 4
    assert world.dropped == {}


def test_where_no_buffer_is_listed_there_is_no_room_to_make(world: World) -> None:
    world.server.room, world.server.sets = 0, {}
    assert world.put(make_traces(2)) == 0
    assert world.dropped == {"memory": 2}
    assert world.server.rounds == [["PUT", "REGISTER"]] * 2


def test_a_server_that_dies_while_room_is_made_costs_what_is_left(world: World) -> None:
    world.server.errors["code"] = OutOfMemoryError("OOM")
    world.server.dies_after = 2
    assert world.put([make_trace(), make_trace(index=1, domain="code")]) == 1
    assert world.dropped == {"redis": 1}


def test_an_outage_is_said_once_and_its_end_too(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.is_away = True
    with caplog.at_level(logging.INFO, "buffers"):
        for _ in range(3):
            assert world.put([make_trace()]) == 0
            world.now += 10
        assert world.server.num_dropped_connections == 3
        world.server.is_away = False
        for i in range(2):
            assert world.put([make_trace(index=i)]) == 1
            assert len(caplog.records) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "replay buffer redis://there: Connection refused for ***; traces are dropped until it is "
        "back",
        "replay buffer redis://there takes traces again",
    ]
    assert world.dropped == {"redis": 3}


def test_while_it_waits_nothing_is_sent_and_all_is_counted(world: World) -> None:
    world.server.is_away = True
    world.put([make_trace()])
    world.server.is_away = False
    world.now += 0.05
    assert world.put(make_traces(2)) == 0
    assert world.server.rounds == [] and world.dropped == {"redis": 3}
    world.now += 0.05
    assert world.put(make_traces(2)) == 2


def test_memory_is_told_from_other_refusals() -> None:
    assert is_out_of_memory(OutOfMemoryError("x")) and is_out_of_memory(
        ResponseError("-OOM command not allowed")
    )
    for other in (ResponseError("WRONGTYPE"), "OOM", 3):
        assert not is_out_of_memory(other)


def test_counts_are_copies_and_nothing_is_no_reason() -> None:
    drops = Drops()
    drops.add("redis", 0)
    assert drops.as_dict() == {}
    drops.add("redis")
    drops.add("redis", 2)
    drops.as_dict()["redis"] = 9
    assert drops.as_dict() == {"redis": 3}


# -- the append-only file -------------------------------------------------------------------------


class Persistence:
    """Answers what `aof.forget` asks; a rewrite is in progress until the clock shows
    `busy_until`."""

    def __init__(self, *, is_enabled: bool = True, busy_until: float = 0.0) -> None:
        self.is_enabled, self.busy_until = is_enabled, busy_until
        self.now = 0.0
        self.rewrites: list[float] = []

    def command(self, *words: str) -> Any:
        if words == ("BGREWRITEAOF",):
            self.rewrites.append(self.now)
            return None
        assert words == ("INFO", "persistence")
        return {
            "aof_enabled": int(self.is_enabled),
            "aof_rewrite_in_progress": int(self.now < self.busy_until),
        }

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def forget(self) -> bool:
        return aof.forget(self.command, sleep=self.sleep, clock=lambda: self.now)


def test_a_rewrite_under_way_is_waited_for_since_it_may_hold_what_was_deleted() -> None:
    server = Persistence(busy_until=3.0)
    assert server.forget()
    assert server.rewrites == [pytest.approx(3.0, abs=0.06)]


def test_a_rewrite_that_never_ends_is_not_waited_for_long(caplog: pytest.LogCaptureFixture) -> None:
    server = Persistence(busy_until=60.0)
    assert not server.forget()
    assert server.rewrites == [] and server.now == pytest.approx(10.0, abs=0.11)
    assert "purged traces stay in the append-only file" in caplog.text


def test_a_server_without_such_a_file_has_nothing_to_write() -> None:
    server = Persistence(is_enabled=False, busy_until=60.0)
    assert server.forget()
    assert server.rewrites == [] and server.now == 0.0
