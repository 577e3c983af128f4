"""The files of a release store: the record of a release, `CURRENT` and `state.json`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from osd.common.files import explain, replace_file, sha256
from osd.common.model_directory import RELEASE_RECORD, REQUIRED, WEIGHTS, digests
from osd.errors import ReleaseError
from osd.records import DraftRelease, decode, encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """`CURRENT`: the version set last, and the version of each target."""

    version: int = 0
    per_target: dict[str, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    """target -> how often it was given another existing release (`ReleaseStore.line`)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """`state.json`: what was decided about releases after their publication."""

    bad: dict[int, str] = field(default_factory=dict)
    """version -> why it is never offered again"""
    pinned: int = 0
    """Version that serves until unpinned; 0 = none."""
    chosen: int = 0
    """Version that was chosen by hand last; 0 = none."""
    chosen_among: int = 0
    """The newest version there was then. Those up to it serve again only by hand."""
    judged_since: float = 0.0
    """As of `DraftRelease`: when the traffic returned for which a draft was recalled last."""
    kept: tuple[int, ...] = ()
    """Versions that are never pruned."""
    paused: bool = False
    """Whether training and publishing are paused."""
    steps: tuple[str, ...] | None = None
    """What is switched on in attached engines; None = what the configuration says."""


F = TypeVar("F", Pointer, State)


def directory_name(version: int) -> str:
    return f"v{version:06d}"


def read_file(path: Path, record_type: type[F]) -> F:
    """`CURRENT` or `state.json`; an empty record when there is none. Raises `ValueError` when it is
    damaged."""
    try:
        return decode(path.read_bytes(), record_type)
    except FileNotFoundError:
        return record_type()
    except OSError as error:
        raise ReleaseError(explain(error, path)) from error


def write_record(directory: Path, release: DraftRelease) -> None:
    """Write `release.json`. A record that cannot be read again (NaN has no JSON) is refused."""
    text = encode(release)
    try:
        decode(text, DraftRelease)
    except ValueError as error:
        raise ReleaseError(
            f"draft v{release.version}: its record cannot be stored: {error}"
        ) from None
    replace_file(directory / RELEASE_RECORD, text)


def read_release(directory: Path) -> DraftRelease:
    """The release in a directory. Raises `OSError` or `ValueError` when any part of it is
    missing."""
    release = decode((directory / RELEASE_RECORD).read_bytes(), DraftRelease)
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if directory_name(release.version) != directory.name:
        raise ValueError(f"{RELEASE_RECORD} is of v{release.version}")
    files = release.files or _files_of(directory, release.sha256)
    return replace(release, path=str(directory.absolute()), files=files)


@lru_cache(1024)
def _files_of(directory: Path, sha256: str) -> dict[str, str]:
    """Of a release whose record does not name them, as earlier versions wrote it."""
    return digests(directory, {WEIGHTS: sha256})


def verify(release: DraftRelease) -> None:
    """Raise `ReleaseError` when the weights are not the published ones."""
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
