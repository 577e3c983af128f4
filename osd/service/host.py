"""One machine of a Ray cluster, as `ray up` starts it: Ray, and on the head the service.

    osd cluster head ADDRESS           Ray's head ──► `osd serve --detach` on it
    osd cluster worker HEAD ADDRESS    Ray, joined to that head

ADDRESS is the one by which the others reach the machine. `here` stands for the one by which the
machine reaches the network: in a cloud nobody knows it beforehand.

`ray up` runs these commands each time. They do nothing where what they would start runs already:
the same arguments, configuration and code. Otherwise they end it first. Only processes that they
started are ended: `ray_leader.py` leads a process group, and what of that group outlives its Ray is
killed. So `ray down`, which ends the head's Ray alone, leaves nothing there, nor on the other
machines once these have missed the head for a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import osd
from osd.common.files import replace_file
from osd.config import reading
from osd.errors import ConfigError, OSDError
from osd.exchange.redis_url import is_loopback
from osd.service import note, plan, ray_leader
from osd.service.cluster import OBJECT_STORE_BYTES, network_address, set_ray_defaults
from osd.service.detach import serve_detached, stop_service
from osd.service.ray_watch import connected

HERE = "here"
"""Instead of an address: the one by which this machine reaches the network."""
PORT = 6380
"""Of Ray's head. Ray's own default is Redis's."""
SECONDS_TO_START = 120.0
SECONDS_TO_STOP = 15.0
AUTOSCALING = Path("~/ray_bootstrap_config.yaml")
"""Where `ray up` leaves the cluster's description for the head."""
TOKEN = Path("~/.ray/auth_token")
"""What lets the machines' Ray processes trust each other."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RayState:
    """The Ray that was started last on this machine.

    Example:
        RayState(pid=4242, begun_s=8123.4, stamp="5f3c...")
    """

    pid: int
    """of the leader of its process group"""
    begun_s: float
    """As `note.begun_s`; tells that process from a later one with the same id."""
    stamp: str

    @property
    def is_alive(self) -> bool:
        now = note.begun_s(self.pid)
        is_same = now is not None and abs(now - self.begun_s) < note.SAME_S
        return is_same and note.is_alive(self.pid)


def start_head(
    address: str,
    config: Path | None,
    overrides: Sequence[str],
    resources: Sequence[str],
    report: Report,
) -> None:
    """Run Ray's head and the service on this machine. `resources` as in `units_of`. Raises
    `OSDError` with the reason why one of them does not start."""
    address = address_of(address)
    units = units_of(resources)
    given = head_overrides(address, config, overrides)
    resolved = reading.load(config, given).config
    stamp = stamp_of("head", address, resolved.model_dump_json(), *resources)
    runs = any(r.deployment == resolved.deployment for r in note.find_all())
    if runs and is_running(stamp):
        report("nothing has changed: Ray and the service run on")
        return
    plan.check(resolved)  # before what serves is ended
    if runs:
        report(f"{stop_service(resolved.deployment)} has stopped")
    make_token()
    autoscaling = AUTOSCALING.expanduser()
    more = [f"--autoscaling-config={autoscaling}"] if autoscaling.exists() else []
    if units:
        more.append(f"--resources={json.dumps(units)}")
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", *more]
    start_ray(stamp, address, head, f"{address}:{PORT}")
    report(f"ray: the head is ready at {address}:{PORT}")
    config_option = ["--config", str(config)] if config is not None else []
    serve_detached(resolved, ["osd", "serve", *config_option, *given], report)


def start_worker(head: str, address: str, resources: Sequence[str], report: Report) -> None:
    """Run Ray on this machine, joined to the head. `resources` as in `units_of`. Raises `OSDError`
    when it does not join."""
    address = address_of(address)
    units = units_of(resources)
    stamp = stamp_of("worker", head, address, *resources)
    if is_running(stamp):
        report("nothing has changed: Ray runs on")
        return
    if not TOKEN.expanduser().exists():
        raise ConfigError(
            f"{TOKEN}: missing, so the head would not let this machine in; list it under "
            "cluster_synced_files of the cluster's file"
        )
    arguments = [f"--address={head}:{PORT}", f"--resources={json.dumps(units)}"]
    start_ray(stamp, address, arguments, f"{head}:{PORT}")
    report(f"ray: joined {head}:{PORT}")


def units_of(resources: Sequence[str]) -> dict[str, int]:
    """Custom resource -> units of it, from words NAME (one) and NAME=N. Raises `ConfigError`.

    Example:
        units_of(["train", "serve=2"]) == {"train": 1, "serve": 2}
    """
    units: dict[str, int] = {}
    for word in resources:
        name, _, num = word.partition("=")
        if not name or not (num or "1").isdecimal() or word.endswith("=") or num == "0":
            raise ConfigError(f"--resource {word}: not NAME, or NAME=N with N of 1 or more")
        units[name] = int(num or 1)
    return units


def address_of(address: str) -> str:
    """What `here` stands for; another address as it is. Raises `ConfigError` where this machine
    reaches no network."""
    if address != HERE:
        return address
    found = network_address()
    if is_loopback(found):
        raise ConfigError(f"{HERE}: this machine has no address but {found}; name one that it has")
    return found


def head_overrides(
    address: str,
    config: Path | None,
    overrides: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """The overrides by which a head at `address` serves: those given, where its Ray is, and where
    a part runs on another machine, an address of the private Valkey that it reaches, unless one is
    given, or another Redis. Raises `ConfigError`."""
    given = [*overrides, f"ray.address={address}:{PORT}"]
    found = reading.load(config, given, environ=environ)
    is_given = found.origins.keys() & {"buffer.redis_url", "buffer.host"}
    if plan.remote_parts(found.config) and not is_given:
        given.append(f"buffer.host={address}")
    return given


def stamp_of(*what: str) -> str:
    """A digest of what would be started: the given words, and the code."""
    digest = hashlib.sha256()
    for part in (*what, *_sources()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def is_running(stamp: str) -> bool:
    """Whether the Ray that was started last was started with this stamp, and runs."""
    state = _read_state()
    return state is not None and state.stamp == stamp and state.is_alive


def make_token() -> None:
    """Draw the cluster's token where there is none (mode 0600)."""
    path = TOKEN.expanduser()
    if path.exists() and path.stat().st_size:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def start_ray(stamp: str, address: str, arguments: Sequence[str], head: str) -> None:
    """End the Ray that was started before, start another, and wait until the head accepts
    connections and Ray says that it runs."""
    end_ray()
    # The second version of Ray's autoscaler starts no workers on machines of one's own.
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_enable_autoscaler_v2": "0"})
    set_ray_defaults()
    folder = note.directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / "ray.log"
    ray = str(Path(sys.executable).parent / "ray")
    command = [sys.executable, "-I", "-S", ray_leader.__file__, ray, "start", "--block", *arguments]
    command += [f"--node-ip-address={address}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--disable-usage-stats"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    noted = {"pid": process.pid, "begun_s": note.begun_s(process.pid), "stamp": stamp}
    replace_file(_state_path(), json.dumps(noted).encode())
    deadline = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            if "Ray runtime started" in log.read_text(errors="replace"):
                return connected(head)
        time.sleep(0.2)
    end_ray()
    raise OSDError(f"ray does not start on {address}: {_last_words(log)}; see {log}")


def end_ray() -> None:
    """End the Ray that was started here, if it runs."""
    state = _read_state()
    _state_path().unlink(missing_ok=True)
    if state is None or not state.is_alive:
        return
    members = [p for p in psutil.pids() if _group_of(p) == state.pid]
    os.killpg(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_STOP
    while any(map(note.is_alive, members)) and time.monotonic() < deadline:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(state.pid, signal.SIGKILL)


def _sources() -> Iterator[str]:
    root = Path(osd.__file__).parents[1]
    for package in ("osd", "serving", "buffers", "trainer"):
        for path in sorted((root / package).rglob("*.py")):
            yield f"{path.relative_to(root)} {path.read_text()}"


def _state_path() -> Path:
    return note.directory() / "ray.state"


def _read_state() -> RayState | None:
    try:
        noted = json.loads(_state_path().read_text())
        if "started_at" in noted:  # Unix time, as earlier versions noted it
            noted["begun_s"] = noted.pop("started_at") - psutil.boot_time()
        return RayState(**noted)
    except (OSError, ValueError, TypeError):
        return None


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "rror" in line]
    return (named or lines or ["it ended without a word"])[-1][:300]
