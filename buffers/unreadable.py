"""Stored entries that cannot be decoded: readers skip them, and each is counted once per
deployment.

    entry ─ decode ─► trace
              └─ fails ─► marked beside its stream ─ first mark ─► the deployment's total

Marks and totals are stored on the server, so that no later read, other client or restart counts an
entry again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from buffers import scripts
from buffers.codec import CorruptTrace, UnknownSchema, decode_trace
from buffers.cursor import UNREADABLE_AT, Entry
from buffers.link import Link
from buffers.redis_keys import Keys
from buffers.redis_writer import Drops
from osd.records import Trace

Row = tuple[bytes, dict[bytes, bytes] | None]
"""An entry of a stream as the server returns it: id and fields."""


class Unreadable:
    """Decodes the entries of one buffer. Every method raises `RedisError`."""

    def __init__(self, link: Link, keys: Keys, drops: Drops) -> None:
        self._link, self._keys, self._drops = link, keys, drops

    def entries(self, stream: str, rows: Iterable[Row]) -> list[Entry]:
        """The entries of these rows, in the same order."""
        entries: list[Entry] = []
        reasons: dict[int, str] = {}
        for entry_id, fields in rows:
            seq = int(entry_id.split(b"-")[0])
            fields = fields or {}
            trace, reason = _decode(fields.get(b"p", b""), fields.get(b"s") == b"1")
            if trace is not None:
                trace = _by_the_servers_clock(trace, fields.get(b"t", b""))
            entries.append(Entry(trace.finished_at if trace else UNREADABLE_AT, seq, trace))
            if reason:
                reasons[seq] = reason
        if reasons:
            is_new = self._link.script(
                scripts.MARK, [stream, self._keys.marks(stream)], list(reasons)
            )
            self._count(
                Counter(reason for reason, new in zip(reasons.values(), is_new, strict=True) if new)
            )
        return entries

    def anchors(self, anchors: str, found: Mapping[int, bytes]) -> dict[int, Trace]:
        """Slot -> trace. Unreadable slots are emptied."""
        traces: dict[int, Trace] = {}
        for slot, data in found.items():
            trace, reason = _decode(data)
            if trace is not None:
                traces[slot] = trace
            elif self._link.script(scripts.DISCARD, [anchors], [slot, data]):
                self._count(Counter([reason]))
        return traces

    def totals(self) -> dict[str, int]:
        """Reason -> entries that any client of this deployment ever met."""
        found = self._link.command("HGETALL", self._keys.unreadable)
        return {reason.decode(): int(num) for reason, num in found.items()}

    def _count(self, counts: Counter[str]) -> None:
        for reason, num in counts.items():
            self._drops.add(reason, num)
            self._link.script(scripts.COUNT, [self._keys.unreadable], [reason, num])


def _decode(data: bytes, is_shared: bool = False) -> tuple[Trace | None, str]:
    """The trace, or the reason why it cannot be decoded."""
    try:
        return decode_trace(data, is_shared=is_shared), ""
    except UnknownSchema:
        return None, "schema"
    except CorruptTrace:
        return None, "corrupt"


def _by_the_servers_clock(trace: Trace, at: bytes) -> Trace:
    """The trace with its time as the server has it: the clock of its writer may be wrong."""
    try:
        finished_at = float(at)
    except ValueError:
        return trace
    is_same = finished_at == trace.finished_at or not math.isfinite(finished_at)
    return trace if is_same else replace(trace, finished_at=finished_at)
