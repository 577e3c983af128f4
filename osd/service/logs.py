"""Where the parts of a service log, and reading it from another machine.

Each part notes its machine and file in Redis when it starts. The reader is a Ray task on that
machine: it works also where the part has died.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import Place
from osd.service import cluster

logger = logging.getLogger(__name__)

OURS = ("osd", "serving", "buffers", "trainer")
"""Packages whose messages of level INFO go to the log, too."""
BYTES_PER_LINE = 400
"""A guess: more lines than fit are cut at the front."""


def begin_log(directory: Path, part: str, registry: Registry) -> None:
    """Send what this process and its children print or log to `directory/part.log`, and note
    that."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{part}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for package in OURS:
        logging.getLogger(package).setLevel(logging.INFO)
    note_log(part, path, registry)


def note_log(part: str, path: Path, registry: Registry) -> None:
    """Note for `osd logs` that a part logs to `path` on this machine."""
    place = Place(part=part, host=socket.gethostname(), node=cluster.node_id(), log=str(path))
    try:
        registry.set_place(place)
    except OSDError as error:
        logger.warning("`osd logs` does not know this part, for %s", error)


class PartLogs:
    """`osd.observe.dashboard.logs.Logs` of a running service."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def places(self) -> list[Place]:
        return self._registry.places()

    def tail(self, part: str, num_lines: int) -> str:
        places = {place.part: place for place in self.places()}
        if part not in places:
            raise OSDError(f"{part}: no part of this service; there are {', '.join(places)}")
        return cluster.run_on(places[part], tail, places[part].log, num_lines)


def tail(path: str, num_lines: int) -> str:
    """The last lines of a file. Raises `OSError`."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_lines * BYTES_PER_LINE))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-num_lines:])
