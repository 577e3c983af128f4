"""`osd serve --detach`, which returns while the service runs on, and `osd stop`, which ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from osd.config.schema import Config
from osd.errors import ConfigError, OSDError
from osd.service import note

SECONDS_TO_START = 7200
"""A large target may load for half an hour."""
SECONDS_TO_STOP = 20


def serve_detached(config: Config, argv: Sequence[str], report: Callable[[str], None]) -> None:
    """Run the same command without `--detach` in a session of its own. Return when it serves.

    Raises `ConfigError` or `OSDError` with the last line of a service that did not start.
    """
    note.refuse_second(config.deployment)  # whose log would be emptied
    log = config.data_path / "serve.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise OSDError(f"{log}: cannot be written ({error.strerror}); set data_dir") from None
    command = [sys.executable, "-m", "osd", *[a for a in argv[1:] if a != "--detach"]]
    with open(descriptor, "wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        _wait(child, config, log, report)
    except BaseException:  # also Ctrl-C: nothing is to start unseen
        child.terminate()
        raise


def _wait(
    child: subprocess.Popen[bytes], config: Config, log: Path, report: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        if child.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            said = (lines[-1] if lines else "the service ended at once").removeprefix("osd: ")
            raise (ConfigError if child.returncode == ConfigError.exit_status else OSDError)(said)
        for running in note.find_all():
            if running.pid == child.pid:
                report(note.addresses(running.service_url, running.control_url))
                report(f"log: {log}    end it with `osd stop --deployment {config.deployment}`")
                return
        time.sleep(0.2)
    raise OSDError(f"the service was not ready after {SECONDS_TO_START} s; see {log}")


def stop_service(deployment: str | None) -> str:
    """End a running service of this user and wait until it is gone. Returns its name."""
    running = note.find(deployment)
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_STOP
    while time.monotonic() < deadline:
        if not note.is_alive(running.pid):
            return running.deployment
        time.sleep(0.1)
    raise OSDError(
        f"{running.deployment} (process {running.pid}) did not end within {SECONDS_TO_STOP} s"
    )
