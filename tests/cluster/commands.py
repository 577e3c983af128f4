"""What people type on these hosts, and traffic from the laptop."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from tests.cluster.hosts import Host, Hosts
from tests.support.paths import ROOT

OSD = ".venv/bin/osd"
LOAD = f"cd {ROOT} && .venv/bin/python -W ignore -m tests.cluster.load"


def ray(hosts: Hosts, command: str, *, is_ok: bool = True) -> str:
    """`ray COMMAND cluster.yaml` on the laptop. Returns what it said."""
    clock = time.monotonic()
    done = hosts["laptop"].run(
        f"cd {ROOT} && .venv/bin/ray {command} -y ~/cluster.yaml 2>&1", timeout=600
    )
    print(f"ray {command}: {time.monotonic() - clock:.0f} s")
    assert (done.returncode == 0) is is_ok, done.stdout[-4000:]
    return done.stdout


def osd(host: Host, command: str) -> str:
    done = host.run(f"cd {ROOT} && {OSD} {command}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(head: Host) -> dict[str, Any]:
    return dict(json.loads(osd(head, "status --json")))


def front_door(hosts: Hosts) -> str:
    """The service port."""
    return f"http://{hosts['head'].address}:8000"


def ask(hosts: Hosts, rounds: int, url: str = "") -> list[dict[str, Any]]:
    """Rounds of 24 requests from the laptop."""
    return list(asking(hosts, rounds, url))


def asking(hosts: Hosts, rounds: int, url: str = "") -> Iterator[dict[str, Any]]:
    begun = hosts["laptop"].begin(f"{LOAD} {url or front_door(hosts)} {rounds}")
    assert begun.stdout is not None
    for line in begun.stdout:
        assert line.startswith("{"), line
        yield json.loads(line)
    assert begun.wait() == 0


def wait_until_well(head: Host, seconds: float) -> None:
    """Until the service on this host knows of no problem, but that rounds may have failed: only new
    traffic ends that."""
    deadline = time.monotonic() + seconds
    while problems := [p for p in status(head)["problems"] if "rounds failed" not in p]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert problems == [], f"after {seconds:.0f} s"


def wait_for_end(host: Host, seconds: float) -> None:
    """Until no process is left on a host."""
    deadline = time.monotonic() + seconds
    while (left := host.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == {}, f"left on the {host.name}: {left}"


class WholeAnswers:
    """Traffic in a `with` block, whose answers come whole. Afterwards `rounds` holds what came."""

    def __init__(self, hosts: Hosts) -> None:
        self.rounds: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] = hosts["laptop"].begin(f"{LOAD} {front_door(hosts)}")

    def __enter__(self) -> WholeAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        said, _ = self._process.communicate(timeout=240)
        self.rounds = [json.loads(line) for line in said.splitlines()]

    @property
    def errors(self) -> list[str]:
        return [error for each in self.rounds for error in each["errors"]]

    @property
    def digests(self) -> set[str]:
        return {each["digest"] for each in self.rounds}
