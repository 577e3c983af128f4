"""Directories that are complete or absent: written aside, renamed, and pointed to last."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from osd.common.files import fsync, replace_file
from osd.errors import OSDError


@contextmanager
def write_aside(final: Path) -> Iterator[Path]:
    """A new directory to fill. It replaces `final` if the body does not raise.

    Raises `OSDError` when the disk is full or read-only. After any error it is removed.
    """
    aside = final.parent / f".{final.name}.tmp"
    with explain_disk_errors(final):
        try:
            _remove(aside)
            aside.mkdir(parents=True)
            yield aside
            for path in aside.iterdir():
                fsync(path)
            _remove(final)
            aside.rename(final)
            fsync(final.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def point_to(pointer: Path, name: str) -> None:
    """Make `pointer` a small file that holds `name`, atomically."""
    with explain_disk_errors(pointer):
        replace_file(pointer, name.encode())


def numbered(directory: Path) -> list[Path]:
    """The subdirectories whose names are numbers, lowest first."""
    if not directory.is_dir():
        return []
    return sorted(
        (p for p in directory.iterdir() if p.name.isdigit() and p.is_dir()),
        key=lambda p: int(p.name),
    )


def prune(directory: Path, newest: int, keep: int) -> None:
    """Keep the numbered subdirectories `newest - keep + 1` to `newest`. Remove all others, and what
    interrupted writers left."""
    for path in numbered(directory):
        if not newest - keep < int(path.name) <= newest:
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system into an `OSDError` that names the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSDError(
            f"{path}: cannot be written ({reason}); free space there or set another data_dir"
        ) from error


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
