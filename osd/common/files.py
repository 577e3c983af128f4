"""Writes files so that they are complete or absent, also after a crash or a full disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EACCES: "give a directory that can be written",
    errno.EPERM: "give a directory that can be written",
    errno.EROFS: "give a directory that can be written",
    errno.ENOTDIR: "give a directory that can be written",
    errno.EEXIST: "give a directory that can be written",
}


def cache_root() -> Path:
    """`$OSD_CACHE_DIR`, else `osd` in the user's cache directory."""
    if own := os.environ.get("OSD_CACHE_DIR"):
        return Path(own).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "osd"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file (mode 0600) so that readers see the old or the new content, never a part."""
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync(path.parent)


def open_to_others(path: Path) -> None:
    """Give a file the mode of any new one, by the umask: safetensors makes files of 0600."""
    mask = os.umask(0o077)  # it is told only where it is set
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against all threads and processes. With `wait=False`, yields whether it was
    free."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def explain(error: OSError, where: Path) -> str:
    """One line: which path, what is wrong, and the remedy where there is one."""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{error.filename or where}: {error.strerror or error}{f'; {remedy}' if remedy else ''}"
