"""The store of drafts on disk: it decides what is current, and survives being killed at any point.

    v000004/         a plain Hugging Face directory plus release.json; complete or absent, never changed
    CURRENT          which version serves, for each target, and in which line; replaced whole, written last
    state.json       what was decided since: bad, pinned, kept, paused; replaced whole
    LOCK             held by whoever changes something
    .tmp-*           a publication or removal under way; a leftover is cleared by the next start

A changed target (another `target_id`) starts a line of its own: its first release has parent 0.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from osd.common.files import explain, fsync, locked, replace_file, sha256
from osd.errors import ReleaseError
from osd.records import DraftRelease, RoundOutcome, encode
from osd.releases.files import (
    WEIGHTS,
    Pointer,
    State,
    copy_model,
    directory_name,
    read_file,
    read_release,
    verify,
    write_record,
)

log = logging.getLogger(__name__)


def what_serves(root: str | Path, known: DraftRelease) -> DraftRelease:
    """What is current in the store in `root` for the target of `known`, which was, and may have been pruned since.
    `known` itself where the store cannot be used or has nothing for that target."""
    try:
        return ReleaseStore(root, known.draft).current(known.target_id) or known
    except ReleaseError as error:
        log.warning("starting with v%d, for %s", known.version, error)
        return known


class ReleaseStore:
    """Releases of one draft under one directory. Blocking; safe for several threads and processes.

    Whatever cannot be done raises `ReleaseError` with one line. A directory that is incomplete or damaged is
    passed over with one warning in the log, and never offered.

    Example:
        store = ReleaseStore(Path("/data/releases"))
        release = store.publish("/data/candidates/17", parent=3, target_id="9f2c", outcome=outcome)
        assert store.current("9f2c") == release
    """

    def __init__(self, root: str | Path, draft: str = "default") -> None:
        self.root = Path(root)
        self.draft = draft
        self._warned: set[str] = set()
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()

    # Reading

    def list(self, target_id: str | None = None) -> list[DraftRelease]:
        """Every usable release, oldest first; bad ones too."""
        found = [self._load(path) for path in sorted(self.root.glob("v[0-9]*"))]
        return [r for r in found if r is not None and target_id in (None, r.target_id)]

    def get(self, version: int) -> DraftRelease:
        """The release of this version; an unknown one raises, naming those there are."""
        release = self._load(self._directory(version)) if self._directory(version).is_dir() else None
        if release is None:
            known = ", ".join(f"v{r.version}" for r in self.list()) or "none"
            raise ReleaseError(f"draft v{version}: no such release in {self.root}; there are: {known}")
        return release

    def current(self, target_id: str | None = None) -> DraftRelease | None:
        """What should serve: the version pointed at or, if that is bad or lost, the nearest usable one before it."""
        pointer = self._pointer()
        version = pointer.version if target_id is None else pointer.per_target.get(target_id, 0)
        if target_id is None and version:
            target_id = next((t for t, v in pointer.per_target.items() if v == version), None)
        offered = self._offered(target_id)
        if version in offered:
            return offered[version]
        return self._before(version, offered) or (offered[max(offered)] if offered else None)

    def began_at(self, target_id: str) -> float:
        """When the first release for this target was made, which is never pruned; 0.0 when there is none."""
        return min((release.created_at for release in self.list(target_id)), default=0.0)

    def line(self, target_id: str) -> int:
        """A number that changes whenever the target is given another draft than a new one: by a rollback, a promote, a
        pin, or because the one that served was marked bad. Weights that were trained before are of another line."""
        return self._pointer().turns.get(target_id, 0) + len(self._state().bad)

    def previous(self, target_id: str | None = None) -> DraftRelease:
        """What a rollback would serve: the current draft's nearest ancestor that is not bad."""
        current = self._require_current(target_id)
        release = self._before(current.version, self._offered(current.target_id))
        if release is None:
            raise ReleaseError(f"draft v{current.version}: there is no earlier release to go back to")
        return release

    def bad(self) -> dict[int, str]:
        """version -> why it is never offered again"""
        return dict(self._state().bad)

    def is_bad(self, version: int) -> bool:
        return version in self._state().bad

    def kept(self) -> tuple[int, ...]:
        return self._state().kept

    def pinned(self, target_id: str | None = None) -> int | None:
        """The version that serves until unpinned. A pin on a draft of another target does not count."""
        version = self._state().pinned
        if not version or target_id is None:
            return version or None
        return version if any(r.version == version for r in self.list(target_id)) else None

    def paused(self) -> bool:
        return self._state().paused

    def verify(self, release: DraftRelease) -> None:
        """Read the weights again; raises when they are not the ones that were published."""
        verify(release)

    # Changing

    def publish(
        self,
        source_dir: str | Path,
        *,
        parent: int,
        target_id: str,
        outcome: RoundOutcome | None = None,
        origin: str = "",
        copy: Callable[[Path, Path], None] = copy_model,
    ) -> DraftRelease:
        """Copy a candidate aside (`copy(source, aside)`), hash it, move it into place, and only then point at it."""
        with self._changing():
            self._refuse_if_pinned(target_id)
            aside = Path(tempfile.mkdtemp(prefix=".tmp-publish-", dir=self.root))
            try:
                aside.chmod(0o755)
                copy(Path(source_dir), aside)
                version = self._next_version()
                release = DraftRelease(
                    draft=self.draft,
                    version=version,
                    parent=parent,
                    path=str(self._directory(version)),
                    sha256=sha256(aside / WEIGHTS),
                    target_id=target_id,
                    created_at=time.time(),
                    kind=outcome.kind if outcome else "full",
                    outcome=outcome,
                    origin=origin,
                )
                write_record(aside, release)
                aside.rename(release.path)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            fsync(self.root)
            self._point_at(release)
        return release

    def set_current(self, version: int) -> DraftRelease:
        """Point at a release by hand. A bad one, and any other than the pinned one, is refused."""
        with self._changing():
            release = self.get(version)
            reason = self._state().bad.get(version)
            if reason is not None:
                raise ReleaseError(f"draft v{version}: not offered again: {reason}")
            if self._state().pinned != version:
                self._refuse_if_pinned(release.target_id)
            self._turn_to(release)
        return release

    def rollback(self, target_id: str | None = None) -> DraftRelease:
        """Point at `previous()`. What is left behind is not marked bad: that is the caller's to say."""
        return self.set_current(self.previous(target_id).version)

    def mark_bad(self, version: int, reason: str) -> None:
        """Never offer this version again."""
        with self._changing():
            state = self._state()
            self._write_state(replace(state, bad=state.bad | {version: reason}))

    def pin(self, version: int) -> DraftRelease:
        """Serve this version, and nothing else, until `unpin`."""
        with self._changing():
            release = self.get(version)
            if self.is_bad(version):
                raise ReleaseError(f"draft v{version}: not offered again: {self._state().bad[version]}")
            self._write_state(replace(self._state(), pinned=version))
            self._turn_to(release)
        return release

    def unpin(self) -> None:
        """Let newer drafts serve again."""
        with self._changing():
            self._write_state(replace(self._state(), pinned=0))

    def keep(self, version: int) -> DraftRelease:
        """Never prune this version."""
        with self._changing():
            release, state = self.get(version), self._state()
            self._write_state(replace(state, kept=tuple(sorted({*state.kept, version}))))
        return release

    def set_paused(self, paused: bool) -> None:
        """Remember over restarts whether training and publishing are paused."""
        with self._changing():
            self._write_state(replace(self._state(), paused=paused))

    def prune(self, keep: int, serving: set[int]) -> Sequence[int]:
        """Remove all but the newest `keep` releases and those that may still be needed; returns what went."""
        with self._changing():
            releases = self.list()
            going = [r for r in releases[: max(0, len(releases) - keep)] if r.version not in self._needed(serving)]
            for release in going:
                aside = self.root / f".tmp-prune-{release.version}"
                Path(release.path).rename(aside)
                shutil.rmtree(aside)
        return [release.version for release in going]

    # Inside

    def _needed(self, serving: set[int]) -> set[int]:
        """Versions that are never pruned: pinned, kept, serving, first of their line, current and its parent."""
        state, releases = self._state(), self.list()
        current = [r for t in {r.target_id for r in releases} if (r := self.current(t)) is not None]
        first = {r.target_id: r.version for r in reversed(releases)}
        return {
            *serving,
            *state.kept,
            state.pinned,
            *first.values(),
            *(version for r in current for version in (r.version, r.parent)),
        }

    def _offered(self, target_id: str | None) -> dict[int, DraftRelease]:
        bad = self._state().bad
        return {r.version: r for r in self.list(target_id) if r.version not in bad}

    def _before(self, version: int, offered: dict[int, DraftRelease]) -> DraftRelease | None:
        """The nearest offered ancestor; where the chain is broken, the newest one offered before `version`."""
        parents = {r.version: r.parent for r in self.list()}
        ancestor = parents.get(version)
        while ancestor and ancestor not in offered:
            ancestor = parents.get(ancestor)
        older = [v for v in offered if v < version]
        return offered[ancestor] if ancestor else offered[max(older)] if older else None

    def _require_current(self, target_id: str | None) -> DraftRelease:
        current = self.current(target_id)
        if current is None:
            raise ReleaseError(f"{self.root}: holds no usable release")
        return current

    def _refuse_if_pinned(self, target_id: str) -> None:
        if (version := self.pinned(target_id)) is not None:
            raise ReleaseError(f"draft v{version} is pinned; `osd drafts unpin` lets another one serve")

    def _next_version(self) -> int:
        known = [int(path.name[1:]) for path in self.root.glob("v[0-9]*") if path.name[1:].isdigit()]
        return 1 + max([0, self._pointer().version, *self._state().bad, *known])

    def _directory(self, version: int) -> Path:
        return self.root.absolute() / directory_name(version)

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

    def _pointer(self) -> Pointer:
        try:
            return read_file(self.root / "CURRENT", Pointer)
        except ValueError as error:
            self._warn_once(self.root / "CURRENT", f"is damaged, the newest release counts as current: {error}")
            return Pointer()

    def _turn_to(self, release: DraftRelease) -> None:
        """Point at a release that was there before. To choose what serves already is no change."""
        self._point_at(release, turns=int(self.current(release.target_id) != release))

    def _point_at(self, release: DraftRelease, turns: int = 0) -> None:
        pointer, target_id = self._pointer(), release.target_id
        pointer = Pointer(
            version=release.version,
            per_target=pointer.per_target | {target_id: release.version},
            turns=pointer.turns | {target_id: pointer.turns.get(target_id, 0) + turns},
        )
        replace_file(self.root / "CURRENT", encode(pointer))

    def _state(self) -> State:
        try:
            return read_file(self.root / "state.json", State)
        except ValueError as error:
            raise ReleaseError(f"{self.root / 'state.json'}: {error}; repair the file or delete it") from None

    def _write_state(self, state: State) -> None:
        replace_file(self.root / "state.json", encode(state))

    def _clear_leftovers(self) -> None:
        """Remove what a killed process left behind, unless one is at work right now."""
        with locked(self.root / "LOCK", wait=False) as is_mine:
            for path in self.root.glob(".tmp-*") if is_mine else ():
                log.info("removing %s, left by a process that was killed", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._writing(), locked(self.root / "LOCK"):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReleaseError(f"releases cannot be stored: {explain(error, self.root)}") from error
