"""What the memory of an engine that starts is filled with, and what never comes into it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from buffers.memory import MemoryTraceBuffer
from buffers.recent import newest_shared
from osd.config.schema import Config
from osd.errors import ReplayBufferError
from osd.records import Trace
from serving.speculation.client import SpeculationClient
from serving.speculation.memory import warm
from serving.speculation.memory.kernels import LONGEST, ORDERS
from serving.speculation.memory.memory import BYTES_PER_ENTRY, Memory, num_tokens_of
from serving.speculation.memory.warm import Recent, Warming, answer_of, parts
from serving.speculation.proposals import scope
from tests.support.builders import make_trace
from tests.unit.serving.speculation.memory.test_memory import SECRET, asked, holds

OTHER = [801, 802, 803, 804, 805, 806]


def served(index: int, answer: list[int], **given: Any) -> Trace:
    given = {
        "is_shared": True,
        "domain": "chat",
        "prompt_ids": [1, 2, 3],
        "output_ids": answer,
    } | given
    return make_trace(index=index, num_output=0, num_rows=0, **given)


class World:
    """A buffer, an engine's memory, and who counts purges; `meanwhile` is done before traces are
    handed on that were read."""

    def __init__(self, traces: list[Trace]) -> None:
        self.buffer = MemoryTraceBuffer(target_id="target-a")
        self.buffer.put(traces)
        self.memory: Memory | None = Memory(1 << 20, 8)
        self.purges, self.num_calls, self.num_read = 3, 0, 0
        self.answers = True
        self.meanwhile: Callable[[], None] = lambda: None

    async def engine(self, method: str, name: str, argument: str) -> str:
        assert (method, name) == ("osd_speculation", "remember")
        self.num_calls += 1
        if self.memory is None or not self.answers:
            return "null"
        for prompt, answer, domain in json.loads(argument):
            self.memory.remember([(prompt, answer)], scope(domain=domain))
        self.memory.work()
        return str(self.memory.num_waiting)

    def recent(self, num_tokens: int) -> Iterator[list[Trace]]:
        for traces in newest_shared(self.buffer, num_tokens):
            self.num_read += len(traces)
            yield traces

    def num_purges(self) -> int:
        self.meanwhile()
        return self.purges

    def purge(self) -> None:
        """As the service does, and the engine hears of it later."""
        self.buffer.purge()
        self.purges += 1

    def warming(self, recent: Recent | None = None, **speculation: Any) -> Warming:
        config = Config.model_validate({"speculation": {"memory_bytes": 1 << 20} | speculation})
        client = SpeculationClient(self.engine, config)
        return Warming(recent or self.recent, client, self, config)  # type: ignore[arg-type]

    def knows(self, answer: list[int], who: str = scope(domain="chat")) -> bool:
        assert self.memory is not None
        return asked(self.memory, [7, 8], answer[:2], scope=who) == answer[2:]


async def finish(warming: Warming, purges: int | None = 3) -> None:
    for _ in range(99):
        await warming.go_on(purges)
    assert warming.is_done


async def test_what_was_served_before_is_proposed_and_to_nobody_with_a_salt() -> None:
    world = World([served(0, SECRET)])
    await finish(world.warming())
    assert world.knows(SECRET)
    assert not world.knows(SECRET, scope(salt="salt", domain="chat"))


async def test_what_may_not_be_shared_does_not_come_in() -> None:
    world = World([served(0, SECRET, is_shared=False), served(1, OTHER)])
    await finish(world.warming())
    assert world.knows(OTHER)
    assert world.memory is not None and not holds(world.memory, SECRET)


async def test_what_is_purged_after_it_was_read_does_not_come_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World([served(0, SECRET)])
    world.meanwhile = world.purge
    with caplog.at_level(logging.INFO):
        await finish(world.warming())
    assert world.memory is not None and not holds(world.memory, SECRET)
    assert [record.message for record in caplog.records] == [
        "the memory begins with 0 tokens of answers from before, after 0.0 s (traces were purged "
        "meanwhile)"
    ]


async def test_nor_what_is_purged_between_two_readings() -> None:
    world = World([served(i, [*OTHER]) for i in range(40)] + [served(40, SECRET)])
    warming = world.warming()
    await warming.go_on(3)
    assert world.knows(OTHER) and not warming.is_done
    world.purge()
    assert world.memory is not None
    world.memory.clear()  # the engine hears of it
    await finish(warming, purges=world.purges)
    assert not holds(world.memory, SECRET) and not holds(world.memory, OTHER)


async def test_while_it_is_not_known_what_was_purged_nothing_is_read() -> None:
    world = World([served(0, SECRET)])
    warming = world.warming()
    await warming.go_on(None)
    assert (world.num_calls, world.num_read, warming.is_done) == (0, 0, False)
    await finish(warming)
    assert world.knows(SECRET)


@pytest.mark.parametrize(
    "speculation",
    [{"proposers": ["draft"]}, {"mode": "off"}],
)
async def test_where_no_memory_proposes_nobody_is_asked(speculation: dict[str, Any]) -> None:
    world = World([served(0, SECRET)])
    await finish(world.warming(**speculation))
    assert (world.num_calls, world.num_read) == (0, 0)


async def test_nothing_is_read_for_an_engine_that_left_its_memory_out() -> None:
    world = World([served(0, SECRET)])
    world.memory = None
    await finish(world.warming())
    assert (world.num_calls, world.num_read) == (1, 0)


async def test_where_the_buffer_is_away_the_engine_starts_cold_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World([])

    def away(num_tokens: int) -> Iterator[list[Trace]]:
        yield [served(0, OTHER)]
        raise ReplayBufferError("Redis is away")

    with caplog.at_level(logging.INFO):
        await finish(world.warming(away))
    assert world.knows(OTHER), "what came is kept"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "the memory begins with 6 tokens of answers from before, after 0.0 s (the rest is left "
            "out: Redis is away)",
        )
    ]


async def test_an_engine_that_does_not_answer_is_left_alone() -> None:
    world = World([served(i, SECRET) for i in range(3)])
    warming = world.warming()
    world.meanwhile = lambda: setattr(world, "answers", False)
    await finish(warming)
    assert world.num_calls == 2


async def test_as_much_is_read_as_the_memory_has_room_for() -> None:
    asked_for: list[int] = []

    def note(num_tokens: int) -> Iterator[list[Trace]]:
        asked_for.append(num_tokens)
        return iter(())

    await finish(World([]).warming(note, memory_bytes=64 << 20))
    (num_tokens,) = asked_for
    assert num_tokens == num_tokens_of(64 << 20)
    assert 0.7 * (64 << 20) < num_tokens * len(ORDERS) * BYTES_PER_ENTRY < 64 << 20


def test_the_engine_gets_a_few_tokens_at_a_time_each_after_what_it_follows() -> None:
    traces = [served(0, [*range(100, 125)]), served(1, SECRET), served(2, []), served(3, OTHER)]
    calls = list(parts([answer_of(trace) for trace in traces], size=10))
    assert [sum(len(answer) for _, answer, _ in call) for call in calls] == [10, 10, 5, 6, 6]
    before, tokens, domain = calls[1][0]
    assert domain == traces[0].domain == "chat"
    assert tokens == [*range(110, 120)]
    assert before == [1, 2, 3, *range(100, 110)][-LONGEST:]
    assert [*calls[3], *calls[4]] == [([1, 2, 3], SECRET, "chat"), ([1, 2, 3], OTHER, "chat")]


async def test_an_answer_that_comes_in_pieces_is_known_over_their_seams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "TOKENS_PER_CALL", 4)
    world = World([served(0, SECRET)])
    await finish(world.warming())
    assert world.knows(SECRET)


async def test_an_engine_that_remembers_little_at_a_time_is_waited_for() -> None:
    long = [*range(1000, 1640)]
    world = World([served(0, long), served(1, SECRET)])
    await finish(world.warming())
    assert world.memory is not None and world.memory.num_waiting == 0
    assert world.knows(long[-5:]) and world.knows(SECRET)


async def test_a_heartbeat_need_not_wait_for_long_answers_and_what_waits_can_be_purged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "SECONDS_AT_ONCE", 0.0)
    monkeypatch.setattr(warm, "TOKENS_PER_CALL", 64)
    world = World([served(0, [*range(1000, 1640)]), served(1, SECRET)])
    warming = world.warming()
    for num in range(1, 4):
        await warming.go_on(3)
        assert world.num_calls == 1 + num, "one part after the other"
    assert world.knows([*range(1000, 1010)]) and world.num_read == 2
    world.purge()
    await finish(warming)
    assert world.memory is not None and not holds(world.memory, SECRET)


async def test_what_cannot_be_foreseen_costs_the_memory_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(num_tokens: int) -> Iterator[list[Trace]]:
        raise ZeroDivisionError

    await finish(World([]).warming(wrong))
    assert [record.message for record in caplog.records] == ["the memory could not be filled"]
