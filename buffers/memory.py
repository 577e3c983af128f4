"""A replay buffer in this process's memory: for training from files, and the reference that the
other buffers are tested against."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from buffers import cursor as cursors
from buffers.base import Cursor, holdout_capacity, in_domain
from buffers.cursor import Entry, Span
from osd.records import BufferStats, Trace, clean_domain


@dataclass(slots=True)
class _Domain:
    traces: deque[Trace]
    holdout: deque[Trace]
    last: int
    """Id of the newest training trace."""

    @property
    def span(self) -> Span:
        return Span(self.last - len(self.traces) + 1, self.last)

    def entries(self, after: int) -> Iterator[Entry]:
        first = self.span.first
        return (
            Entry(trace.finished_at, first + index, trace)
            for index, trace in enumerate(self.traces)
            if first + index > after
        )

    def newest_first(self, after: int) -> Iterator[tuple[float, int]]:
        return ((entry.at, entry.seq) for entry in reversed(list(self.entries(after))))


class MemoryTraceBuffer:
    """`TraceBuffer` without a server. Its methods are documented there."""

    def __init__(
        self,
        *,
        draft: str = "default",
        target_id: str,
        max_traces: int = 20_000,
        max_domains: int = 16,
    ) -> None:
        self._draft = draft
        self._target_id = target_id
        self._max_traces = max_traces
        self._max_domains = max_domains
        self._domains: dict[str, _Domain] = {}
        self._anchors: dict[int, Trace] = {}
        self._num_put = 0
        self._next_base = 0
        self._dropped: Counter[str] = Counter()
        self._lock = threading.RLock()

    @property
    def dropped(self) -> dict[str, int]:
        with self._lock:
            return dict(self._dropped)

    def put(self, traces: Sequence[Trace]) -> int:
        with self._lock:
            return sum(self._put_one(trace) for trace in traces)

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Trace], Cursor]:
        with self._lock:
            start = cursors.start_of(self._spans(), cursor)
            entries = {
                domain: self._domains[domain].entries(after) for domain, after in start.items()
            }
            return cursors.take_oldest(entries, start, limit)

    def skip_to_newest(self, cursor: Cursor, keep: int) -> Cursor:
        with self._lock:
            spans = self._spans()
            start = cursors.start_of(spans, cursor)
            if cursors.num_unread(spans, start) <= keep:
                return start
            newest = {
                domain: self._domains[domain].newest_first(after) for domain, after in start.items()
            }
            return cursors.keep_newest(newest, spans, keep)

    def num_unread(self, cursor: Cursor) -> int:
        with self._lock:
            return cursors.num_unread(self._spans(), cursor)

    def sample(
        self, n: int, rng: np.random.Generator, cursor: Cursor, *, since: Cursor | None = None
    ) -> list[Trace]:
        with self._lock:
            chosen = cursors.choose_seen(self._spans(), cursor, n, rng, since)
            return [self._domains[d].traces[seq - self._domains[d].span.first] for d, seq in chosen]

    def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
        with self._lock:
            for slot, trace in anchors.items():
                self._anchors.pop(slot, None)
                if trace is not None:
                    self._anchors[slot] = trace

    def anchors(self, slots: Sequence[int]) -> list[Trace]:
        with self._lock:
            return [self._anchors[slot] for slot in slots if slot in self._anchors]

    def holdout(self, n: int) -> list[Trace]:
        with self._lock:
            traces = [trace for domain in self._domains.values() for trace in domain.holdout]
        return sorted(traces, key=lambda trace: trace.finished_at)[-n:] if n > 0 else []

    def stats(self) -> BufferStats:
        with self._lock:
            domains = self._domains.values()
            stored = [trace for domain in domains for trace in domain.traces]
            held_out = [trace for domain in domains for trace in domain.holdout]
            return BufferStats(
                num_traces=len(stored),
                num_holdout=len(held_out),
                num_bytes=sum(trace.num_bytes for trace in stored + held_out),
                num_put=self._num_put,
                oldest_at=min(
                    (domain.traces[0].finished_at for domain in domains if domain.traces),
                    default=0.0,
                ),
                dropped=self.dropped,
            )

    def purge(
        self, *, domain: str | None = None, before: float | None = None, all_targets: bool = False
    ) -> int:
        if domain is not None or before is not None:
            chosen = None if domain is None else clean_domain(domain)
            return self._purge_some(chosen, math.inf if before is None else before)
        with self._lock:
            num = sum(len(domain.traces) + len(domain.holdout) for domain in self._domains.values())
            self._next_base = max(
                (domain.last for domain in self._domains.values()), default=self._next_base
            )
            self._domains.clear()
            self._anchors.clear()
            self._num_put = 0
            return num

    def _purge_some(self, domain: str | None, before: float) -> int:
        with self._lock:
            chosen = [part for name, part in self._domains.items() if domain in (None, name)]
            for slot, trace in list(self._anchors.items()):
                if domain in (None, clean_domain(trace.domain)) and trace.finished_at < before:
                    del self._anchors[slot]
            return sum(
                _drop_older(traces, before)
                for part in chosen
                for traces in (part.traces, part.holdout)
            )

    def close(self) -> None:
        pass

    def _put_one(self, trace: Trace) -> int:
        if (trace.draft, trace.target_id) != (self._draft, self._target_id):
            self._dropped["mismatch"] += 1
            return 0
        name = self._admit(clean_domain(trace.domain))
        domain = self._domains.get(name) or self._open(name)
        if trace.is_holdout:
            domain.holdout.append(in_domain(trace, name))
        else:
            domain.traces.append(in_domain(trace, name))
            domain.last += 1
            self._num_put += 1
        return 1

    def _admit(self, name: str) -> str:
        num_labels = len(self._domains.keys() - {""})
        return name if name in self._domains or num_labels < self._max_domains else ""

    def _open(self, name: str) -> _Domain:
        self._domains[name] = _Domain(
            traces=deque(maxlen=self._max_traces),
            holdout=deque(maxlen=holdout_capacity(self._max_traces)),
            last=self._next_base,
        )
        return self._domains[name]

    def _spans(self) -> dict[str, Span]:
        return {name: domain.span for name, domain in self._domains.items()}


def _drop_older(traces: deque[Trace], before: float) -> int:
    """Remove all traces up to the last that finished before this time; return how many."""
    num = max((i + 1 for i, trace in enumerate(traces) if trace.finished_at < before), default=0)
    for _ in range(num):
        traces.popleft()
    return num
