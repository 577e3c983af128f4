"""The history of a deployment in memory: what the dashboard draws, the watch loop judges by, and Prometheus scrapes.

It is rebuilt from the registry's feed at start. Windows are folded into slots, narrow for the last two hours and wide
before, so that a day of history costs megabytes:

    feed ─► add ─► slots (1 s, then 10 s) ─► series, window        events, swaps, rounds, changes of plan ─► lists
                └► totals ─► prometheus
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from osd.exposition import Totals
from osd.records import (
    BufferStats,
    Event,
    MetricPoint,
    ReplicaStatus,
    RoundOutcome,
    SpecWindow,
    SwapReport,
    acceptance_length,
    acceptance_rate,
    conditional_acceptance,
)
from osd.registry import FeedRecord
from osd.status import plan_changes

NARROW_S, WIDE_S = 1.0, 10.0
NARROW_FOR_S = 7200.0
"""Seconds for which slots stay narrow."""
MAX_LISTED = 2000
"""Events, swaps and rounds kept."""
MAX_CHANGES = 200
"""Changes of plan kept."""
COLUMNS = (
    "at",
    "alpha",
    "acceptance_rate",
    "acceptance_length",
    "tokens_per_second",
    "tpot_ms",
    "version",
    "k",
    "requests",
)

SlotKey = tuple[float, str, int, int]
"""Start of the slot, replica, version, k."""


@dataclass(slots=True)
class Slot:
    """Sum of windows that end in the same short time, of one replica, version and k; over all domains."""

    seconds: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_captured: int = 0
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0
    accepted_per_pos: list[int] = field(default_factory=list)
    tested_per_pos: list[int] = field(default_factory=list)

    def add_window(self, window: SpecWindow, seconds: float) -> None:
        self.seconds += seconds
        self._add_counts(window)
        self.accepted_per_pos = _sum(self.accepted_per_pos, window.num_accepted_tokens_per_pos)
        self.tested_per_pos = _sum(self.tested_per_pos, window.num_tested_per_pos)

    def add_slot(self, other: Slot) -> None:
        self.seconds += other.seconds
        self._add_counts(other)
        self.accepted_per_pos = _sum(self.accepted_per_pos, other.accepted_per_pos)
        self.tested_per_pos = _sum(self.tested_per_pos, other.tested_per_pos)

    def _add_counts(self, other: SpecWindow | Slot) -> None:
        self.num_steps += other.num_steps
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_output_tokens += other.num_output_tokens
        self.num_finished += other.num_finished
        self.num_captured += other.num_captured
        self.num_decode_tokens += other.num_decode_tokens
        self.decode_seconds += other.decode_seconds


class History:
    """Thread-safe; nothing is older than `history_seconds` before the newest window.

    Example:
        history = History(24 * 3600)
        for last, record in registry.read(): history.add(record)
        history.window(version=4).alpha
    """

    def __init__(self, history_seconds: float = 24 * 3600) -> None:
        self._history_seconds = history_seconds
        self._narrow: dict[SlotKey, Slot] = {}
        self._wide: dict[SlotKey, Slot] = {}
        self._ends: dict[str, float] = {}
        """replica -> end of its newest window; the windows of one look share their seconds"""
        self._events: deque[Event] = deque(maxlen=MAX_LISTED)
        self._swaps: deque[SwapReport] = deque(maxlen=MAX_LISTED)
        self._rounds: deque[RoundOutcome] = deque(maxlen=MAX_LISTED)
        self._changes: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        self._changed_at: dict[str, float] = {}
        """replica -> time of its newest change of plan; a heartbeat is seen more than once"""
        self._totals = Totals()
        self._lock = threading.RLock()

    def add(self, record: FeedRecord) -> None:
        """Take one record of the feed."""
        with self._lock:
            self._totals.add(record)
            match record:
                case SpecWindow():
                    self._add_window(record)
                case SwapReport():
                    self._swaps.append(record)
                    self._events.append(_swap_event(record))
                case Event():
                    self._events.append(record)
                case RoundOutcome():
                    self._rounds.append(record)
                case MetricPoint():
                    pass

    def observe(self, replicas: Iterable[ReplicaStatus], buffer: BufferStats | None) -> None:
        """Take what does not come by the feed: the living replicas, and what the buffer holds."""
        replicas = list(replicas)
        with self._lock:
            self._totals.observe(replicas, buffer)
            for status in replicas:
                self._add_changes(status)

    def series(self, since: float, bucket_s: float) -> dict[str, list[Any]]:
        """Columns (`COLUMNS`) with one row per bucket from `since` to the newest window; None where nothing was seen.

        `at` is a bucket's start, `version` is the one most tokens came from, `k` the draft tokens proposed per request
        and step, `tokens_per_second` counts only the time in which a replica had work, and adds replicas up.
        """
        bucket_s = max(bucket_s, NARROW_S)
        buckets: dict[int, list[tuple[SlotKey, Slot]]] = {}
        with self._lock:
            for key, slot in self._slots(since):
                buckets.setdefault(math.floor(key[0] / bucket_s), []).append((key, slot))
            columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
            for index in range(min(buckets), max(buckets) + 1) if buckets else ():
                row = _row(buckets.get(index, [])) | {"at": index * bucket_s}
                for name in COLUMNS:
                    columns[name].append(row.get(name))
        return columns

    def window(self, version: int | None = None, since: float = 0.0) -> SpecWindow | None:
        """Everything seen since, of one version or of all, as one window; None when there was nothing."""
        with self._lock:
            found = [(k, s) for k, s in self._slots(since) if version in (None, k[2])]
        if not found:
            return None
        total = Slot()
        for _, slot in found:
            total.add_slot(slot)
        start, replica, newest_version, k = max(found)[0]
        return SpecWindow(
            at=max(self._ends.get(replica, start), start),
            replica=replica,
            version=newest_version,
            seconds=total.seconds,
            k=k,
            num_steps=total.num_steps,
            num_drafts=total.num_drafts,
            num_draft_tokens=total.num_draft_tokens,
            num_accepted_tokens=total.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(total.accepted_per_pos),
            num_tested_per_pos=tuple(total.tested_per_pos),
            num_output_tokens=total.num_output_tokens,
            num_finished=total.num_finished,
            num_captured=total.num_captured,
            decode_seconds=total.decode_seconds,
            num_decode_tokens=total.num_decode_tokens,
        )

    def marks(self) -> list[dict[str, Any]]:
        """When the deployment went over to another version: `{"at", "version"}`, oldest first.

        The first replica to swap counts; those that follow, or are catching up, do not mark it again.
        """
        marks: list[dict[str, Any]] = []
        for report in sorted(self.swaps(), key=lambda report: report.at):
            is_new = all(mark["version"] != report.version for mark in marks)
            if report.ok and (is_new or report.previous == marks[-1]["version"] != report.version):
                marks.append({"at": report.at, "version": report.version})
        return marks

    def events(self, limit: int = 100) -> list[Event]:
        """The newest events, oldest first; swaps are among them."""
        with self._lock:
            return sorted(self._events, key=lambda event: event.at)[-limit:]

    def rounds(self) -> list[RoundOutcome]:
        """Training rounds, oldest first."""
        with self._lock:
            return list(self._rounds)

    def swaps(self) -> list[SwapReport]:
        """Swap reports, in the order they came."""
        with self._lock:
            return list(self._swaps)

    def changes(self, limit: int = 50) -> list[dict[str, Any]]:
        """The newest changes of what is speculated, oldest first: {"at", "replica", "from", "to", "batch", "reason"}.

        From heartbeats: those of before this process are not known.
        """
        with self._lock:
            return sorted(self._changes, key=lambda change: change["at"])[-limit:]

    def total(self, name: str) -> int:
        """Sum of a counter over its labels: `total("osd_rollback_total")`."""
        with self._lock:
            return self._totals.total(name)

    def prometheus(self) -> str:
        """Prometheus text of the whole deployment."""
        with self._lock:
            return self._totals.render()

    def _add_window(self, window: SpecWindow) -> None:
        is_same_look = self._ends.get(window.replica) == window.at
        self._ends[window.replica] = window.at
        key = (_floor(window.at, NARROW_S), window.replica, window.version, window.k)
        self._narrow.setdefault(key, Slot()).add_window(window, 0.0 if is_same_look else window.seconds)
        self._forget(window.at)

    def _add_changes(self, status: ReplicaStatus) -> None:
        changed_at = self._changed_at.get(status.replica, 0.0)
        new = [change for change in plan_changes(status) if change["at"] > changed_at]
        self._changes.extend(new)
        self._changed_at[status.replica] = max([changed_at, *(change["at"] for change in new)])

    def _forget(self, now: float) -> None:
        """Fold what is no longer recent into wide slots, and drop what is too old."""
        while self._narrow and (key := next(iter(self._narrow)))[0] < now - NARROW_FOR_S:
            slot = self._narrow.pop(key)
            self._wide.setdefault((_floor(key[0], WIDE_S), *key[1:]), Slot()).add_slot(slot)
        for slots in (self._wide, self._narrow):
            while slots and (key := next(iter(slots)))[0] < now - self._history_seconds:
                del slots[key]

    def _slots(self, since: float) -> list[tuple[SlotKey, Slot]]:
        return [item for slots in (self._wide, self._narrow) for item in slots.items() if item[0][0] >= since]


def _row(found: list[tuple[SlotKey, Slot]]) -> dict[str, Any]:
    """One bucket's values; {} without data."""
    if not found:
        return {}
    total, tokens, per_replica = Slot(), Counter[tuple[int, int]](), dict[str, Slot]()
    for (_, replica, version, k), slot in found:
        total.add_slot(slot)
        tokens[version, k] += slot.num_output_tokens
        per_replica.setdefault(replica, Slot()).add_slot(slot)
    version, k = max(tokens, key=lambda key: (tokens[key], key))
    speeds = [slot.num_output_tokens / slot.seconds for slot in per_replica.values() if slot.seconds > 0]
    return {
        "alpha": conditional_acceptance(sum(total.accepted_per_pos), sum(total.tested_per_pos)),
        "acceptance_rate": acceptance_rate(total.num_accepted_tokens, total.num_draft_tokens),
        "acceptance_length": acceptance_length(total.num_accepted_tokens, total.num_drafts),
        "tokens_per_second": sum(speeds) if speeds else None,
        "tpot_ms": 1000 * total.decode_seconds / total.num_decode_tokens if total.num_decode_tokens else None,
        "version": version,
        "k": _k_used([slot for _, slot in found], k),
        "requests": total.num_finished,
    }


def _k_used(slots: list[Slot], k: int) -> float | None:
    """Draft tokens per request and step; `k`, the most there may be, where steps were not counted; None without any."""
    counted = [slot for slot in slots if slot.num_steps]
    num_steps = sum(slot.num_steps for slot in counted)
    if num_steps:
        return round(sum(slot.num_draft_tokens for slot in counted) / num_steps, 2)
    return k if any(slot.num_output_tokens for slot in slots) else None


def _swap_event(report: SwapReport) -> Event:
    if report.ok:
        text = (
            f"{report.replica}: v{report.previous} -> v{report.version}, engine paused {1000 * report.pause_s:.1f} ms"
            + (", weights read back and equal" if report.proved else "")
        )
        return Event(at=report.at, kind="swapped", text=text, version=report.version)
    text = f"{report.replica} keeps v{report.previous}, v{report.version} was refused: {report.error}"
    return Event(at=report.at, kind="swap_failed", text=text, version=report.version)


def _sum(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


def _floor(at: float, width: float) -> float:
    return math.floor(at / width) * width
