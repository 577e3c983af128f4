"""Has a trainer forget what it keeps in memory of texts, where traces were purged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from osd.errors import ReplayBufferError


class Purges:
    """Asks how many there were, and has the trainer forget where there was one.

    count: purges so far (`Registry.num_purges`); where it changes, there was one
    forget: as `Trainer.forget`
    """

    def __init__(self, count: Callable[[], int], forget: Callable[[], None]) -> None:
        self._count, self._forget = count, forget
        self._seen = self._now()

    def look(self) -> None:
        """To be called again and again."""
        if (now := self._now()) is not None and now != self._seen:
            self._forget()
            self._seen = now

    @contextmanager
    def around_round(self) -> Iterator[None]:
        """A round goes on with texts that it has read: what was purged meanwhile is forgotten when
        it ends. Where Redis cannot be asked, it is forgotten, too."""
        before = self._now()
        try:
            yield
        finally:
            if before is None or self._now() != before:
                self._forget()

    def _now(self) -> int | None:
        try:
            return self._count()
        except ReplayBufferError:
            return None
