"""vLLM's worker extension in a service: serving's hooks put traces into the Redis replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from buffers.redis_stream import RedisTraceBuffer
from osd.records import Trace
from serving.worker import WorkerExtension

QUALIFIED_NAME = "osd.service.worker.Worker"


class Worker(WorkerExtension):
    """`settings` are the arguments of `RedisTraceBuffer`."""

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        buffer = RedisTraceBuffer(**settings)
        return buffer.put, lambda: dict(buffer.dropped)
