"""Damaged append-only files of a private server: cut off at the damage, or set aside.

A replay buffer may lose traces, but must not keep the service from starting. (A file that merely ends too early is no
damage: the server cuts that itself, `aof-load-truncated yes`.)
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)

_DAMAGE = (
    "reading the append only file",
    "AOF loading aborted",
    "AOF MANIFEST FILE ERROR",
    "Unrecoverable error, aborting now",
)
_CHECK_SECONDS = 60


def is_damage(said: str) -> bool:
    """Whether the server ended because its append-only file cannot be read. `said`: its log."""
    return any(words in said for words in _DAMAGE)


def cut(directory: Path, program: Path) -> None:
    """Cut the newest append-only file at its first damage, with the server's own tool (its binary by another name)."""
    for manifest in (directory / "appendonlydir").glob("*.manifest"):
        try:
            subprocess.run(
                ["redis-check-aof", "--fix", str(manifest)],
                executable=program,
                input=b"y\n",
                capture_output=True,
                timeout=_CHECK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            logger.warning("%s: checking took longer than %d s", manifest, _CHECK_SECONDS)


def set_aside(directory: Path, program: Path) -> None:
    """Move all append-only files out of the server's way, over those of an earlier time."""
    damaged = directory / "appendonlydir.damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    (directory / "appendonlydir").rename(damaged)
    logger.warning("the append-only file cannot be repaired; it was moved to %s", damaged)
