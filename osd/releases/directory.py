"""The directory of a release store: reads it, and changes it so that a crash damages nothing.

v000004/         a Hugging Face directory plus release.json; complete or absent, never changed
CURRENT          the version that serves, per target, and its line; replaced whole
state.json       what was decided later: bad, pinned, kept, paused; replaced whole
LOCK             held during a change
.tmp-*           a publication or removal in progress; the next start clears leftovers
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from osd.common.files import explain, fsync, locked, replace_file
from osd.errors import ReleaseError
from osd.records import DraftRelease, encode
from osd.releases.files import (
    Pointer,
    State,
    directory_name,
    read_file,
    read_release,
    write_record,
)

log = logging.getLogger(__name__)


class ReleaseDirectory:
    """Blocking; safe for several threads and processes. Changes need `changing`.

    A damaged release is skipped, with one warning in the log.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._warned: set[str] = set()
        with self._writing():
            root.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()

    def releases(self) -> list[DraftRelease]:
        """Every usable release, oldest first."""
        found = [self._load(path) for path in sorted(self.root.glob("v[0-9]*"))]
        return [release for release in found if release is not None]

    def release(self, version: int) -> DraftRelease | None:
        """None when there is no usable release of this version."""
        path = self.path_of(version)
        return self._load(path) if path.is_dir() else None

    def path_of(self, version: int) -> Path:
        return self.root.absolute() / directory_name(version)

    def next_version(self) -> int:
        """One more than any version in use, on disk or in a record."""
        known = [
            int(path.name[1:]) for path in self.root.glob("v[0-9]*") if path.name[1:].isdigit()
        ]
        return 1 + max([self.pointer().version, *self.state().bad, *known])

    def pointer(self) -> Pointer:
        """`CURRENT`; an empty one when it is damaged, with a warning."""
        path = self.root / "CURRENT"
        try:
            return read_file(path, Pointer)
        except ValueError as error:
            self._warn_once(path, f"is damaged, the newest release counts as current: {error}")
            return Pointer()

    def state(self) -> State:
        """`state.json`. Raises `ReleaseError` when it is damaged."""
        path = self.root / "state.json"
        try:
            return read_file(path, State)
        except ValueError as error:
            raise ReleaseError(f"{path}: {error}; repair the file or delete it") from None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock. An `OSError` of the body becomes a `ReleaseError`."""
        with self._writing(), locked(self.root / "LOCK"):
            yield

    @contextmanager
    def new_aside(self) -> Iterator[Path]:
        """An empty directory for a new release, which `add` moves into place."""
        aside = Path(tempfile.mkdtemp(prefix=".tmp-publish-", dir=self.root))
        try:
            aside.chmod(0o755)
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def add(self, aside: Path, release: DraftRelease) -> None:
        """Write the record of a release, then move its directory into place."""
        write_record(aside, release)
        aside.rename(release.path)
        fsync(self.root)

    def remove(self, release: DraftRelease) -> None:
        """Move a release aside, then delete it."""
        aside = self.root / f".tmp-prune-{release.version}"
        Path(release.path).rename(aside)
        shutil.rmtree(aside)

    def write_pointer(self, pointer: Pointer) -> None:
        replace_file(self.root / "CURRENT", encode(pointer))

    def write_state(self, state: State) -> None:
        replace_file(self.root / "state.json", encode(state))

    def _load(self, path: Path) -> DraftRelease | None:
        try:
            return read_release(path)
        except (OSError, ValueError) as error:
            self._warn_once(path, f"is damaged and will not be offered: {error}")
            return None

    def _warn_once(self, path: Path, text: str) -> None:
        if path.name not in self._warned and path.exists():
            self._warned.add(path.name)
            log.warning("%s %s", path, text)

    def _clear_leftovers(self) -> None:
        """Remove what a killed process left behind, unless another process holds the lock."""
        with locked(self.root / "LOCK", wait=False) as is_mine:
            for path in self.root.glob(".tmp-*") if is_mine else ():
                log.info("removing %s, left by a process that was killed", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReleaseError(f"releases cannot be stored: {explain(error, self.root)}") from error
