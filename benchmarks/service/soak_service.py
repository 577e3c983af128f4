"""The service under `osd bench soak`: finds its parts, kills them, and measures from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import Row
from osd.errors import OSDError
from osd.records import DraftView

SECONDS_TO_COME_BACK = 240.0
PARTS = {
    "engine": "VLLM::EngineCore",
    "trainer": "TrainerActor",
    "control": "ControlActor",
    "valkey": "valkey-server",
}
"""What is killed, and how its process calls itself."""
FAULTS = (*PARTS, "valkey stopped", "swap")
GROWING = {
    "memory": "MiB",
    "open files": "files",
    "stored by Valkey": "MiB",
    "files on disk": "files",
    "bytes on disk": "MiB",
}
"""What a look counts, and in which unit."""


class Subject:
    """The service under test, seen from outside."""

    def __init__(self, child_pid: int, note: Any, data: Path) -> None:
        from osd.client.http import Client

        self.url = note.service_url
        self._pid, self._data = child_pid, data
        self._client = Client(note.control_url, token=note.token)

    def look(self) -> Row:
        """What may grow: sums over all processes of the service, and over its directory."""
        processes = self._processes()
        # Directories come and go meanwhile, which `os.walk` passes over.
        files = [
            Path(directory, name) for directory, _, names in os.walk(self._data) for name in names
        ]
        stored = (self._status().get("buffer") or {}).get("num_bytes", 0)
        return {
            "memory": sum(map(_resident, processes)) / 2**20,
            "open files": sum(map(_open_files, processes)),
            "stored by Valkey": stored / 2**20,
            "files on disk": len(files),
            "bytes on disk": sum(_size(path) for path in files) / 2**20,
        }

    def inflict(self, fault: str, failed_since: Callable[[float], list[Row]]) -> Row:
        """Break something and wait until it works again. `failed_since`: requests under way at a
        time that failed."""
        at = time.time()
        if fault == "swap":
            self._swap()
        elif fault == "valkey stopped":
            pid = self._pid_of(PARTS["valkey"])
            os.kill(pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(self._pid_of(PARTS[fault]), signal.SIGKILL)
            self._wait_until_back(fault, at)
        cut = [row["ended"] - at for row in failed_since(at)] if fault == "engine" else []
        return {"at": at, "seconds": time.time() - at, "cut": cut}

    def summary(self) -> Row:
        """Counters at the end."""
        status = self._status()
        dropped: dict[str, int] = dict((status.get("buffer") or {}).get("dropped", {}))
        for replica in status.get("replicas", []):
            for reason, num in {**replica["buffer_dropped"], **replica["capture_skipped"]}.items():
                dropped[reason] = dropped.get(reason, 0) + num
        return {
            name: status.get(name, 0) for name in ("num_rounds", "num_swaps", "num_rollbacks")
        } | {
            "num_stored": (status.get("buffer") or {}).get("num_put", 0),
            "lost": {reason: num for reason, num in dropped.items() if num},
        }

    def _swap(self) -> None:
        versions = [
            draft.version
            for draft in self._client.parsed(self._client.get("/osd/drafts"), list[DraftView])
            if not draft.bad and not draft.serving
        ]
        if versions:
            with suppress(OSDError):
                self._client.admin("promote", version=max(versions))

    def _status(self) -> dict[str, Any]:
        with suppress(OSDError):
            return dict(self._client.get("/osd/status"))
        return {}

    def _wait_until_back(self, part: str, at: float) -> None:
        deadline = at + SECONDS_TO_COME_BACK
        while time.time() < deadline:
            time.sleep(0.5)
            with suppress(OSDError):
                self._pid_of(PARTS[part])
                if self._is_well(part):
                    return
        raise OSDError(
            f"the {part} was killed and did not come back within {SECONDS_TO_COME_BACK:.0f} s"
        )

    def _is_well(self, part: str) -> bool:
        import httpx

        if part != "engine":
            status = self._status()
            return bool(status) and status["redis"] == status["trainer"] == "ok"
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        return False

    def _processes(self) -> list[psutil.Process]:
        try:
            service = psutil.Process(self._pid)
            return [service, *service.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _pid_of(self, name: str) -> int:
        for process in self._processes():
            with suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    return int(process.pid)
        raise OSDError(f"no process {name} is running")


def _resident(process: psutil.Process) -> int:
    """Bytes of its own in memory: shared pages count by halves, thirds, ..."""
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def _open_files(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.num_fds())
    return 0


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
