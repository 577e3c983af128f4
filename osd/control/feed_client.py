"""The feed as the controller uses it: it hears every record, and appends its own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from osd.control.drift import DriftDetector
from osd.control.protocols import Feed
from osd.errors import ReplayBufferError
from osd.exchange.registry import FeedRecord
from osd.observe.history import History
from osd.records import Event

log = logging.getLogger(__name__)

CHUNK = 1000
"""Records read at a time."""
MOST_UNANSWERED = 100
"""Records that Redis may have taken without an answer; of older ones it is not known any more."""


class FeedClient:
    """Passes each record of the feed once, in order, to the history and the drift detector. What
    comes to another feed in its place (of a Redis that lost it, or has an older one) between two
    looks counts as heard.

    Example:
        feed = FeedClient(registry, history, detector)
        await feed.catch_up()
        await feed.tell(Event(at=clock.time(), kind="paused", text="by hand"))
    """

    def __init__(self, registry: Feed, history: History, detector: DriftDetector) -> None:
        self._registry, self._history, self._detector = registry, history, detector
        self._cursor = "0"
        self._unanswered = deque[FeedRecord](maxlen=MOST_UNANSWERED)
        """Heard when they were told. Redis may have taken them all the same."""
        self.is_caught_up = False
        """Whether the whole feed was read once: before that, the past is unknown."""

    async def catch_up(self) -> None:
        """Read all new records. Raises `ReplayBufferError` when Redis is away."""
        while True:
            found = await asyncio.to_thread(self._read)
            for self._cursor, record in found:
                if record in self._unanswered:
                    self._unanswered.remove(record)
                else:
                    self._hear(record)
            if len(found) < CHUNK:
                self.is_caught_up = True
                self._detector.begin()
                return

    def _read(self) -> list[tuple[str, FeedRecord]]:
        found = self._registry.read(self._cursor, CHUNK)
        if not found:  # the clock of another server may be behind, and its ids with it
            self._cursor = min(self._cursor, self._registry.newest(), key=_place)
        return found

    async def tell(self, *records: FeedRecord) -> None:
        """Append records to the feed. When Redis is away they are heard here directly."""
        for record in records:
            if isinstance(record, Event):
                log.info("%s: %s", record.kind, record.text)
        try:
            await asyncio.to_thread(self._registry.publish, *records)
        except ReplayBufferError:
            for record in records:
                self._hear(record)
            self._unanswered.extend(records)

    def _hear(self, record: FeedRecord) -> None:
        self._history.add(record)
        self._detector.add(record)


def _place(record_id: str) -> tuple[int, ...]:
    return tuple(map(int, record_id.split("-")))
