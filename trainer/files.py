"""Directories that are complete or absent: written aside, renamed, and pointed to last. And the
tensors of a checkpoint."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from osd.common.files import fsync, replace_file
from osd.errors import OSDError, ReleaseError
from osd.models.tensor_file import DTYPES, TensorFile

logger = logging.getLogger(__name__)

KEEP_TARGETS = 3
"""Targets other than the present one with which the trainer can go on where it was."""
PARTS = ("checkpoints", "candidates")
QUANTISED = "F8"


def directory_of(root: Path, target_id: str) -> Path:
    """Where the trainer keeps what belongs to a target. Of other targets, what was not used for
    longest is removed: each holds several times the weights of its draft. Curves stay."""
    parts = {path: [path / part for part in PARTS if (path / part).is_dir()] for path in _in(root)}
    others = [path for path, found in parts.items() if found and path.name != target_id]
    others.sort(key=lambda path: max(part.stat().st_mtime for part in parts[path]))
    for path in others[:-KEEP_TARGETS]:
        logger.info("removing checkpoints in %s, whose target is served no longer", path)
        for part in parts[path]:
            shutil.rmtree(part, ignore_errors=True)
    return root / target_id


def _in(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


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


def checkpoint_tensors(directory: Path) -> dict[str, tuple[Path, torch.dtype]]:
    """Tensor name -> (file, dtype) over all safetensors files of a checkpoint."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ReleaseError(
            f"{directory}: holds no safetensors file; convert the draft to safetensors first"
        )
    found: dict[str, tuple[Path, torch.dtype]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in DTYPES or dtype.startswith(QUANTISED):
                    raise ReleaseError(
                        f"{file}: {name} is {dtype}, which the trainer cannot read; use a draft "
                        "that is not quantised"
                    )
                found[name] = (file, DTYPES[dtype])
    return found


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, in memory of their own: what becomes of the file is
    nothing to them. Raises `OSError` where it cannot be read, `ValueError` where it is damaged."""
    try:
        return TensorFile(file).tensors()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r})") from None
