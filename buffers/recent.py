"""What was served lately and may be proposed to others: an engine's memory begins with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from buffers.base import TraceBuffer
from buffers.redis_stream import RedisTraceBuffer
from osd.records import Trace

SECONDS_TO_READ = 2.0
"""How long each answer of the server may take; an engine starts without it otherwise."""
CHUNK = 32
"""Traces that are read at once."""
MOST = 1024
"""Traces that are read at most: some 50 MB."""


def recent(settings: dict[str, Any]) -> Callable[[int], Iterator[list[Trace]]]:
    """`newest_shared` of a buffer that is opened when it is asked and closed at the end.
    `settings`: the arguments of `RedisTraceBuffer`."""

    def read(num_tokens: int) -> Iterator[list[Trace]]:
        buffer = RedisTraceBuffer(**settings, read_seconds=SECONDS_TO_READ)
        try:
            yield from newest_shared(buffer, num_tokens)
        finally:
            buffer.close()

    return read


def newest_shared(buffer: TraceBuffer, num_tokens: int) -> Iterator[list[Trace]]:
    """The newest training traces that may be shared, the oldest of them first, some at a time. As
    many as have about `num_tokens` tokens of answers, by the length of the very newest. Raises
    `ReplayBufferError`."""
    some, _ = buffer.read(buffer.skip_to_newest({}, CHUNK), CHUNK)
    length = sum(len(trace.output_ids) for trace in some)
    if not length:
        return
    cursor = buffer.skip_to_newest({}, min(num_tokens * len(some) // length + 1, MOST))
    left = buffer.num_unread(cursor)
    while left > 0:
        traces, cursor = buffer.read(cursor, min(CHUNK, left))
        if not traces:
            return
        left -= len(traces)
        yield [trace for trace in traces if trace.is_shared]
