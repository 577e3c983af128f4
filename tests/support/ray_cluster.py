"""A Ray cluster of two Rays on this machine, whose head keeps its tables in a Redis. The head can
be killed, and started again where it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from osd.service.cluster import OBJECT_STORE_BYTES, network_address
from osd.service.plan import free_port
from osd.service.ray_watch import connected
from osd.service.reaper import running
from tests.support.processes import command_line, kill
from tests.support.services import wait_until

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "c0ffee00" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""How its processes are started, and who joins it."""


class RayCluster:
    """`redis_url`: where the head keeps its tables. Its second Ray has the resource `train`.

    Example:
        cluster = RayCluster(valkey.url)
        cluster.start()
        cluster.kill_head()
        cluster.start_head_again()
        cluster.end()
    """

    def __init__(self, redis_url: str) -> None:
        parts = urlsplit(redis_url)
        self._redis = {"RAY_REDIS_ADDRESS": f"{parts.hostname}:{parts.port}"}
        self._password = parts.password or ""
        # Ray's socket paths have a length limit.
        self._directory = tempfile.mkdtemp(prefix="osd-ft-")
        self.host = network_address()
        self.address = f"{self.host}:{free_port(self.host)}"
        self._head: tuple[list[str], dict[str, str]] = [], {}
        """Command and environment of the head's process."""

    @property
    def environ(self) -> dict[str, str]:
        """Of what joins it."""
        return {**os.environ, **SETTINGS}

    def start(self) -> None:
        """Both Rays."""
        self.start_head()
        self._run([f"--address={self.address}", f"--resources={json.dumps({'train': 1})}"])

    def start_head(self) -> None:
        """`ray start --head`, as where nothing of it runs any more."""
        port = self.address.rpartition(":")[2]
        arguments = ["--head", f"--port={port}", f"--temp-dir={self._directory}"]
        arguments += ["--include-dashboard=false", f"--redis-password={self._password}"]
        arguments += [f"--ray-client-server-port={free_port(self.host)}"]
        self._run(arguments, self._redis)

    def kill_head(self) -> None:
        """kill -9 of the head's process alone. What hangs on it waits."""
        (pid,) = self._pids("/gcs_server ")
        path = Path(f"/proc/{pid}")
        command = (path / "cmdline").read_bytes().split(b"\0")[:-1]
        environ = (path / "environ").read_bytes().split(b"\0")[:-1]
        pairs = (entry.decode().partition("=") for entry in environ)
        self._head = [part.decode() for part in command], {name: value for name, _, value in pairs}
        kill(pid)

    def start_head_again(self) -> None:
        """With the same command, as whatever supervises it would."""
        command, environ = self._head
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(self._answers, 30, "the head is back")

    def kill_all(self) -> None:
        """kill -9 of everything of Ray."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                kill(pid)
        wait_until(lambda: not self._pids(), 10, "nothing of Ray is left")

    def end(self) -> None:
        self.kill_all()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _answers(self) -> bool:
        with suppress(OSError):
            connected(self.address)
            return True
        return False

    def _pids(self, what: str = "") -> list[int]:
        """Ray's processes, which name its directory, or as a server for clients the head, and those
        that descend from them."""
        processes, names = running(), (f"{self._directory}/", f" --address={self.address} ")
        found = {p for p in processes if any(name in command_line(p) for name in names)}
        found -= {os.getpid()}
        while more := {p for p, each in processes.items() if each.parent in found} - found:
            found |= more
        return sorted(pid for pid in found if what in command_line(pid))

    def _run(self, arguments: list[str], more: Mapping[str, str] | None = None) -> None:
        started = time.monotonic()
        command = [str(Path(sys.executable).parent / "ray"), "start", *arguments]
        command += [f"--node-ip-address={self.host}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += ["--num-cpus=2", "--disable-usage-stats"]
        environ = {**self.environ, **(more or {})}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done
        print(f"ray start {arguments[0]}: {time.monotonic() - started:.1f} s")
