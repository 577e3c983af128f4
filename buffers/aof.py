"""A server's append-only file: rewritten after a purge, and repaired when it is damaged.

A damaged file must not keep the service from starting, so a private server's file is cut or moved
away, and traces are lost. A file that only ends too early is not damaged: the server truncates it
itself (`aof-load-truncated yes`).
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

_DAMAGE = (
    "reading the append only file",
    "AOF loading aborted",
    "AOF MANIFEST FILE ERROR",
    "Unrecoverable error, aborting now",
    "Unable to obtain the AOF file",
)
_CHECK_SECONDS = 60
_REWRITE_SECONDS = 60
_FORGET_SECONDS = 10.0
_FORGET_POLL_SECONDS = 0.05


def is_damage(said: str) -> bool:
    """Whether the server ended because it cannot read its append-only file. `said` is its log."""
    return any(words in said for words in _DAMAGE)


def was_truncated(said: str) -> bool:
    """Whether the server truncated its append-only file while loading. `said` is its log."""
    return "Truncating the AOF" in said


def forget(
    command: Callable[..., Any],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Start a rewrite of the append-only file, if the server keeps one. False when it could not be
    started.

    A rewrite in progress may still contain what was deleted, so its end is awaited for at most
    `_FORGET_SECONDS`. Raises `RedisError`.
    """
    deadline = clock() + _FORGET_SECONDS
    while (state := command("INFO", "persistence")).get("aof_enabled"):
        if not state.get("aof_rewrite_in_progress"):
            command("BGREWRITEAOF")
            return True
        if clock() > deadline:
            logger.warning(
                "purged traces stay in the append-only file until the next purge, or the server's "
                "next rewrite"
            )
            return False
        sleep(_FORGET_POLL_SECONDS)
    return True


def cut(directory: Path, program: Path) -> None:
    """Cut the newest append-only file at its first damage, with redis-check-aof (the server's
    binary under another name).

    The tool gets this file and not the manifest, because Valkey 9.1's tool cannot read the base
    file that its server writes.
    """
    files = sorted((directory / "appendonlydir").glob("*.incr.aof"), key=_number)
    if not files:
        return
    try:
        subprocess.run(
            ["redis-check-aof", "--fix", str(files[-1])],
            executable=program,
            input=b"y\n",
            capture_output=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        logger.warning("%s: checking took longer than %d s", files[-1], _CHECK_SECONDS)


def rewrite(client: Any) -> None:
    """Let the server rewrite its append-only files, and wait until it is done.

    This is needed after a truncation: Redis 7.0 leaves an open MULTI at the end of the file, and
    could not read at its next start what was appended after it.
    """
    deadline = time.monotonic() + _REWRITE_SECONDS
    try:
        client.bgrewriteaof()
        while time.monotonic() < deadline:
            state = client.info("persistence")
            if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
                return
            time.sleep(0.02)
        logger.warning("rewriting the append-only file takes longer than %d s", _REWRITE_SECONDS)
    except RedisError as error:
        logger.warning("the append-only file could not be rewritten: %s", error)


def set_aside(directory: Path, program: Path) -> None:
    """Move all append-only files away. Files that were moved away earlier are deleted."""
    damaged = directory / "appendonlydir.damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    (directory / "appendonlydir").rename(damaged)
    logger.warning("the append-only file cannot be repaired; it was moved to %s", damaged)


def _number(path: Path) -> int:
    """3 for `appendonly.aof.3.incr.aof`."""
    part = path.name.split(".")[-3]
    return int(part) if part.isdigit() else 0
