"""A private Valkey server: a child process with its data in a directory of its own, reachable from
this machine only unless it is told another address.

    directory/ (0700)   lock   valkey.conf (0600, with the password)   valkey.log   appendonlydir/
                        password (0600), where it is kept

The server ends with this process, also after kill -9 (`guardian.py`). Its data stays for the next
start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from buffers import aof, guardian
from buffers.program import find_server
from osd.common.backoff import Backoff
from osd.common.files import explain, replace_file
from osd.errors import ReplayBufferError

logger = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"
START_SECONDS = 120.0
"""Time that a server gets to load its data."""
LOCK_SECONDS = 3.0
"""Time that the server of a service that has just ended gets to free the directory."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a server that died, and could not be started again, is started once more."""
_NUM_TRIES = 4
_PORT_TAKEN = "Address already in use"
_STOP_SECONDS = 5.0


class EmbeddedValkey:
    """A private Valkey (or Redis) server. Thread-safe.

    `max_memory` is in bytes; `program` is a server binary, by default `find_server()`. The server
    listens on `host` and on 127.0.0.1; `port` 0 = any free one. The password is drawn at each
    start, or with `keeps_password` once, for clients that outlive this server. Every method raises
    `ReplayBufferError` when it cannot be started.

    Example:
        with EmbeddedValkey(Path("/data/valkey"), 512 << 20) as server:
            buffer = RedisTraceBuffer(server.url, deployment="default", target_id="9f2c")
    """

    def __init__(
        self,
        directory: str | Path,
        max_memory: int = 512 << 20,
        *,
        program: Path | None = None,
        host: str = LOCALHOST,
        port: int = 0,
        keeps_password: bool = False,
    ) -> None:
        self._keeps_password = keeps_password
        self._directory = Path(directory).expanduser().resolve()
        self._max_memory = max_memory
        self._program = program
        self._password = secrets.token_urlsafe(24)
        self._host, self._given_port, self._port = host, port, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock_fd: int | None = None
        self._tries = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        """Where it listens, for clients. It contains the password: keep it out of logs."""
        assert self._port, "not started"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"redis://:{self._password}@{host}:{self._port}/0"

    def is_alive(self) -> bool:
        """Whether the server process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self) -> EmbeddedValkey:
        """Start the server and wait until it has loaded its data. Do nothing when it runs."""
        with self._lock:
            if self.is_alive():
                return self
            program = self._program or find_server()
            was_ours = self._lock_fd is not None
            self._make_directory()
            try:
                self._take_directory()
                if self._keeps_password:
                    self._password = self._kept_password()
                self._run(program)
            except OSError as error:
                self._give_up(was_ours)
                why = explain(error, self._directory)
                raise ReplayBufferError(
                    f"the private Valkey server does not start: {why}"
                ) from None
            except BaseException:
                self._give_up(was_ours)
                raise
            return self

    def _give_up(self, keeps_directory: bool) -> None:
        """The directory of a server that is to be started again stays taken: another service would
        begin with its data."""
        self._end_process()
        if not keeps_directory:
            self._free_directory()

    def restart(self) -> None:
        """End the server if it runs, and start it again with the same port and data."""
        with self._lock:
            self._end_process()
            self.start()

    def keep_alive(self) -> None:
        """Start the server again if it has died. What keeps it from that is told once, and it is
        tried again with growing pauses."""
        if self.is_alive() or not self._tries.may_try():
            return
        if not self._tries.num_failures:
            logger.warning("the private Valkey died and is started again")
        try:
            self.restart()
        except ReplayBufferError as error:
            if self._tries.failed():
                logger.warning("%s; trying again until it works", error)
        else:
            if self._tries.succeeded():
                logger.warning("the private Valkey is there again")

    def stop(self) -> None:
        """Stop the server; its data stays. Do nothing when it does not run."""
        with self._lock:
            self._end_process()
            self._free_directory()

    def __enter__(self) -> EmbeddedValkey:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.chmod(0o700)
        except OSError as error:
            raise ReplayBufferError(
                f"{self._directory}: cannot hold the private Valkey server ({error.strerror}); "
                "choose another data_dir"
            ) from None

    def _kept_password(self) -> str:
        path = self._directory / "password"
        kept = path.read_text() if path.exists() else ""
        if not kept:
            replace_file(path, self._password.encode())
        return kept or self._password

    def _take_directory(self) -> None:
        """Lock the directory. The server inherits the lock and holds it until it ends."""
        if self._lock_fd is not None:
            return
        lock_fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(lock_fd):
            if time.monotonic() > deadline:
                os.close(lock_fd)
                raise ReplayBufferError(
                    f"{self._directory}: in use by another service; stop that one, or choose "
                    "another data_dir"
                )
            time.sleep(0.05)
        self._lock_fd = lock_fd

    def _free_directory(self) -> None:
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _run(self, program: Path) -> None:
        """Start the server and wait. Try again on another port when the port is taken, and after a
        repair when the data is damaged."""
        remedies = [aof.cut, aof.set_aside]
        for _ in range(_NUM_TRIES):
            port = self._port or self._given_port or _free_port(self._host)
            said = self._launch(program, port, has_cut=len(remedies) < 2)
            if said is None:
                self._port = port
                return
            if aof.is_damage(said) and remedies:
                logger.warning(
                    "private Valkey server: %s; repairing %s", _last_line(said), self._directory
                )
                remedies.pop(0)(self._directory, program)
            elif _PORT_TAKEN in said and self._given_port:
                raise ReplayBufferError(
                    f"buffer.port={port}: in use on {self._host}; choose another, or 0 for any "
                    "free one"
                )
            elif _PORT_TAKEN not in said:
                break
        raise ReplayBufferError(
            f"the private Valkey server ({program}) does not start: {_last_line(said or '')}; see "
            f"{self._directory / 'valkey.log'}, or name a running server with --redis-url"
        )

    def _launch(self, program: Path, port: int, *, has_cut: bool) -> str | None:
        """Start the server once; None when it answers, else its log."""
        _write_private(self._directory / "valkey.conf", self._config(port))
        assert self._lock_fd is not None
        with open(
            os.open(self._directory / "valkey.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            "wb",
        ) as log:
            self._process = subprocess.Popen(
                guardian.guarded([str(program), str(self._directory / "valkey.conf")]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[self._lock_fd],
                start_new_session=True,
                cwd=self._directory,
            )
        client: Any = redis.Redis(
            port=port,
            password=self._password,
            socket_timeout=2,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )
        with client:
            if self._answers(client):
                if has_cut or aof.was_truncated(self._log()):
                    aof.rewrite(client)
                return None
        self._end_process()
        return self._log()

    def _answers(self, client: Any) -> bool:
        """Wait until the server answers. False when it ended first, or after `START_SECONDS`."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.is_alive():
            try:
                return bool(client.ping())
            except RedisError as error:
                logger.debug("waiting for the private Valkey server: %s", error)
            time.sleep(0.03)
        return False

    def _log(self) -> str:
        return (self._directory / "valkey.log").read_text(errors="replace")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            guardian.end(process, _STOP_SECONDS)

    def _config(self, port: int) -> str:
        lines = [
            f"bind {' '.join(dict.fromkeys((LOCALHOST, self._host)))}",
            f"port {port}",
            f"requirepass {self._password}",
            "daemonize no",
            "databases 1",
            "loglevel warning",
            f"dir {_quoted(str(self._directory))}",
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            "no-appendfsync-on-rewrite yes",
            "aof-load-truncated yes",
            "auto-aof-rewrite-percentage 100",
            "auto-aof-rewrite-min-size 32mb",
            f"maxmemory {self._max_memory}",
            "maxmemory-policy noeviction",
        ]
        return "\n".join(lines) + "\n"


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise ReplayBufferError(
                f"buffer.host={host}: no address of this machine ({error.strerror}); name one, or "
                "leave the key out"
            ) from None
        return int(listener.getsockname()[1])


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
