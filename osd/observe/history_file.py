"""The history of a deployment on disk: whole minutes, and events, in one SQLite file, so that it
survives restarts.

Redis' feed holds the newest hours; this file holds the rest. A file that cannot be read is put
aside and a new one begun: history is never a reason not to serve.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from osd.observe.slots import MINUTE_S, Key, SpeculationTimes, floor
from osd.records import Counters, Event, SwapReport, decode, encode

log = logging.getLogger(__name__)

SCHEMA = """
create table if not exists minutes (
    kind text, start real, labels blob, value blob, primary key (kind, start, labels)
) without rowid;
create table if not exists events (at real, type text, record blob, unique (type, record));
"""
EVENT_TYPES: dict[str, type[Event] | type[SwapReport]] = {"Event": Event, "SwapReport": SwapReport}
COLUMNS = {"minutes": ["kind", "start", "labels", "value"], "events": ["at", "type", "record"]}
MINUTE_TYPES: dict[str, tuple[Any, Any]] = {
    "replica": (tuple[str, int, int], Counters),
    "class": (tuple[str], Counters),
    "speculation": (tuple[str], SpeculationTimes),
}
"""Kind of a minute -> its labels, and what it holds."""
MAX_EVENTS = 2000
DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY)
"""Codes of SQLite for a file whose header is damaged, though it calls such errors operational. A
disk that takes no writes has refused before, where `_open` opens the file."""

Minute = tuple[str, Key, Any]
"""(kind, (start, labels ...), value)"""


class HistoryFile:
    """One writer. All of it raises `sqlite3.Error` or `OSError` when the disk refuses; the file
    stays whole.

    Example:
        kept = HistoryFile(Path("/data/history.db"))
        minute = ("replica", (1.7e9, "replica-0", 4, 5), Counters(num_drafts=100))
        kept.write([minute], [], oldest=1.69e9)
        for kind, key, value in kept.minutes(since=1.69e9): ...
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._db = _open(path)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode not in DAMAGE:
                raise
            aside = path.with_name(f"{path.name}.unreadable-{int(time.time())}")
            log.warning(
                "%s cannot be read (%s); it is kept as %s, and history begins anew",
                path,
                error,
                aside.name,
            )
            path.replace(aside)
            for suffix in ("-wal", "-shm"):  # what SQLite keeps beside a file is of that file alone
                with suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
            self._db = _open(path)

    def minutes(self, since: float) -> list[Minute]:
        """The kept minutes, oldest first, without those that this version cannot read."""
        query = "select kind, start, labels, value from minutes where start >= ? order by start"
        found = []
        for kind, start, labels, value in self._db.execute(query, (since,)):
            try:
                labels_type, value_type = MINUTE_TYPES[kind]
                key = (float(start), *msgspec.json.decode(labels, type=labels_type))
                found.append((kind, key, msgspec.json.decode(value, type=value_type)))
            except (KeyError, TypeError, ValueError, msgspec.DecodeError):
                continue
        return found

    def ends_at(self) -> float:
        """End of the newest minute; 0.0 without any."""
        newest = self._db.execute("select max(start) from minutes").fetchone()[0]
        return 0.0 if newest is None else float(newest) + MINUTE_S

    def events(self) -> list[Event | SwapReport]:
        """Oldest first."""
        found = []
        for kind, record in self._db.execute("select type, record from events order by at"):
            try:
                found.append(decode(record, EVENT_TYPES[kind]))
            except (KeyError, TypeError, ValueError):
                continue
        return found

    def write(
        self, minutes: Iterable[Minute], events: Iterable[Event | SwapReport], oldest: float
    ) -> None:
        """Keep these in one transaction; delete minutes before `oldest` and all but the newest
        events."""
        rows = [
            (kind, key[0], msgspec.json.encode(key[1:]).decode(), msgspec.json.encode(v))
            for kind, key, v in minutes
        ]
        with self._db:
            self._db.executemany("insert or replace into minutes values (?, ?, ?, ?)", rows)
            self._db.executemany(
                "insert or ignore into events values (?, ?, ?)",
                [(e.at, type(e).__name__, encode(e)) for e in events],
            )
            self._db.execute("delete from minutes where start < ?", (oldest,))
            self._db.execute(
                "delete from events where rowid not in (select rowid from events order by at desc "
                "limit ?)",
                (MAX_EVENTS,),
            )

    def close(self) -> None:
        self._db.close()


class UnopenedFile(HistoryFile):
    """A file that cannot be opened yet. What is to be written opens it, and raises where the disk
    still refuses. Minutes and events that the file has already stay in it as they are; they are
    read at the next start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: HistoryFile | None = None
        self._has_until = 0.0
        """Before this time, the minutes are the file's own."""

    def minutes(self, since: float) -> list[Minute]:
        return []

    def events(self) -> list[Event | SwapReport]:
        return []

    def write(
        self, minutes: Iterable[Minute], events: Iterable[Event | SwapReport], oldest: float
    ) -> None:
        file = self._opened()
        file.write([each for each in minutes if each[1][0] >= self._has_until], events, oldest)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> HistoryFile:
        if self._file is None:
            file = HistoryFile(self.path)
            # Where the clock was set back, the file may be ahead of it.
            self._has_until = min(file.ends_at(), floor(time.time(), MINUTE_S))
            self._file = file
        return self._file


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(path, timeout=2.0, check_same_thread=False)
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = normal")
        db.executescript(SCHEMA)
        if (state := db.execute("pragma quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(state)
        for table, columns in COLUMNS.items():
            found = [name for name, *_ in db.execute(f"select * from {table} limit 0").description]
            if found != columns:
                raise sqlite3.DatabaseError(f"its table {table} has columns {', '.join(found)}")
        with db:
            db.execute("delete from events where false")  # fails where none can be written
    except BaseException:
        db.close()
        raise
    return db
