"""The history of a deployment in memory: what the dashboard draws, the watch loop judges by, and
Prometheus scrapes.

It is built anew at start, from the registry's feed and, for what is older, from the file it keeps:

    file ──► minutes ┐
    feed ─► add ─► slots (`slots.py`) ─► series (`series.py`), window
                ├► totals (`exposition.py`) ─► prometheus
                └► lists of events, swaps, rounds, changes of plan (`happened.py`)

    slots, events ─► save ─► file
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from osd.common.clock import Skew
from osd.exchange.registry import FeedRecord
from osd.observe import series
from osd.observe.exposition import OTHER_CLASSES, Totals
from osd.observe.happened import MOST_GONE, Happened, keep_newest
from osd.observe.history_file import HistoryFile
from osd.observe.slots import MINUTE_S, Key, SlotTable, SpeculationTimes, added, floor, spread
from osd.observe.status import seconds_per_part
from osd.records import (
    BufferStats,
    Counters,
    Event,
    Health,
    MetricPoint,
    ReplicaPlanChange,
    ReplicaStatus,
    RoundOutcome,
    SpecWindow,
    SwapReport,
    encode,
)

MAX_CLASSES = 8
"""Classes of traffic counted apart, besides the unlabelled; the first to come of those in the
history."""
UNLABELLED = "(unlabelled)"
LATE_S = 45.0
"""Seconds after which nothing more is expected of a minute."""


class History:
    """Thread-safe; nothing is older than `history_seconds` before the newest window.

    Example:
        history = History(7 * 86400, HistoryFile(Path("/data/history.db")))
        for last, record in registry.read(): history.add(record)
        history.window(version=4).alpha
    """

    def __init__(self, history_seconds: float = 7 * 86400, file: HistoryFile | None = None) -> None:
        self._history_seconds, self._file = history_seconds, file
        self._counts = SlotTable(Counters, narrow_s=1.0, is_summed=True)
        """(start, replica, version, k)"""
        self._classes = SlotTable(Counters, narrow_s=5.0)
        """(start, class of traffic)"""
        self._steps = SlotTable(SpeculationTimes, narrow_s=10.0)
        """(start, replica)"""
        self._class_names: set[str] = {UNLABELLED}
        self._classes_sought_at = -math.inf
        self._served: dict[int, tuple[int, int]] = {}
        """version -> (tested, accepted)"""
        self._ends: dict[str, float] = {}
        """replica -> end of its newest window; the windows of one look share their seconds"""
        self._seconds_per_part: dict[tuple[str, float], dict[str, float]] = {}
        """(replica, started_at) -> what its newest heartbeat reported"""
        self._skews: dict[tuple[str, float], Skew] = {}
        self._happened = Happened()
        self._totals = Totals()
        self._lock = threading.RLock()
        self._kept: set[bytes] = set()
        """Events of the file; the feed may tell them again."""
        self._unsaved: list[Event | SwapReport] = []
        self._loaded_until = self._loaded_at = 0.0
        """Start of the first minute that the file did not have when it was read; when it was."""
        self._feed_from: float | None = None if file else 0.0
        """Windows that ended before are in the file's minutes; None until the feed's first one."""
        if file is not None:
            self._load(file)

    def add(self, record: FeedRecord) -> None:
        """Take one record of the feed."""
        with self._lock:
            self._totals.add(record)
            match record:
                case SpecWindow():
                    self._add_window(record)
                case Event() | SwapReport():
                    self._add_event(record)
                case RoundOutcome():
                    self._happened.rounds.append(record)
                case MetricPoint():
                    pass

    def observe(
        self, seen: Iterable[ReplicaStatus], buffer: BufferStats | None, now: float | None = None
    ) -> None:
        """Take the heartbeats of the living replicas, and the statistics of the buffer. `now`: by
        which their times are corrected; None where their clocks are right."""
        replicas = list(seen)
        with self._lock:
            self._totals.observe(replicas, buffer)
            self._happened.observe(replicas)
            for status in replicas:
                self._add_speculation(status, now)
            for table in (self._ends, self._seconds_per_part, self._skews):
                keep_newest(table, len(replicas) + MOST_GONE)

    def observe_health(self, health: Health) -> None:
        """Take the health that the controller found in its last look."""
        with self._lock:
            self._totals.observe_health(health)

    def series(self, since: float, bucket_s: float, by: str = "") -> dict[str, Any]:
        """Columns (`osd.observe.series.COLUMNS`) with one row per bucket from `since` to the newest
        window.

        With `by` ("class", "replica" or "position"), also `lines`: name -> the three acceptances, a
        value for each row.
        """
        bucket_s = max(bucket_s, 1.0)
        with self._lock:
            counts, steps = self._counts.since(since, bucket_s), self._steps.since(since, bucket_s)
            columns: dict[str, Any] = series.columns(counts, steps, bucket_s)
            if by:
                table = self._classes if by == "class" else self._counts
                label = {"class": 1, "replica": 1, "position": None}[by]
                columns["lines"] = series.lines(
                    table.since(since, bucket_s), bucket_s, columns["at"], label
                )
        return columns

    def window(
        self,
        version: int | None = None,
        since: float = 0.0,
        until: float = math.inf,
        replica: str | None = None,
    ) -> SpecWindow | None:
        """The sum of all windows of a version (None = of all versions) and of a replica (the same)
        in a span; None without any."""
        with self._lock:
            found = self._counts.between(since, until)
            wanted = [(k, c) for k, c in found if version in (None, k[2])]
            return self._sum([(k, c) for k, c in wanted if replica in (None, k[1])])

    def windows(
        self, version: int, since: float, until: float
    ) -> tuple[SpecWindow | None, dict[str, SpecWindow | None]]:
        """As `window`, of all replicas together and of each, in one pass."""
        with self._lock:
            of_each: dict[str, list[tuple[Key, Counters]]] = {}
            for key, counted in self._counts.between(since, until):
                if key[2] == version:
                    of_each.setdefault(str(key[1]), []).append((key, counted))
            sums = {name: added(own, Counters()) for name, own in of_each.items()}
            each = {name: self._sum([one]) for name, one in sums.items()}
            return self._sum(list(sums.values())), each

    def _sum(self, found: list[tuple[Key, Counters]]) -> SpecWindow | None:
        if not found:
            return None
        (start, name, newest_version, k), total = added(found, Counters())
        at = max(self._ends.get(name, start), start)
        return SpecWindow.of(total, at=at, replica=name, version=newest_version, k=k)

    def served(self, version: int) -> tuple[int, int]:
        """(tested, accepted) draft tokens of a version, in the feed and in the file."""
        with self._lock:
            return self._served.get(version, (0, 0))

    def marks(self) -> list[dict[str, Any]]:
        """When the deployment went over to another version, oldest first."""
        with self._lock:
            return self._happened.marks()

    def events(self, limit: int = 100) -> list[Event]:
        """The newest events, oldest first; swaps are among them."""
        with self._lock:
            return self._happened.events(limit)

    def rounds(self) -> list[RoundOutcome]:
        """Training rounds, oldest first."""
        with self._lock:
            return list(self._happened.rounds)

    def swaps(self) -> list[SwapReport]:
        """Swap reports, in the order they came."""
        with self._lock:
            return list(self._happened.swaps)

    def changes(self, limit: int = 50) -> list[ReplicaPlanChange]:
        """The newest changes of what is speculated, oldest first.

        They come from heartbeats, so only those since the start of this process are known.
        """
        with self._lock:
            return self._happened.changes(limit)

    def total(self, name: str) -> int:
        """Sum of a counter over its labels: `total("osd_rollback_total")`."""
        with self._lock:
            return self._totals.total(name)

    def prometheus(self) -> str:
        """Prometheus text of the whole deployment."""
        with self._lock:
            return self._totals.render()

    def save(self, now: float | None = None) -> None:
        """Write whole minutes and new events to the file. Raises `sqlite3.Error` or `OSError`; the
        next call then writes them."""
        if self._file is None:
            return
        now = time.time() if now is None else now
        until = floor(now - LATE_S, MINUTE_S)
        with self._lock:
            events, tables = list(self._unsaved), self._tables()
            # Of minutes that an earlier process wrote the feed may no longer have all.
            first = min(self._loaded_until, floor(self._loaded_at, MINUTE_S))
            minutes = [
                (kind, key, value)
                for kind, table in tables.items()
                for key, value in table.changed(until).items()
                if key[0] >= first
            ]
            # What is added while the file is written is to be written again.
            starts = {kind: table.note_saved(until) for kind, table in tables.items()}
        try:
            self._file.write(minutes, events, oldest=now - self._history_seconds)
        except BaseException:
            with self._lock:
                for kind, table in tables.items():
                    table.note_unsaved(starts[kind])
            raise
        with self._lock:
            del self._unsaved[: len(events)]

    def _tables(self) -> dict[str, SlotTable[Any]]:
        """The table of each kind of minute in the file."""
        return {"replica": self._counts, "class": self._classes, "speculation": self._steps}

    def _load(self, file: HistoryFile) -> None:
        self._loaded_at = time.time()
        for kind, key, value in file.minutes(self._loaded_at - self._history_seconds):
            self._tables()[kind].put_minute(key, value)
            self._loaded_until = max(self._loaded_until, key[0] + MINUTE_S)
            if kind == "replica":
                self._count_served(key[2], value)
            if kind == "class" and key[1] != OTHER_CLASSES:
                self._class_names.add(str(key[1]))
        for event in file.events():
            self._kept.add(encode(event))
            self._happened.add(event)

    def _add_window(self, window: SpecWindow) -> None:
        if self._feed_from is None:
            self._feed_from = self._meet_feed(window.at)
        if window.at < self._feed_from:
            return
        is_same_look = self._ends.pop(window.replica, None) == window.at
        self._ends[window.replica] = window.at
        timed = window.counters
        counts = replace(timed, seconds=0.0) if is_same_look else timed
        labels, name = (window.replica, window.version, window.k), self._class_of(window)
        for at, part in spread(window.at, window.seconds, counts):
            if at >= self._feed_from:
                self._counts.add(at, labels, part)
                self._count_served(window.version, part)
                self._classes.add(at, (name,), replace(part, seconds=0.0))
        for table in self._tables().values():
            table.forget(window.at, window.at - self._history_seconds)

    def _meet_feed(self, at: float) -> float:
        """Unix time from which windows of the feed are taken. The feed repeats what the file has
        since its first window, `at`, in finer slots: these minutes of the file are dropped. The
        minute in which the feed begins stays, since the feed may lack a part of it."""
        minute = floor(at, MINUTE_S)
        for table in (self._counts, self._classes):
            table.drop_minutes(after=minute)
        self._served.clear()
        for key, counts in self._counts.since(0.0):
            self._count_served(key[2], counts)
        until = minute + MINUTE_S if minute < self._loaded_until else self._loaded_until
        return min(until, self._loaded_at)  # the file is ahead where the clock was set back

    def _count_served(self, version: int, counters: Counters) -> None:
        tested, accepted = self._served.get(version, (0, 0))
        self._served[version] = (
            tested + sum(counters.num_tested_per_pos),
            accepted + sum(counters.num_accepted_tokens_per_pos),
        )

    def _class_of(self, window: SpecWindow) -> str:
        name = window.domain or UNLABELLED
        if name not in self._class_names and len(self._class_names) > MAX_CLASSES:
            self._forget_classes(window.at)
            if len(self._class_names) > MAX_CLASSES:
                return OTHER_CLASSES
        self._class_names.add(name)
        return name

    def _forget_classes(self, at: float) -> None:
        """Those of which the history has nothing any more. Sought once a minute."""
        if floor(at, MINUTE_S) != self._classes_sought_at:
            self._classes_sought_at = floor(at, MINUTE_S)
            kept = {str(name) for (name,) in self._classes.labels()}
            self._class_names = {UNLABELLED, *kept} - {OTHER_CLASSES}

    def _add_event(self, record: Event | SwapReport) -> None:
        if self._file is not None:
            if encode(record) in self._kept:
                return
            self._unsaved.append(record)
        self._happened.add(record)

    def _add_speculation(self, status: ReplicaStatus, now: float | None) -> None:
        """Take what the replica's totals grew by since its last heartbeat."""
        report = status.speculation
        if report is None:
            return
        run, seconds = (status.replica, status.started_at), seconds_per_part(report)
        before, self._seconds_per_part[run] = self._seconds_per_part.pop(run, None), seconds
        if before is None:
            return
        grown = {part: s - before.get(part, 0.0) for part, s in seconds.items()}
        grown = {part: s for part, s in grown.items() if s > 0}
        if grown:
            net = report.net
            measured = None if net.ratio is None else (net.ratio, net.low, net.high)
            times = SpeculationTimes(net=measured, seconds_per_part=grown)
            self._skews[run] = skew = self._skews.pop(run, None) or Skew()
            at = status.at if now is None else skew.by_ours(status.at, now)
            self._steps.add(at, (status.replica,), times)
