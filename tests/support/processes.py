"""Processes seen from outside: what descends from one, what still lives, what it uses."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from osd.service.reaper import running

Identity = tuple[int, int]
"""A process id and its start, which no other process shares."""


def descendants(pid: int) -> set[Identity]:
    """`pid`, its children, their children, and so on."""
    processes = running()
    found = {pid} & processes.keys()
    while more := {p for p, process in processes.items() if process.parent in found} - found:
        found |= more
    return {(p, processes[p].start) for p in found}


def alive(identities: set[Identity]) -> dict[int, str]:
    """The command lines of those that still live, by process id."""
    processes = running()
    left = [pid for pid, start in identities if pid in processes and processes[pid].start == start]
    return {pid: command_line(pid) for pid in left}


def command_line(pid: int) -> str:
    with suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return arguments.decode(errors="replace").strip()
    return ""


def named(identities: set[Identity], name: str) -> list[int]:
    """The process ids of those whose title contains `name`."""
    return sorted(pid for pid, _ in identities if name in command_line(pid))


def ray_directories(identities: set[Identity]) -> set[Path]:
    """Directories of private Rays that these processes name in their command lines."""
    lines = " ".join(command_line(pid) for pid, _ in identities)
    return {Path(path) for path in re.findall(r"(/\S*?/osd-ray-\w+)", lines)}


def is_listening(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) == 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pid_of(actor: Any) -> int:
    """The process that runs a Ray actor now; 0 while none does."""
    import ray  # only now: the service sets Ray's environment before it imports it

    with suppress(ray.exceptions.RayError):
        return int(ray.get(actor.__ray_call__.remote(lambda part: os.getpid()), timeout=10))
    return 0
