"""What a release store has on disk: a directory per release, and the two small files that say which one counts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from osd.common.files import explain, fsync, replace_file, sha256
from osd.errors import ReleaseError
from osd.records import DraftRelease, decode, encode

WEIGHTS = "model.safetensors"
RECORD = "release.json"
REQUIRED = ("config.json", WEIGHTS)
FOREIGN_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
"""Weights in other formats, which many Hugging Face directories hold as well: not copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """`CURRENT`: the version set last, and the one of each target."""

    version: int = 0
    per_target: dict[str, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    """target -> how often it was given another release that was there before (`ReleaseStore.line`)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """`state.json`: what was decided about releases after they were made."""

    bad: dict[int, str] = field(default_factory=dict)
    """version -> why it is never offered again"""
    pinned: int = 0
    """Version that serves until unpinned; 0 = none."""
    kept: tuple[int, ...] = ()
    """Versions that are never pruned."""
    paused: bool = False
    """Whether training and publishing are paused."""


F = TypeVar("F", Pointer, State)


def directory_name(version: int) -> str:
    return f"v{version:06d}"


def read_file(path: Path, record_type: type[F]) -> F:
    """`CURRENT` or `state.json`; an empty record when there is none. Raises `ValueError` when it is damaged."""
    try:
        return decode(path.read_bytes(), record_type)
    except FileNotFoundError:
        return record_type()
    except OSError as error:
        raise ReleaseError(explain(error, path)) from error


def copy_model(source: Path, aside: Path) -> None:
    """Copy the files of a Hugging Face directory and bring them to the disk. Links become files."""
    missing = [name for name in REQUIRED if not (source / name).is_file()]
    if missing:
        raise ReleaseError(f"{source}: no {missing[0]}; a draft is a Hugging Face directory with {WEIGHTS}")
    for path in source.iterdir():
        is_ours = path.name.startswith(".") or path.name == RECORD
        if path.is_file() and not is_ours and path.suffix not in FOREIGN_WEIGHTS:
            shutil.copyfile(path, aside / path.name)
            fsync(aside / path.name)


def write_record(directory: Path, release: DraftRelease) -> None:
    """Write `release.json`. A record that could not be read again (NaN has no JSON) is refused."""
    text = encode(release)
    try:
        decode(text, DraftRelease)
    except ValueError as error:
        raise ReleaseError(f"draft v{release.version}: its record cannot be stored: {error}") from None
    replace_file(directory / RECORD, text)


def read_release(directory: Path) -> DraftRelease:
    """The release in a directory. Raises `OSError` or `ValueError` when any part of it is missing."""
    release = decode((directory / RECORD).read_bytes(), DraftRelease)
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if directory_name(release.version) != directory.name:
        raise ValueError(f"{RECORD} is of v{release.version}")
    return replace(release, path=str(directory.absolute()))


def verify(release: DraftRelease) -> None:
    """Raise `ReleaseError` when the weights are not the ones that were published."""
    path = Path(release.path) / WEIGHTS
    try:
        found = sha256(path)
    except OSError as error:
        raise ReleaseError(f"draft v{release.version}: {explain(error, path)}") from None
    if found != release.sha256:
        raise ReleaseError(
            f"draft v{release.version}: {path} was damaged or changed: sha256 {found[:12]}..., "
            f"published as {release.sha256[:12]}..."
        )
