"""The front door of several replicas: HAProxy as a child process, which follows where they are.

    replicas ──heartbeats──► look, twice a second ──► a changed address: new file, reload
                                                 └──► the process has died: started again

A reload ends no request: those under way go on in the process that has them, for an hour at most.
While it is not known where the replicas are, HAProxy goes on with those it has.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from buffers import guardian
from osd.common.addresses import join
from osd.common.files import replace_file
from osd.errors import ConfigError, OSDError
from osd.service.fleet.haproxy import configuration, find_program

logger = logging.getLogger(__name__)

PART = "front-door"
"""Its name among the parts of a service."""
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_START = 10.0
SECONDS_TO_RELOAD = 5.0
SECONDS_TO_STOP = 5.0

Replicas = Mapping[str, str]
"""name -> URL"""


class FrontDoor:
    """HAProxy on `host:port`. `replicas` tells where they are now, and raises `OSDError` while that
    is not known. Messages of HAProxy go to `log`."""

    def __init__(
        self,
        host: str,
        port: int,
        replicas: Callable[[], Replicas],
        *,
        log: Path,
    ) -> None:
        self._host, self._port, self._replicas, self.log = host, port, replicas, log
        self._program = find_program()
        self._known: dict[str, str] = {}
        self._told: dict[str, str] = {}
        """The replicas that HAProxy knows."""
        self._trouble = ""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="osd-front-door", daemon=True)
        # The path of a socket has a length limit.
        self._directory = Path(tempfile.mkdtemp(prefix="osd-front-"))

    @property
    def url(self) -> str:
        return f"http://{join(self._host, self._port)}"

    @property
    def pid(self) -> int:
        """Of the guardian; HAProxy is its child."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> FrontDoor:
        """Open the port. Until replicas are known, requests are answered with 503. Raises
        `ConfigError` when HAProxy does not start."""
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise
        self._thread.start()
        return self

    def look(self) -> None:
        """Follow the replicas, and start HAProxy again if it has died."""
        try:
            found = self._replicas()
        except OSDError:
            found = {}
        self.follow(found)

    def follow(self, replicas: Replicas) -> None:
        """Send requests to these replicas, too. One that has not been heard of for a while keeps
        its place: health checks know whether it lives."""
        with self._lock:
            self._known |= replicas
            if self._has_ended.is_set():
                return
            if self._process is None or self._process.poll() is not None:
                logger.warning("the front door died and is started again")
                self._begin()
            elif self._known != self._told:
                self._write()
                self._reload()
                self._told = dict(self._known)

    def drop(self, name: str) -> None:
        """Send this one no new requests, until it is followed again. What it answers goes on."""
        with self._lock:
            if self._known.pop(name, None) is None:
                return
            with suppress(OSError):  # the reload that follows says the same to new connections
                self._command(f"@1 set server least_busy/{name} state drain")

    def stop(self) -> None:
        """Close the port and end HAProxy. May be called twice."""
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join(SECONDS_TO_RELOAD)
        with self._lock:
            self._end_process()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- inside -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._has_ended.wait(SECONDS_BETWEEN_LOOKS):
            try:
                self.look()
            except Exception as error:  # whatever it is, HAProxy goes on as it is
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    logger.exception("the front door could not be changed; it is tried again")
            else:
                self._trouble = ""

    def _begin(self) -> None:
        self._end_process()
        self._write()
        file, control = self._directory / "haproxy.cfg", self._directory / "control"
        control.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(self._program), "-W", "-db", "-f", str(file)]
        command += ["-S", f"{control},mode,600"]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(os.open(self.log, flags, 0o600), "ab") as log:
            offset = log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                guardian.guarded(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._has_begun(offset):
                self._told = dict(self._known)
                return
            time.sleep(0.05)
        self._end_process()
        raise ConfigError(
            f"serving.port={self._port}: the front door does not start on {self._host} "
            f"({_last_words(self.log)}); see {self.log}"
        )

    def _write(self) -> None:
        text = configuration(self._host, self._port, self._known)
        replace_file(self._directory / "haproxy.cfg", text.encode())

    def _reload(self) -> None:
        """Raises `OSError` or `RuntimeError` where HAProxy refuses."""
        deadline = time.monotonic() + SECONDS_TO_RELOAD
        while True:
            try:
                answer = self._command("reload")
                break
            except (ConnectionError, FileNotFoundError):  # its master is just beginning
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        if "Success=1" not in answer:
            raise RuntimeError(f"HAProxy does not reload: {answer.strip()}")

    def _has_begun(self, offset: int) -> bool:
        """Whether HAProxy has the port, as it says in its log. A connection to the port would not
        tell who answers, and one to the control socket is lost while HAProxy begins."""
        with self.log.open("rb") as log:
            log.seek(offset)
            return b"Loading success" in log.read()

    def _command(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(SECONDS_TO_RELOAD)
            control.connect(str(self._directory / "control"))
            control.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: control.recv(4096), b"")).decode(errors="replace")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            guardian.end(process, SECONDS_TO_STOP)


def _last_words(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    named = [line for line in lines[-20:] if "[ALERT]" in line]
    return (named or lines or ["it ended without a word"])[-1].strip()[:300]
