"""The serving side of the Redis buffer: stores traces within a bounded time and never raises.

traces ─► admitted domain ─► encoded ─► chunks ─► one script per domain and chunk ─► stored
                                                    └─ out of memory: drop the oldest, retry
                                                         └─ still refused: dropped, counted
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from buffers import scripts
from buffers.base import holdout_capacity, in_domain
from buffers.codec import encode_trace
from buffers.link import Call, Link, is_out_of_memory
from buffers.redis_keys import Keys
from osd.common.backoff import Backoff
from osd.records import Trace, clean_domain

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_CHUNK_TRACES = 128
_KEEP_WHEN_FULL = 64
_SHRINK_ONE_IN = 8


class Drops:
    """Counts of dropped traces by reason. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, reason: str, num: int = 1) -> None:
        if num:
            with self._lock:
                self._counts[reason] += num

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class _Packed(NamedTuple):
    domain: str
    is_holdout: bool
    at: str
    payload: bytes
    is_shared: bool


@dataclass(slots=True)
class _Tally:
    """What became of the traces of one put."""

    num_left: int
    """Traces that are neither stored nor counted as dropped yet."""
    num_stored: int = 0


class RedisWriter:
    """Puts traces; see `TraceBuffer.put`.

    When the server is out of memory, the oldest eighth of every stream of the deployment is deleted
    (each stream keeps at least 64 entries), and the put is retried once. What is refused again is
    dropped and counted as "memory".
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        drops: Drops,
        *,
        max_traces: int,
        max_domains: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._keys = keys
        self._drops = drops
        self._capacities = (max_traces, holdout_capacity(max_traces))
        self._max_domains = max_domains
        self._seconds = seconds
        self._clock = clock
        self._backoff = Backoff(clock=clock)
        self._is_crowded_out = False

    def put(self, traces: Sequence[Trace]) -> int:
        """Store as many traces as possible within about `seconds`; count the others as dropped."""
        if not traces:
            return 0
        if not self._backoff.may_try():
            self._drops.add("redis", len(traces))
            return 0
        tally = _Tally(len(traces))
        try:
            for packed in self._chunks(traces, tally):
                self._store(packed, tally)
        except RedisError as error:
            self._drops.add("redis", tally.num_left)
            self._gave_up(error)
            return tally.num_stored
        if self._backoff.succeeded():
            logger.info("replay buffer %s takes traces again", self._link.name)
        return tally.num_stored

    def _gave_up(self, error: RedisError) -> None:
        self._link.drop_connections()
        if self._backoff.failed():
            said = self._link.explain(error)
            logger.warning(
                "replay buffer %s: %s; traces are dropped until it is back", self._link.name, said
            )

    def _chunks(self, traces: Sequence[Trace], tally: _Tally) -> Iterator[list[_Packed]]:
        """The encoded traces, at most 128 at a time and about 4 MiB. Traces that cannot be encoded
        are dropped and counted.

        Raises `RedisTimeoutError` when time is up.
        """
        deadline = self._clock() + self._seconds
        domains = self._admit(traces)
        packed, size = list[_Packed](), 0
        for trace, domain in zip(traces, domains, strict=True):
            if not packed and self._clock() > deadline:
                raise RedisTimeoutError(f"no time left after {self._seconds} s")
            one = self._pack(trace, domain)
            if one is None:
                self._drop("invalid", 1, tally)
                continue
            packed.append(one)
            size += len(one.payload)
            if size >= _CHUNK_BYTES or len(packed) >= _CHUNK_TRACES:
                yield packed
                packed, size = [], 0
        if packed:
            yield packed

    def _admit(self, traces: Sequence[Trace]) -> list[str]:
        """The domain each trace is stored in."""
        wanted = [clean_domain(trace.domain) for trace in traces]
        labels = sorted(set(wanted) - {""})
        admitted = {""}
        if labels:
            answer = self._link.script(
                scripts.ADMIT, [self._keys.domains], [self._max_domains, *labels]
            )
            admitted |= {label for label, is_in in zip(labels, answer, strict=True) if is_in}
        return [domain if domain in admitted else "" for domain in wanted]

    def _pack(self, trace: Trace, domain: str) -> _Packed | None:
        try:
            payload = encode_trace(in_domain(trace, domain))
        except ValueError as error:
            logger.debug("%s", error)
            return None
        at = repr(float(trace.finished_at))
        return _Packed(domain, trace.is_holdout, at, payload, trace.is_shared)

    def _store(self, packed: list[_Packed], tally: _Tally) -> None:
        refused = self._send(packed, tally)
        if refused:
            self.make_room()
            refused = self._send(refused, tally)
            self._drop("memory", len(refused), tally)

    def _send(self, packed: list[_Packed], tally: _Tally) -> list[_Packed]:
        """Store with one script per domain; return what the server refused for lack of memory.

        Domain and buffer are registered after their traces are stored, so that a purge in between
        never leaves an unregistered stream. Raises `RedisError` for a refusal of another kind.
        """
        groups: dict[str, list[_Packed]] = {}
        for one in packed:
            groups.setdefault(one.domain, []).append(one)
        calls = [self._call(domain, group) for domain, group in groups.items()]
        if labels := [domain for domain in groups if domain]:
            calls.append((scripts.REGISTER, [self._keys.domains], labels))
        calls.append((scripts.REGISTER, [self._keys.buffers], [self._keys.member]))
        refused: list[_Packed] = []
        errors: list[RedisError] = []
        for answer, group in zip(self._link.scripts(calls), groups.values(), strict=False):
            if is_out_of_memory(answer):
                refused += group
            elif isinstance(answer, RedisError):
                errors.append(answer)
            else:
                tally.num_stored += len(group)
                tally.num_left -= len(group)
        if errors:
            raise errors[0]
        return refused

    def _drop(self, reason: str, num: int, tally: _Tally) -> None:
        self._drops.add(reason, num)
        tally.num_left -= num

    def _call(self, domain: str, group: list[_Packed]) -> Call:
        group = sorted(group, key=lambda one: one.is_holdout)
        args: list[Any] = [*self._capacities, sum(not one.is_holdout for one in group)]
        for one in group:
            args += [one.at, one.payload, int(one.is_shared)]
        args += [repr(time.time()), scripts.WRONG_CLOCK_S]
        return scripts.PUT, [self._keys.train(domain), self._keys.holdout(domain)], args

    def make_room(self) -> int:
        """Delete the oldest eighth of every stream of the deployment; returns how many entries that
        were. Raises `RedisError`."""
        least = [_KEEP_WHEN_FULL, _SHRINK_ONE_IN]
        calls = [(scripts.SHRINK, streams, least) for streams in self._streams()]
        answers = self._link.scripts(calls) if calls else []
        return sum(num for num in answers if isinstance(num, int))

    def free(self, lacking: int, over: int) -> int:
        """Make room where so many bytes are to become free, of which the server is `over` its
        limit. Where all traces are less than that, other data fill it, which is told once; then
        traces go only while it refuses everything. Raises `RedisError`."""
        spare = self._spare_bytes() if lacking > 0 else 0
        was_crowded_out, self._is_crowded_out = self._is_crowded_out, lacking > spare
        if self._is_crowded_out and not was_crowded_out:
            logger.warning(
                "replay buffer %s: the server's memory is full of other data: %d bytes are to be "
                "freed, and the traces that may go hold %d; raise its maxmemory",
                *(self._link.name, lacking, spare),
            )
        wanted = over if self._is_crowded_out else lacking
        return self.make_room() if 0 < wanted <= spare else 0

    def _spare_bytes(self) -> int:
        """What all streams of the deployment hold beyond what each keeps. Where the server does not
        say what a key holds, it may be enough."""
        keys = [key for streams in self._streams() for key in streams]
        lengths = self._link.commands([("XLEN", key) for key in keys])
        try:
            sizes = self._link.commands([("MEMORY", "USAGE", key) for key in keys])
        except ResponseError:
            return sys.maxsize
        return sum(
            size * (num - _KEEP_WHEN_FULL) // num
            for num, size in zip(lengths, sizes, strict=True)
            if size is not None and num > _KEEP_WHEN_FULL
        )

    def _streams(self) -> list[list[str]]:
        """The streams of each domain of the deployment."""
        found = []
        for keys in self._keys.others(self._link.command("SMEMBERS", self._keys.buffers)):
            labels = self._link.command("SMEMBERS", keys.domains)
            for domain in ["", *(label.decode() for label in labels)]:
                found.append([keys.train(domain), keys.holdout(domain)])
        return found
