"""The note that a running service leaves for commands of the same user.

It holds the addresses, the process id and the admin token.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from osd.common.files import replace_file
from osd.errors import ConfigError

SAME_S = 1.0
"""Two processes of one id do not begin so close to each other."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running service.

    Example:
        Running(deployment="default", pid=4242, service_url="http://127.0.0.1:8000",
                control_url="http://127.0.0.1:8001", token="...", begun_s=8123.4)
    """

    deployment: str
    pid: int
    service_url: str
    """"" where engines of others serve."""
    control_url: str
    token: str
    begun_s: float | None = None
    """As `begun_s`; tells the process from a later one with the same id. None = not known."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, and is not another that was given its id."""
        if not is_alive(self.pid):
            return False
        now = begun_s(self.pid)
        return self.begun_s is None or now is None or abs(now - self.begun_s) < SAME_S


def addresses(service_url: str, control_url: str) -> str:
    """Where a service answers, in a line. Without a URL, engines of others serve."""
    serving = f"serving: {service_url}/v1    " if service_url else ""
    return f"{serving}dashboard: {control_url}/dashboard"


def directory() -> Path:
    """`$OSD_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/osd`, else `osd-UID` in the temporary
    directory."""
    if path := os.environ.get("OSD_RUNTIME_DIR"):
        return Path(path)
    if path := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(path) / "osd"
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"osd-{os.getuid()}"


def write(running: Running) -> Path:
    """Leave the note (mode 0600). Raises `ConfigError` when the directory cannot be used."""
    folder = directory()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
        if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o022:
            raise ConfigError(
                f"{folder}: belongs to another user or is open to others; set OSD_RUNTIME_DIR"
            )
        path = folder / f"{running.deployment}.json"
        noted = asdict(running) | {"begun_s": begun_s(running.pid)}
        replace_file(path, json.dumps(noted).encode())
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); set OSD_RUNTIME_DIR"
        ) from None
    return path


def remove(deployment: str) -> None:
    (directory() / f"{deployment}.json").unlink(missing_ok=True)


def find_all() -> list[Running]:
    """Services of this user whose process lives, by name."""
    found = []
    for path in sorted(directory().glob("*.json")):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            running = Running(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if running.is_alive:
            found.append(running)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs and this user may signal it.

    A zombie counts as gone. In a container without an init process, zombies stay for ever.
    """
    try:
        os.kill(pid, 0)
        status = psutil.Process(pid).status()
    except (OSError, psutil.Error):
        return False
    return status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def begun_s(pid: int) -> float | None:
    """Seconds from the machine's start to that of a process, which no change of the clock alters;
    None where there is no such process."""
    boot = psutil.boot_time()
    try:
        return psutil.Process(pid).create_time() - boot
    except psutil.Error:
        return None


def refuse_second(deployment: str) -> None:
    """Raise `ConfigError` where a service of this name runs already: commands would find one of
    them alone."""
    for running in find_all():
        if running.deployment == deployment:
            raise ConfigError(
                f"deployment={deployment}: runs already ({running.control_url}/dashboard); name "
                "another with deployment=NAME, or end that one with `osd stop`"
            )


def find(deployment: str | None = None) -> Running:
    """The one running service, or the one of that name. Raises `ConfigError` when there is none or
    more than one."""
    services = [r for r in find_all() if deployment in (None, r.deployment)]
    if not services:
        what = f"deployment {deployment!r}" if deployment else "service"
        raise ConfigError(
            f"no {what} of this user is running here; start one with `osd serve`, or give --url"
        )
    if len(services) > 1:
        names = ", ".join(r.deployment for r in services)
        raise ConfigError(f"several services are running ({names}); choose one with --deployment")
    return services[0]
