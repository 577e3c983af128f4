"""A server's append-only file: written anew after a purge; where a private server's is damaged, cut off or set aside.

A replay buffer may lose traces, but must not keep the service from starting. (A file that merely ends too early is no
damage: the server cuts that itself, `aof-load-truncated yes`.)
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
    """Whether the server ended because its append-only file cannot be read. `said`: its log."""
    return any(words in said for words in _DAMAGE)


def was_truncated(said: str) -> bool:
    """Whether the server cut its append-only file while loading. `said`: its log."""
    return "Truncating the AOF" in said


def forget(
    command: Callable[..., Any],
    *,
    seconds: float = _FORGET_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Have the server write its append-only file anew, if it keeps one; whether that was begun, or is not needed.

    A server that just does so is waited for, `seconds` at most: what it writes may still hold what was deleted.
    Raises `RedisError`.
    """
    deadline = clock() + seconds
    while (state := command("INFO", "persistence")).get("aof_enabled"):
        if not state.get("aof_rewrite_in_progress"):
            command("BGREWRITEAOF")
            return True
        if clock() > deadline:
            logger.warning(
                "purged traces stay in the append-only file until the next purge, or the server's next rewrite"
            )
            return False
        sleep(_FORGET_POLL_SECONDS)
    return True


def cut(directory: Path, program: Path) -> None:
    """Cut the newest append-only file at its first damage, with the server's own tool (its binary by another name).

    The tool is given that one file, not the manifest: Valkey 9.1's does not know the format of its own base file.
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
    """Have the server write its append-only files anew, and wait for it.

    Needed once something was cut off: Redis 7.0 leaves an open MULTI at the end of a file it truncates, and would not
    understand at the next start what is appended behind it.
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
    """Move all append-only files out of the server's way, over those of an earlier time."""
    damaged = directory / "appendonlydir.damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    (directory / "appendonlydir").rename(damaged)
    logger.warning("the append-only file cannot be repaired; it was moved to %s", damaged)


def _number(path: Path) -> int:
    """3 of `appendonly.aof.3.incr.aof`"""
    part = path.name.split(".")[-3]
    return int(part) if part.isdigit() else 0
