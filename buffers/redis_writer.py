"""The serving side of the Redis buffer: storing traces within a bounded time, and never raising.

traces ─► admitted domain ─► encoded ─► chunks ─► one script per domain and chunk ─► stored
                                                    └─ out of memory: oldest out, once more ─► dropped, counted
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from buffers import scripts
from buffers.base import holdout_capacity, in_domain
from buffers.codec import encode_trace
from buffers.link import Backoff, Call, Link, is_out_of_memory
from buffers.redis_keys import Keys
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


class RedisWriter:
    """Puts traces; see `TraceBuffer.put`.

    When the server is out of memory, the oldest eighth of every stream of the deployment is given up (never below 64
    per stream) and the put tried once more; what does not fit even then is dropped and counted as "memory".
    """

    def __init__(self, link: Link, keys: Keys, drops: Drops, *, max_traces: int, max_domains: int, seconds: float):
        self._link = link
        self._keys = keys
        self._drops = drops
        self._capacities = (max_traces, holdout_capacity(max_traces))
        self._max_domains = max_domains
        self._seconds = seconds
        self._backoff = Backoff()

    def put(self, traces: Sequence[Trace]) -> int:
        """Store what can be stored within about `seconds`; the rest is dropped and counted."""
        if not traces:
            return 0
        if not self._backoff.may_try():
            self._drops.add("redis", len(traces))
            return 0
        num_done = num_stored = 0
        try:
            for num, packed in self._chunks(traces):
                num_stored += self._store(packed)
                num_done += num
        except RedisError as error:
            self._drops.add("redis", len(traces) - num_done)
            self._gave_up(error)
            return num_stored
        if self._backoff.succeeded():
            logger.info("replay buffer %s takes traces again", self._link.name)
        return num_stored

    def _gave_up(self, error: RedisError) -> None:
        self._link.drop_connections()
        if self._backoff.failed():
            said = self._link.explain(error)
            logger.warning("replay buffer %s: %s; traces are dropped until it is back", self._link.name, said)

    def _chunks(self, traces: Sequence[Trace]) -> Iterator[tuple[int, list[_Packed]]]:
        """(traces used up, those of them that could be encoded), at most 4 MiB and 128 traces at a time.

        Raises `RedisTimeoutError` when time is up.
        """
        deadline = time.monotonic() + self._seconds
        domains = self._admit(traces)
        num, packed, size = 0, list[_Packed](), 0
        for trace, domain in zip(traces, domains, strict=True):
            if not num and time.monotonic() > deadline:
                raise RedisTimeoutError(f"no time left after {self._seconds} s")
            num += 1
            one = self._pack(trace, domain)
            if one:
                packed.append(one)
                size += len(one.payload)
            if size >= _CHUNK_BYTES or len(packed) >= _CHUNK_TRACES:
                yield num, packed
                num, packed, size = 0, [], 0
        if num:
            yield num, packed

    def _admit(self, traces: Sequence[Trace]) -> list[str]:
        """The domain each trace is stored in."""
        wanted = [clean_domain(trace.domain) for trace in traces]
        labels = sorted(set(wanted) - {""})
        admitted = {""}
        if labels:
            answer = self._link.script(scripts.ADMIT, [self._keys.domains], [self._max_domains, *labels])
            admitted |= {label for label, is_in in zip(labels, answer, strict=True) if is_in}
        return [domain if domain in admitted else "" for domain in wanted]

    def _pack(self, trace: Trace, domain: str) -> _Packed | None:
        try:
            payload = encode_trace(in_domain(trace, domain))
        except ValueError as error:
            self._drops.add("invalid")
            logger.debug("%s", error)
            return None
        return _Packed(domain, trace.is_holdout, repr(float(trace.finished_at)), payload)

    def _store(self, packed: list[_Packed]) -> int:
        """Store in as many scripts as there are domains; return how many traces were stored."""
        refused = self._send(packed)
        if refused:
            self._make_room()
            refused = self._send(refused)
            self._drops.add("memory", len(refused))
        return len(packed) - len(refused)

    def _send(self, packed: list[_Packed]) -> list[_Packed]:
        """Send; return what the server refused for lack of memory."""
        groups: dict[str, list[_Packed]] = {}
        for one in packed:
            groups.setdefault(one.domain, []).append(one)
        calls = [self._call(domain, group) for domain, group in groups.items()]
        refused: list[_Packed] = []
        register: Call = (scripts.REGISTER, [self._keys.buffers], [self._keys.member])
        answers = self._link.scripts([register, *calls])[1:]
        for answer, group in zip(answers, groups.values(), strict=True):
            if is_out_of_memory(answer):
                refused += group
            elif isinstance(answer, Exception):
                raise answer
        return refused

    def _call(self, domain: str, group: list[_Packed]) -> Call:
        group = sorted(group, key=lambda one: one.is_holdout)
        args: list[str | int | bytes] = [*self._capacities, sum(not one.is_holdout for one in group)]
        for one in group:
            args += [one.at, one.payload]
        return scripts.PUT, [self._keys.train(domain), self._keys.holdout(domain)], args

    def _make_room(self) -> None:
        calls: list[Call] = []
        for keys in self._keys.others(self._link.command("SMEMBERS", self._keys.buffers)):
            labels = self._link.command("SMEMBERS", keys.domains)
            for domain in ["", *(label.decode() for label in labels)]:
                streams = [keys.train(domain), keys.holdout(domain)]
                calls.append((scripts.SHRINK, streams, [_KEEP_WHEN_FULL, _SHRINK_ONE_IN]))
        if calls:
            self._link.scripts(calls)
