"""The replay buffer in Redis (7 or later) or Valkey: per draft, target and domain, a stream of
training traces and a stream of held-out traces.

Serving calls `put` (`redis_writer.py`), which waits for a short time and never raises. The trainer
calls the other methods, which wait longer and raise `ReplayBufferError`. `redis_keys.py` holds the
keys, `scripts.py` the scripts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from buffers import aof, scripts
from buffers import cursor as cursors
from buffers.base import Cursor
from buffers.codec import encode_trace
from buffers.cursor import Entry, Span
from buffers.link import Link
from buffers.redis_keys import Keys
from buffers.redis_writer import Drops, RedisWriter
from buffers.unreadable import Unreadable
from osd.records import BufferStats, Trace, clean_domain

PUT_SECONDS = 2.0
"""How long `put` waits for an answer, and how long it goes on sending. A healthy server may need
half a second on a busy machine. The capture thread waits here, and a queue stands before it."""
READ_SECONDS = 15.0
"""How long all other calls wait for an answer."""
ROOM_BYTES = 1 << 20
"""Of the server's memory, for all that is no trace: heartbeats, the feed, and what they take on
their way. The buffer makes room where less is free."""
_READ_CHUNK = 32
_TIMES_CHUNK = 64


class RedisTraceBuffer:
    """`TraceBuffer` on a server. Its methods are documented there.

    The constructor does not connect, so serving may start while the server is away. It raises
    `ReplayBufferError` for an invalid URL and `ValueError` for a name that cannot be part of a key.

    Example:
        RedisTraceBuffer("redis://127.0.0.1:7000/0", deployment="default", target_id="9f2c")
    """

    def __init__(
        self,
        url: str,
        *,
        deployment: str,
        draft: str = "default",
        target_id: str,
        max_traces: int = 20_000,
        max_domains: int = 16,
        put_seconds: float = PUT_SECONDS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._keys = Keys(deployment, draft, target_id)
        self._link = Link(url, timeout=read_seconds)
        self._put_link = Link(url, timeout=put_seconds)
        self._drops = Drops()
        self._unreadable = Unreadable(self._link, self._keys, self._drops)
        self._owes_rewrite = False
        """Whether the server's append-only file may still hold deleted traces."""
        self._writer = RedisWriter(
            self._put_link,
            self._keys,
            self._drops,
            max_traces=max_traces,
            max_domains=max_domains,
            seconds=put_seconds,
        )

    @property
    def dropped(self) -> dict[str, int]:
        return self._drops.as_dict()

    def ping(self) -> None:
        """Raise `ReplayBufferError` when the server cannot be reached or is older than 7.0."""
        self._link.check_version()

    def put(self, traces: Sequence[Trace]) -> int:
        ours = [
            trace
            for trace in traces
            if (trace.draft, trace.target_id) == (self._keys.draft, self._keys.target_id)
        ]
        self._drops.add("mismatch", len(traces) - len(ours))
        return self._writer.put(ours)

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Trace], Cursor]:
        with self._link.errors():
            spans = self._spans()
            start = cursors.start_of(spans, cursor)
            entries = {
                domain: self._entries(domain, start[domain], span.last)
                for domain, span in spans.items()
            }
            return cursors.take_oldest(entries, start, limit)

    def skip_to_newest(self, cursor: Cursor, keep: int) -> Cursor:
        with self._link.errors():
            spans = self._spans()
            start = cursors.start_of(spans, cursor)
            if cursors.num_unread(spans, start) <= keep:
                return start
            newest = {
                domain: self._newest_first(self._keys.train(domain), start[domain], span.last)
                for domain, span in spans.items()
            }
            return cursors.keep_newest(newest, spans, keep)

    def num_unread(self, cursor: Cursor) -> int:
        with self._link.errors():
            return cursors.num_unread(self._spans(), cursor)

    def sample(
        self, n: int, rng: np.random.Generator, cursor: Cursor, *, since: Cursor | None = None
    ) -> list[Trace]:
        entries: list[Entry] = []
        with self._link.errors():
            chosen = cursors.choose_seen(self._spans(), cursor, n, rng, since)
            for i in range(0, len(chosen), _READ_CHUNK):
                some = chosen[i : i + _READ_CHUNK]
                ranges = [
                    ("XRANGE", self._keys.train(domain), f"{seq}-0", f"{seq}-0")
                    for domain, seq in some
                ]
                for (domain, _), rows in zip(some, self._link.commands(ranges), strict=True):
                    entries += self._unreadable.entries(self._keys.train(domain), rows)
        return [entry.trace for entry in entries if entry.trace is not None]

    def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
        with self._link.errors():
            for slot, trace in anchors.items():
                if trace is None:
                    self._link.command("HDEL", self._keys.anchors, slot)
                else:
                    self._link.command("HSET", self._keys.anchors, slot, encode_trace(trace))

    def anchors(self, slots: Sequence[int]) -> list[Trace]:
        if not slots:
            return []
        with self._link.errors():
            found = zip(slots, self._link.command("HMGET", self._keys.anchors, *slots), strict=True)
            stored = {slot: data for slot, data in found if data is not None}
            traces = self._unreadable.anchors(self._keys.anchors, stored)
        return [traces[slot] for slot in slots if slot in traces]

    def holdout(self, n: int) -> list[Trace]:
        if n <= 0:
            return []
        entries: list[Entry] = []
        with self._link.errors():
            for domain in self._domains(self._keys):
                rows = self._link.command(
                    "XREVRANGE", key := self._keys.holdout(domain), "+", "-", "COUNT", n
                )
                entries += self._unreadable.entries(key, reversed(rows))
        traces = [entry.trace for entry in entries if entry.trace is not None]
        return sorted(traces, key=lambda trace: trace.finished_at)[-n:]

    def stats(self) -> BufferStats:
        with self._link.errors():
            domains = self._domains(self._keys)
            streams = (
                [self._keys.train(d) for d in domains],
                [self._keys.holdout(d) for d in domains],
            )
            train, held_out = ([info for info in self._infos(keys) if info] for keys in streams)
            sizes = self._link.commands(
                [("MEMORY", "USAGE", key) for keys in streams for key in keys]
            )
            unreadable = self._unreadable.totals()
        return BufferStats(
            num_traces=sum(info.span.num for info in train),
            num_holdout=sum(info.span.num for info in held_out),
            num_bytes=sum(size or 0 for size in sizes),
            num_put=sum(info.num_added for info in train),
            oldest_at=min((info.oldest_at for info in train if info.span.num), default=0.0),
            dropped=self.dropped | unreadable,
        )

    def make_room(self) -> int:
        """Where the server's memory is full of traces, and it evicts nothing itself, delete the
        oldest eighth of all streams of the deployment. Without traffic no put does, and whatever
        else is written would be refused. Returns how many traces that were."""
        with self._link.errors():
            info = self._link.command("INFO", "memory")
            most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
            used -= int(info.get("mem_not_counted_for_evict", 0))
            is_kept = info.get("maxmemory_policy", "noeviction") == "noeviction"
            lacking = used - (most - min(ROOM_BYTES, most // 16))
            return self._writer.free(lacking, used - most) if is_kept and most > 0 else 0

    def purge(
        self, *, domain: str | None = None, before: float | None = None, all_targets: bool = False
    ) -> int:
        """As in `TraceBuffer`. Then the server rewrites its append-only file, so that no deleted
        trace stays there."""
        chosen = None if domain is None else clean_domain(domain)
        with self._link.errors():
            until = math.inf if before is None else before + self._ahead()
            # Owed until it is done, also when a command before it fails.
            was_owed, self._owes_rewrite = self._owes_rewrite, True
            members = self._link.command("SMEMBERS", self._keys.buffers) if all_targets else []
            num = num_anchors = 0
            for keys in {self._keys, *self._keys.others(members)}:
                num_anchors += self._link.command("HLEN", keys.anchors)
                is_all = domain is None and before is None
                num += self._purge(keys) if is_all else self._purge_some(keys, chosen, until)
                num_anchors -= self._link.command("HLEN", keys.anchors)
            is_needed = was_owed or num > 0 or num_anchors > 0
            self._owes_rewrite = is_needed and not aof.forget(self._link.command)
        return num

    def close(self) -> None:
        self._link.close()
        self._put_link.close()

    def _purge(self, keys: Keys) -> int:
        """Delete one whole buffer. A put registers its domain and buffer after it has stored its
        traces, so traces that arrive meanwhile are deleted, or are registered at the end."""
        num = self._remove(keys, self._domains(keys))
        self._link.command("SREM", keys.buffers, keys.member)
        domains = self._domains(keys)
        if labels := domains[1:]:
            self._link.command("SREM", keys.domains, *labels)
        num += self._remove(keys, domains)
        self._link.command("DEL", keys.anchors)
        return num

    def _remove(self, keys: Keys, domains: Sequence[str]) -> int:
        """Delete the streams of these domains; return how many entries they held."""
        num = 0
        for streams in ([keys.train(domain), keys.holdout(domain)] for domain in domains):
            num += self._link.script(scripts.REMOVE, streams)
            self._link.command("UNLINK", *map(keys.marks, streams))
        return num

    def _purge_some(self, keys: Keys, domain: str | None, before: float) -> int:
        chosen = [name for name in self._domains(keys) if domain in (None, name)]
        num = sum(
            self._trim(key, before)
            for name in chosen
            for key in (keys.train(name), keys.holdout(name))
        )
        stored = {
            int(slot): data for slot, data in self._link.command("HGETALL", keys.anchors).items()
        }
        for slot, trace in self._unreadable.anchors(keys.anchors, stored).items():
            if domain in (None, clean_domain(trace.domain)) and trace.finished_at < before:
                self._link.command("HDEL", keys.anchors, slot)
        return num

    def _trim(self, key: str, before: float) -> int:
        """Remove all entries up to the last that finished before this time; return how many."""
        answer = self._link.script(scripts.SPAN, [key], ())
        if not answer:
            return 0
        span = _Info.parse(answer).span
        last = next(
            (seq for at, seq in self._newest_first(key, span.first - 1, span.last) if at < before),
            None,
        )
        if last is None:
            return 0
        return int(self._link.command("XTRIM", key, "MINID", "=", f"{last + 1}-0"))

    def _ahead(self) -> float:
        """Seconds by which the server's clock is ahead of this process's; 0 where they agree."""
        seconds, microseconds = self._link.command("TIME")
        ahead = float(seconds + microseconds / 1e6 - time.time())
        return ahead if abs(ahead) >= scripts.WRONG_CLOCK_S else 0.0

    def _domains(self, keys: Keys) -> list[str]:
        return [
            "",
            *sorted(label.decode() for label in self._link.command("SMEMBERS", keys.domains)),
        ]

    def _spans(self) -> dict[str, Span]:
        """Domain -> ids of its training traces."""
        domains = self._domains(self._keys)
        infos = self._infos([self._keys.train(domain) for domain in domains])
        return {domain: info.span for domain, info in zip(domains, infos, strict=True) if info}

    def _infos(self, keys: list[str]) -> list[_Info | None]:
        answers = self._link.scripts([(scripts.SPAN, [key], ()) for key in keys])
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [_Info.parse(answer) if answer else None for answer in answers]

    def _entries(self, domain: str, after: int, last: int) -> Iterator[Entry]:
        """Entries with ids in (after, last], fetched in chunks."""
        key = self._keys.train(domain)
        while after < last:
            rows = self._link.command(
                "XRANGE", key, f"{after + 1}-0", f"{last}-0", "COUNT", _READ_CHUNK
            )
            if not rows:
                return
            for entry in self._unreadable.entries(key, rows):
                after = entry.seq
                yield entry

    def _newest_first(self, key: str, after: int, last: int) -> Iterator[tuple[float, int]]:
        """(time, id) of a stream's entries with ids in (after, last], newest first."""
        while after < last:
            flat = self._link.script(
                scripts.TIMES, [key], [f"{last}-0", f"{after + 1}-0", _TIMES_CHUNK]
            )
            if not flat:
                return
            for seq, at in zip(flat[::2], flat[1::2], strict=True):
                yield _as_time(at), int(seq)
                last = int(seq) - 1


class _Info(NamedTuple):
    """What the server tells about one stream."""

    span: Span
    num_added: int
    oldest_at: float

    @classmethod
    def parse(cls, answer: list[Any]) -> _Info:
        first, last, num_added, oldest_at = answer
        return cls(Span(int(first), int(last)), int(num_added), _as_time(oldest_at))


def _as_time(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
