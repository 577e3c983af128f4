"""Ends the rest of a private Ray after the service that started it has ended, also by kill -9.

    service ──pipe──► reaper    looks once a second which processes belong to the service's Ray
    pipe closes ────► reaper    gives them a moment, kills the others, removes Ray's directory

Ray and vLLM end their own children only when they are asked to end. An engine that is still loading
would stay for a minute. This file runs as a script, `reaper.py SERVICE_PID DIRECTORY`, and imports
only the standard library.

Processes are never recognised by name. These belong to the service's Ray: the service's children
that were started with DIRECTORY, their descendants, and every member of a process group of theirs.
Without /proc the reaper only removes the directory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PREFIX = "osd-ray-"
"""Of the directories that a service makes for its Ray: no other is ever removed."""
SECONDS_BETWEEN_LOOKS = 1.0
GRACE_SECONDS = 2.0
"""The processes have this long to end by themselves."""
SECONDS_TO_DIE = 8.0
"""The reaper waits this long for killed processes."""


class Process(NamedTuple):
    """A process in /proc. `start`, in clock ticks, tells it from a later one with the same id."""

    parent: int
    group: int
    start: int


class Reaper:
    """The service's handle: it starts the script, and later waits until the script is done."""

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), directory],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Return when all of the processes and the directory are gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS + SECONDS_TO_DIE + 2)


class Family:
    """The processes of one private Ray that were seen so far."""

    def __init__(self, service: int, directory: str) -> None:
        self._service, self._directory = service, directory.encode()
        self._service_group = os.getpgid(service)
        self._known: dict[int, int] = {}
        """process id -> its start"""

    def look(self) -> list[int]:
        """Add new processes and forget ended ones. Returns the ids of those that live."""
        processes = running()
        known = {
            pid
            for pid, start in self._known.items()
            if pid in processes and processes[pid].start == start
        }
        known |= {pid for pid, process in processes.items() if self._is_root(pid, process)}
        while newcomers := self._relatives(known, processes):
            known |= newcomers
        self._known = {pid: processes[pid].start for pid in known}
        return sorted(known)

    def _is_root(self, pid: int, process: Process) -> bool:
        if process.parent != self._service:
            return False
        with suppress(OSError):
            return (
                pid != os.getpid() and self._directory in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
        return False

    def _relatives(self, known: set[int], processes: dict[int, Process]) -> set[int]:
        groups = {processes[pid].group for pid in known} - {self._service_group}
        return {
            pid
            for pid, process in processes.items()
            if pid not in known and (process.parent in known or process.group in groups)
        }


def running() -> dict[int, Process]:
    """Every process that is not a zombie, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in ("Z", "X"):
                found[int(path.name)] = Process(int(fields[1]), int(fields[2]), int(fields[19]))
    return found


def main(argv: list[str]) -> None:
    service, directory = int(argv[1]), argv[2]
    if not Path(directory).name.startswith(PREFIX):
        sys.exit(f"{directory}: is no directory that a service has made for its Ray")
    with suppress(ProcessLookupError):
        family = Family(service, directory)
        family.look()
        while os.getppid() == service and not select.select([0], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            family.look()
        end(family)
    shutil.rmtree(directory, ignore_errors=True)


def end(family: Family) -> None:
    """Wait a moment for all processes to end, then kill the others."""
    asked_at = time.monotonic()
    while (left := family.look()) and time.monotonic() < asked_at + GRACE_SECONDS + SECONDS_TO_DIE:
        if time.monotonic() > asked_at + GRACE_SECONDS:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv)
