"""A note on disk: on one of several ranks the draft failed to sleep, which ended the engine.

The engine that is started in its place finds the note and leaves the draft awake; otherwise an
error that comes back would end every engine. All ranks of an engine are on one machine.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS_KEPT = 24 * 3600.0
"""The cause may be gone by then. An engine that ends of it once a day is no outage."""


class AwakeNote:
    """`path` is the replica's own, or None where nothing is to be kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> str:
        """Why the draft is to stay awake; "" when it may sleep. A note that cannot be read is
        none."""
        if self._path is None:
            return ""
        try:
            if time.time() - self._path.stat().st_mtime > SECONDS_KEPT:
                return ""
            problem = self._path.read_text(errors="replace").strip()
        except OSError:
            return ""
        return (
            f"an engine of this service ended when its draft failed to sleep ({problem}); restart "
            "the service to try again, or wait a day"
        )

    def write(self, problem: str) -> None:
        """Keep what ended this engine. A disk that takes nothing is logged."""
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(problem)
            except OSError:
                logger.exception("the next engine will let its draft sleep again")
