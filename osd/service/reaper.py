"""Ends what is left of a private Ray when the service that started it has ended, kill -9 included.

    service ──pipe──► reaper        looks once a second who belongs to the service's Ray
    pipe closes ────► reaper        gives them a moment, kills who is left, removes Ray's directory

Ray and vLLM end their own children only when they are themselves asked to; an engine that is still loading would stay
behind for a minute. Run as a script, `reaper.py SERVICE_PID DIRECTORY`, with nothing but the standard library. Who
belongs is never told by name: the service's children that were started with this very directory, whoever descends
from them, and whoever shares a process group with one of those. Where there is no /proc it only removes the directory.
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

SECONDS_BETWEEN_LOOKS = 1.0
GRACE_SECONDS = 2.0
"""How long the processes have to end by themselves."""
SECONDS_TO_DIE = 8.0
"""How long killed processes are waited for."""


class Process(NamedTuple):
    """What /proc says of a process; its start, in clock ticks, tells it from a later one with the same id."""

    parent: int
    group: int
    start: int


class Reaper:
    """The service's end: starts the script, and later waits until it has done its work."""

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), directory],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Return when none of the processes is left, and the directory is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS + SECONDS_TO_DIE + 2)


class Family:
    """The processes of one private Ray, as far as they were seen."""

    def __init__(self, service: int, directory: str) -> None:
        self._service, self._directory = service, directory.encode()
        self._service_group = os.getpgid(service)
        self._known: dict[int, int] = {}
        """process id -> its start"""

    def look(self) -> list[int]:
        """Find newcomers, forget who is gone; returns who lives."""
        processes = running()
        known = {pid for pid, start in self._known.items() if pid in processes and processes[pid].start == start}
        known |= {pid for pid, process in processes.items() if self._is_root(pid, process)}
        while newcomers := self._relatives(known, processes):
            known |= newcomers
        self._known = {pid: processes[pid].start for pid in known}
        return sorted(known)

    def _is_root(self, pid: int, process: Process) -> bool:
        if process.parent != self._service:
            return False
        with suppress(OSError):
            return pid != os.getpid() and self._directory in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def _relatives(self, known: set[int], processes: dict[int, Process]) -> set[int]:
        groups = {processes[pid].group for pid in known} - {self._service_group}
        return {
            pid
            for pid, process in processes.items()
            if pid not in known and (process.parent in known or process.group in groups)
        }


def running() -> dict[int, Process]:
    """Every process that is not already dead and waiting to be reaped."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in ("Z", "X"):
                found[int(path.name)] = Process(int(fields[1]), int(fields[2]), int(fields[19]))
    return found


def main(argv: list[str]) -> None:
    service, directory = int(argv[1]), argv[2]
    with suppress(ProcessLookupError):
        family = Family(service, directory)
        family.look()
        while os.getppid() == service and not select.select([0], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            family.look()
        end(family)
    shutil.rmtree(directory, ignore_errors=True)


def end(family: Family) -> None:
    """Wait a moment for all of them to go; then kill whoever has not."""
    asked_at = time.monotonic()
    while (left := family.look()) and time.monotonic() < asked_at + GRACE_SECONDS + SECONDS_TO_DIE:
        if time.monotonic() > asked_at + GRACE_SECONDS:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv)
