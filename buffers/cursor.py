"""Arithmetic on cursors and dense ids, without I/O. All buffers share it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from buffers.base import Cursor
from osd.records import Trace


class Span(NamedTuple):
    """The ids stored in one domain: all of [first, last]; none when last = first - 1."""

    first: int
    last: int

    @property
    def num(self) -> int:
        return self.last - self.first + 1


class Entry(NamedTuple):
    """One stored entry: its time, its id, and its trace (None when it cannot be decoded)."""

    at: float
    seq: int
    trace: Trace | None


UNREADABLE_AT = float("-inf")
"""`Entry.at` of an entry that cannot be decoded. It leaves a merge first, so it never blocks a
cursor."""


def start_of(spans: Mapping[str, Span], cursor: Cursor) -> Cursor:
    """The cursor clamped to each domain's span: after what was trimmed, at most at the last id."""
    return {
        domain: max(min(cursor.get(domain, 0), span.last), span.first - 1)
        for domain, span in spans.items()
    }


def num_unread(spans: Mapping[str, Span], cursor: Cursor) -> int:
    """Number of ids after the cursor."""
    start = start_of(spans, cursor)
    return sum(span.last - start[domain] for domain, span in spans.items())


def take_oldest(
    entries: Mapping[str, Iterable[Entry]], start: Cursor, limit: int
) -> tuple[list[Trace], Cursor]:
    """Merge the domains' entries by time; return the first `limit` traces and the new cursor.

    The cursor moves past entries that cannot be decoded, so each is met once.
    """
    traces: list[Trace] = []
    moved = dict(start)
    if limit <= 0:
        return traces, moved
    for domain, entry in merge_by_time(entries):
        if entry.trace is not None:
            if len(traces) == limit:
                break
            traces.append(entry.trace)
        moved[domain] = entry.seq
    return traces, moved


def keep_newest(
    newest_first: Mapping[str, Iterable[tuple[float, int]]], spans: Mapping[str, Span], keep: int
) -> Cursor:
    """The cursor right before the newest `keep` entries. Each domain yields its (time, id) pairs
    newest first."""
    cursor = {domain: span.last for domain, span in spans.items()}
    entries = {
        domain: (Entry(-at, seq, None) for at, seq in pairs)
        for domain, pairs in newest_first.items()
    }
    merged = merge_by_time(entries)
    for _ in range(keep):
        domain, entry = next(merged, ("", None))
        if entry is None:
            break
        cursor[domain] = entry.seq - 1
    return cursor


def merge_by_time(entries: Mapping[str, Iterable[Entry]]) -> Iterator[tuple[str, Entry]]:
    """(domain, entry), lazily, earliest first. The order within a domain stays, even where its
    times are not sorted."""
    labelled = [_label(domain, stream) for domain, stream in sorted(entries.items())]
    return heapq.merge(*labelled, key=lambda pair: pair[1].at)


def choose_seen(
    spans: Mapping[str, Span],
    cursor: Cursor,
    n: int,
    rng: np.random.Generator,
    since: Cursor | None = None,
) -> list[tuple[str, int]]:
    """`n` different (domain, id) pairs at or before the cursor and after `since`; fewer when there
    are fewer.

    Domains take turns in random order while they have ids left. Within a domain all ids are equally
    likely.
    """
    seen: dict[str, Span] = {}
    for domain, span in sorted(spans.items()):
        first = max(span.first, (since or {}).get(domain, 0) + 1)
        last = min(span.last, cursor.get(domain, 0))
        if last >= first:
            seen[domain] = Span(first, last)
    quotas = _take_turns([span.num for span in seen.values()], n, rng)
    return [
        (domain, span.first + int(index))
        for (domain, span), quota in zip(seen.items(), quotas, strict=True)
        for index in rng.choice(span.num, size=quota, replace=False)
    ]


def _take_turns(available: list[int], n: int, rng: np.random.Generator) -> list[int]:
    """The quota of each domain when `n` are dealt one at a time, in random order, as far as each
    has them."""
    quotas = [0] * len(available)
    order = rng.permutation(len(available)).tolist()
    left = max(0, min(n, sum(available)))
    while left:
        open_ones = [i for i in order if quotas[i] < available[i]]
        each = max(1, min(left // len(open_ones), *(available[i] - quotas[i] for i in open_ones)))
        for i in open_ones[:left]:
            quotas[i] += each
            left -= each
    return quotas


def _label(domain: str, stream: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    return ((domain, entry) for entry in stream)
