"""The memory of an engine that starts is filled with what was served before, from the replay
buffer.

    replay buffer ──newest traces that may be shared──► the replica ──a few answers──► the engine,
                                                                       between two steps

Traces that are purged must not come back. The engine forgets with each purge that the replica hears
of, in the same loop as this runs in; so it suffices that no part is handed on of what was read
before a purge was noted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from osd.config.schema import Config
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import Trace
from serving.speculation.client import SpeculationClient
from serving.speculation.memory.kernels import LONGEST
from serving.speculation.memory.memory import num_tokens_of

logger = logging.getLogger(__name__)

TOKENS_PER_CALL = 512
"""Tokens of answers that the engine is given between two steps: some milliseconds."""
SECONDS_AT_ONCE = 0.1
"""Then the replica looks after its draft and its heartbeat again."""

Recent = Callable[[int], Iterator[list[Trace]]]
"""`recent(num_tokens)`: the newest traces that may be shared, with about so many tokens of answers,
the oldest first, some at a time. Blocking. Raises `OSDError`."""
Answer = tuple[list[int], list[int], str]
"""End of the prompt, answer, domain."""


class Warming:
    """Of one engine, once, a part with each `go_on`. What fails leaves the rest out: the engine
    serves as one whose memory is empty."""

    def __init__(
        self, recent: Recent, client: SpeculationClient, registry: Registry, config: Config
    ) -> None:
        self._client, self._registry = client, registry
        speculation = config.speculation
        self.is_done = speculation.mode == "off" or "memory" not in speculation.proposers
        self._traces: Iterator[list[Trace]] = iter(())
        self._parts: deque[list[Answer]] = deque()
        """Read, and not handed on yet."""
        self._begin = lambda: recent(num_tokens_of(speculation.memory_bytes))
        self._num_purges: int | None = None
        self._num_tokens = 0
        self._started_at = 0.0

    async def go_on(self, num_purges: int | None) -> None:
        """Read some traces and hand them on. `num_purges`: those that the engine has forgotten
        for; None = not known yet, and nothing is done."""
        if self.is_done or num_purges is None:
            return
        try:
            await self._go_on(num_purges)
        except OSDError as error:
            self._end(f"the rest is left out: {error}")
        except Exception:  # an engine starts and serves without it
            logger.exception("the memory could not be filled")
            self.is_done = True

    async def _go_on(self, num_purges: int) -> None:
        if self._num_purges is None:
            if await self._client.remember([]) is None:
                self.is_done = True  # an engine without a memory
                return
            self._num_purges, self._traces = num_purges, self._begin()
            self._started_at = time.monotonic()
        if not self._parts:
            traces = await asyncio.to_thread(next, self._traces, None)
            if traces is None:
                return self._end("")
            self._parts.extend(parts([answer_of(trace) for trace in traces], TOKENS_PER_CALL))
        if await asyncio.to_thread(self._registry.num_purges) != self._num_purges:
            return self._end("traces were purged meanwhile")
        return await self._hand_on()

    async def _hand_on(self) -> None:
        until = time.monotonic() + SECONDS_AT_ONCE
        while self._parts:
            some = self._parts.popleft()
            waiting = await self._client.remember(some)
            while waiting:  # without numba, little is remembered at a time
                waiting = await self._client.remember([])
            if waiting is None:
                return self._end("the engine does not answer")
            self._num_tokens += sum(len(answer) for _, answer, _ in some)
            if time.monotonic() >= until:
                break
        return None

    def _end(self, why: str) -> None:
        self.is_done = True
        self._traces = iter(())
        self._parts.clear()
        logger.log(
            logging.WARNING if why else logging.INFO,
            "the memory begins with %d tokens of answers from before, after %.1f s%s",
            self._num_tokens,
            time.monotonic() - self._started_at,
            f" ({why})" if why else "",
        )


def answer_of(trace: Trace) -> Answer:
    """What is remembered of a trace."""
    return trace.prompt_ids[-LONGEST:].tolist(), trace.output_ids.tolist(), trace.domain


def parts(answers: Sequence[Answer], size: int) -> Iterator[list[Answer]]:
    """The answers, about `size` tokens at a time; a long one in pieces, each after what it
    follows."""
    part: list[Answer] = []
    num = 0
    for prompt, answer, domain in answers:
        for start in range(0, len(answer), size):
            piece = answer[start : start + size]
            if part and num + len(piece) > size:
                yield part
                part, num = [], 0
            before = [*prompt, *answer[max(0, start - LONGEST) : start]][-LONGEST:]
            part.append((before, piece, domain))
            num += len(piece)
    if part:
        yield part
