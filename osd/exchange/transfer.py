"""How drafts come to the machines that need them: by content, in parts, whole or not at all.

    store, or the trainer's candidates ──parts──► .part-ID/ ──every sha256──► ID/

ID is a digest of the names and digests of all files. The processes of a machine share one
directory: each draft comes once, and a transfer that was interrupted goes on where it ended. Files
that a machine sees where they were written (its own, or those of a shared directory) do not travel.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from osd.common.files import explain, fsync, locked, sha256
from osd.common.model_directory import RELEASE_RECORD, WEIGHTS, digests
from osd.errors import AwayError, ReleaseError
from osd.records import DraftRelease, decode

logger = logging.getLogger(__name__)

PART = ".part-"
"""A transfer that has not ended: this, and the draft's ID."""
PART_BYTES = 8 << 20
KEEP = 8
"""Drafts that a machine keeps of those it fetched. A round reads the files of its base to its end,
so there must be more than are asked for meanwhile."""
SECONDS_BETWEEN_TRIES = 1.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Read = Callable[[str, int, int], bytes]
"""`read(name, offset, size)`: up to `size` bytes of a file; none behind its end."""
ReadRelease = Callable[[int, str, int, int], bytes]
"""The same of a release, whose version comes first."""


class FetchedDrafts:
    """What this machine has fetched, under one directory. Blocking; safe for several processes."""

    def __init__(self, root: Path, keep: int = KEEP) -> None:
        self._root, self._keep = root, keep
        self._verified: set[tuple[str, int]] = set()
        """Path and time of change of files this process has read."""

    def fetch(self, files: Mapping[str, str], read: Read) -> Path:
        """The directory with these files (name -> sha256), fetched where it is not there. Raises
        `ReleaseError`."""
        check_names(files)
        name = content_id(files)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with locked(self._root / "LOCK"):
                if not self._is_whole(self._root / name, files):
                    self._fetch(self._root / name, files, read)
                os.utime(self._root / name)
                self._prune(self._root / name)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._drop_unfinished(besides=name)
            raise ReleaseError(f"a draft is not fetched: {explain(error, self._root)}") from None
        return self._root / name

    def _fetch(self, path: Path, files: Mapping[str, str], read: Read) -> None:
        started = time.monotonic()
        shutil.rmtree(path, ignore_errors=True)  # damaged since
        aside = path.with_name(PART + path.name)
        aside.mkdir(exist_ok=True)
        for name, digest in files.items():
            fetch_file(aside / name, digest, read)
        aside.rename(path)
        fsync(self._root)
        logger.info("fetched %s in %.1f s", path, time.monotonic() - started)

    def _is_whole(self, path: Path, files: Mapping[str, str]) -> bool:
        for name, digest in files.items():
            try:
                seen = (str(path / name), (path / name).stat().st_mtime_ns)
                if seen not in self._verified and sha256(path / name) != digest:
                    return False
            except OSError:
                return False
            self._verified.add(seen)
        return True

    def _prune(self, newest: Path) -> None:
        """Remove what was not asked for longest, beside the newest: drafts, and transfers that
        nobody goes on with. Times may be those of a clock that was set since."""
        others = [p for p in self._root.iterdir() if p.is_dir() and p != newest]
        others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        for path in others[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
        kept = {newest, *others[: self._keep - 1]}
        self._verified = {seen for seen in self._verified if Path(seen[0]).parent in kept}

    def _drop_unfinished(self, besides: str) -> None:
        """Remove what came of other drafts, which may never be asked for again."""
        for path in self._root.glob(f"{PART}*"):
            if path.name != PART + besides:
                shutil.rmtree(path, ignore_errors=True)


class DraftsHere:
    """The drafts of a deployment as one machine sees them. For `patience` seconds it waits for the
    store's side where that does not answer: it may be starting, too."""

    def __init__(self, fetched: FetchedDrafts, read: ReadRelease, *, patience: float = 0.0) -> None:
        self._fetched, self._read, self._patience = fetched, read, patience

    def those_of(self, releases: Sequence[DraftRelease]) -> list[DraftRelease]:
        """Those of the releases that can be had; others are logged."""
        found = []
        for release in releases:
            try:
                found.append(self(release))
            except ReleaseError as error:
                logger.warning("left out: %s", error)
        return found

    def __call__(self, release: DraftRelease) -> DraftRelease:
        """The release with its path on this machine. Raises `ReleaseError`."""
        if is_release(Path(release.path), release):
            return release
        if not release.files:
            raise ReleaseError(
                f"draft v{release.version}: {release.path} is not on this machine, and what it "
                "consists of was not recorded; publish a newer one"
            )
        deadline = time.monotonic() + self._patience
        while True:
            try:
                path = self._fetched.fetch(release.files, partial(self._read, release.version))
                return replace(release, path=str(path))
            except AwayError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(SECONDS_BETWEEN_TRIES)
            except ReleaseError as error:
                raise ReleaseError(f"draft v{release.version}: {error}") from None


def is_release(directory: Path, release: DraftRelease) -> bool:
    """Whether this very release lies there. A machine that served by itself before may hold another
    one of the same version at the same place."""
    try:
        found = decode((directory / RELEASE_RECORD).read_bytes(), DraftRelease)
        return found.sha256 == release.sha256 and (directory / WEIGHTS).is_file()
    except (OSError, ValueError):
        return False


def are_files(directory: Path, files: Mapping[str, str]) -> bool:
    """Whether these very files lie there."""
    try:
        return digests(directory) == dict(files)
    except OSError:
        return False


def fetch_file(path: Path, digest: str, read: Read) -> None:
    """Write one file, from where an interrupted transfer ended. Raises `ReleaseError` when it is
    not what its digest says; the next try begins anew then."""
    with path.open("ab") as file:
        while part := read(path.name, file.tell(), PART_BYTES):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    if (found := sha256(path)) != digest:
        path.unlink()
        raise ReleaseError(
            f"{path.name} came damaged: sha256 {found[:12]}..., published as {digest[:12]}..."
        )


def read_part(
    directory: Path, files: Mapping[str, str], name: str, offset: int, size: int
) -> bytes:
    """The other side of a transfer. Raises `ReleaseError` for a name that is none of `files`, and
    when the file cannot be read."""
    if name not in files:
        raise ReleaseError(f"{name}: no file of that draft")
    try:
        with (directory / name).open("rb") as file:
            file.seek(offset)
            return file.read(min(size, PART_BYTES))
    except OSError as error:
        raise ReleaseError(explain(error, directory / name)) from None


def content_id(files: Mapping[str, str]) -> str:
    text = json.dumps(sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_names(files: Mapping[str, str]) -> None:
    """Raise `ReleaseError` for names that would lead out of the directory."""
    for name in files:
        if Path(name).name != name or name.startswith("."):
            raise ReleaseError(f"{name!r}: no name of a draft's file")
