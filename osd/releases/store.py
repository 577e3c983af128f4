"""The store of drafts on disk. It decides which release is current.

`osd/releases/directory.py` keeps the files. A changed target (another `target_id`) starts a line of
its own: its first release has parent 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from osd.common.model_directory import WEIGHTS, copy_model, digests
from osd.errors import ReleaseError
from osd.exchange.transfer import read_part
from osd.records import Canary, DraftRelease, RoundOutcome
from osd.releases.directory import ReleaseDirectory
from osd.releases.files import Pointer, State, verify

log = logging.getLogger(__name__)


def what_serves(root: str | Path, known: DraftRelease) -> DraftRelease:
    """The current release for the target of `known`, which served before and may have been pruned
    since. `known` itself where the store cannot be used or has nothing for that target."""
    try:
        return ReleaseStore(root, known.draft).current(known.target_id) or known
    except ReleaseError as error:
        log.warning("starting with v%d, for %s", known.version, error)
        return known


class ReleaseStore:
    """Releases of one draft under one directory. Blocking; safe for several threads and processes.

    Every failure raises `ReleaseError` with one line. An incomplete or damaged release is skipped,
    with one warning in the log.

    Example:
        store = ReleaseStore(Path("/data/releases"))
        release = store.publish("/data/candidates/17", parent=3, target_id="9f2c", outcome=outcome)
        assert store.current("9f2c") == release
    """

    def __init__(self, root: str | Path, draft: str = "default") -> None:
        self.root = Path(root)
        self.draft = draft
        self._directory = ReleaseDirectory(self.root)

    # Reading

    def list(self, target_id: str | None = None) -> list[DraftRelease]:
        """Every usable release, oldest first, bad ones included."""
        return [r for r in self._directory.releases() if target_id in (None, r.target_id)]

    def recallable(self, target_id: str) -> Sequence[DraftRelease]:
        """Those that may serve this target again by themselves, oldest first. Where one was chosen
        by hand, all others of before are not among them."""
        state, offered = self._directory.state(), self._offered(target_id)
        return [r for v, r in offered.items() if v > state.chosen_among or v == state.chosen]

    def get(self, version: int) -> DraftRelease:
        """The release of this version. Raises `ReleaseError` with all known ones."""
        release = self._directory.release(version)
        if release is None:
            known = ", ".join(f"v{r.version}" for r in self.list()) or "none"
            raise ReleaseError(
                f"draft v{version}: no such release in {self.root}; there are: {known}"
            )
        return release

    def current(self, target_id: str | None = None) -> DraftRelease | None:
        """The release that should serve: the one pointed at or, if that is bad or lost, the nearest
        usable one before it."""
        pointer = self._directory.pointer()
        version = pointer.version if target_id is None else pointer.per_target.get(target_id, 0)
        if target_id is None and version:
            target_id = next((t for t, v in pointer.per_target.items() if v == version), None)
        offered = self._offered(target_id)
        if version in offered:
            return offered[version]
        return self._before(version, offered) or (offered[max(offered)] if offered else None)

    def began_at(self, target_id: str) -> float:
        """Time of the first release for this target, which is never pruned; 0.0 without one."""
        return min((release.created_at for release in self.list(target_id)), default=0.0)

    def line(self, target_id: str) -> int:
        """A number that changes when a target is given an existing draft again: by a rollback, a
        recall, a promote or a pin, or because its draft was marked bad. Weights trained before that
        belong to another line."""
        return self._directory.pointer().turns.get(target_id, 0) + len(self._directory.state().bad)

    def previous(self, target_id: str | None = None) -> DraftRelease:
        """The release that a rollback would serve: the nearest ancestor that is not bad."""
        current = self._require_current(target_id)
        release = self._before(current.version, self._offered(current.target_id))
        if release is None:
            raise ReleaseError(
                f"draft v{current.version}: there is no earlier release to go back to"
            )
        return release

    def bad(self) -> dict[int, str]:
        """version -> why it is never offered again"""
        return dict(self._directory.state().bad)

    def is_bad(self, version: int) -> bool:
        return version in self._directory.state().bad

    def kept(self) -> tuple[int, ...]:
        return self._directory.state().kept

    def pinned(self, target_id: str | None = None) -> int | None:
        """The version that serves until unpinned. Pins on drafts of other targets, and on one that
        was found damaged, do not count."""
        state = self._directory.state()
        version = 0 if state.pinned in state.bad else state.pinned
        if not version or target_id is None:
            return version or None
        return version if any(r.version == version for r in self.list(target_id)) else None

    def paused(self) -> bool:
        return self._directory.state().paused

    def read_part(self, version: int, name: str, offset: int, size: int) -> bytes:
        """A part of a file of a release, for another machine."""
        release = self.get(version)
        return read_part(Path(release.path), release.files, name, offset, size)

    def on_disk(self, canary: Canary, target_id: str) -> Canary | None:
        """A canary with both releases as they are here; None where one is gone or bad, or another
        is pinned."""
        try:
            release, before = self.get(canary.release.version), self.get(canary.before.version)
        except ReleaseError:
            return None
        is_fit = release.target_id == before.target_id == target_id
        is_bad = self.is_bad(release.version) or self.is_bad(before.version)
        if not is_fit or is_bad or self.pinned(target_id):
            return None
        return replace(canary, release=release, before=before)

    def verify(self, release: DraftRelease) -> None:
        """Read the weights again. Raises `ReleaseError` when they are not the published ones."""
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
        """Copy a candidate aside (`copy(source, aside)`), hash it, move it into place, then point
        at it."""
        with self._directory.changing():
            self._refuse_if_pinned(target_id)
            with self._directory.new_aside() as aside:
                copy(Path(source_dir), aside)
                version = self._directory.next_version()
                files = digests(aside)
                release = DraftRelease(
                    draft=self.draft,
                    version=version,
                    parent=parent,
                    path=str(self._directory.path_of(version)),
                    sha256=files[WEIGHTS],
                    files=files,
                    target_id=target_id,
                    created_at=time.time(),
                    kind=outcome.kind if outcome else "full",
                    outcome=outcome and replace(outcome, files={}),
                    origin=origin,
                )
                self._directory.add(aside, release)
            self._point_at(release)
        return release

    def set_current(
        self, version: int, target_id: str | None = None, *, by_hand: bool = False
    ) -> DraftRelease:
        """Point at a release. After one was chosen `by_hand`, no other of before serves again by
        itself. Raises `ReleaseError` when it is bad, of another target than this, or when another
        is pinned."""
        with self._directory.changing():
            release, state = self._get_of(version, target_id), self._directory.state()
            reason = state.bad.get(version)
            if reason is not None:
                raise ReleaseError(f"draft v{version}: not offered again: {reason}")
            if state.pinned != version:
                self._refuse_if_pinned(release.target_id)
            if by_hand:
                self._directory.write_state(self._chosen(version))
            self._turn_to(release)
        return release

    def rollback(self, target_id: str | None = None) -> DraftRelease:
        """Point at `previous()`. The current release is not marked bad."""
        return self.set_current(self.previous(target_id).version, by_hand=True)

    def recall(self, version: int, target_id: str, since: float) -> DraftRelease:
        """Point at a release whose traffic has returned. Candidates are judged on requests since
        then."""
        with self._directory.changing():
            state = replace(self._directory.state(), judged_since=since)
            self._directory.write_state(state)
        return self.set_current(version, target_id)

    def judged_since(self) -> float:
        """As of `DraftRelease`; 0.0 before the first recall."""
        return self._directory.state().judged_since

    def mark_bad(self, version: int, reason: str) -> None:
        """Never offer this version again."""
        with self._directory.changing():
            state = self._directory.state()
            self._directory.write_state(replace(state, bad=state.bad | {version: reason}))

    def pin(self, version: int, target_id: str | None = None) -> DraftRelease:
        """Serve this version, and nothing else, until `unpin`. Raises `ReleaseError` when it is
        bad, or of another target than this."""
        with self._directory.changing():
            release = self._get_of(version, target_id)
            if self.is_bad(version):
                raise ReleaseError(
                    f"draft v{version}: not offered again: {self._directory.state().bad[version]}"
                )
            self._turn_to(release)  # first: what is pinned serves, also where the disk is full now
            self._directory.write_state(replace(self._chosen(version), pinned=version))
        return release

    def unpin(self) -> None:
        """Let newer drafts serve again."""
        with self._directory.changing():
            self._directory.write_state(replace(self._directory.state(), pinned=0))

    def keep(self, version: int) -> DraftRelease:
        """Never prune this version."""
        with self._directory.changing():
            release, state = self.get(version), self._directory.state()
            self._directory.write_state(replace(state, kept=tuple(sorted({*state.kept, version}))))
        return release

    def set_paused(self, paused: bool) -> None:
        """Remember over restarts whether training and publishing are paused."""
        with self._directory.changing():
            self._directory.write_state(replace(self._directory.state(), paused=paused))

    def steps(self) -> tuple[str, ...] | None:
        return self._directory.state().steps

    def set_steps(self, steps: tuple[str, ...]) -> None:
        """Remember over restarts what is switched on in attached engines."""
        with self._directory.changing():
            self._directory.write_state(replace(self._directory.state(), steps=steps))

    def prune(self, keep: int, serving: set[int]) -> Sequence[int]:
        """Remove all but the newest `keep` releases and those that may still be needed. Returns the
        removed versions."""
        with self._directory.changing():
            releases = self.list()
            oldest, needed = releases[: max(0, len(releases) - keep)], self._needed(serving)
            going = [release for release in oldest if release.version not in needed]
            for release in going:
                self._directory.remove(release)
        return [release.version for release in going]

    # Inside

    def _get_of(self, version: int, target_id: str | None) -> DraftRelease:
        release = self.get(version)
        if target_id not in (None, release.target_id):
            own = ", ".join(f"v{r.version}" for r in self.list(target_id)) or "none"
            raise ReleaseError(
                f"draft v{version}: is of another target ({release.target_id}) than the one that "
                f"is served ({target_id}), of which there are: {own}"
            )
        return release

    def _needed(self, serving: set[int]) -> set[int]:
        """Versions that are never pruned: pinned, kept, serving, first of their target, current and
        its parent."""
        state, releases = self._directory.state(), self.list()
        current = [r for t in {r.target_id for r in releases} if (r := self.current(t)) is not None]
        first = {r.target_id: r.version for r in reversed(releases)}
        return {
            *serving,
            *state.kept,
            state.pinned,
            *first.values(),
            *(version for r in current for version in (r.version, r.parent)),
        }

    def _chosen(self, version: int) -> State:
        """The state after this version was chosen by hand."""
        newest = self._directory.next_version() - 1
        return replace(self._directory.state(), chosen=version, chosen_among=newest)

    def _offered(self, target_id: str | None) -> dict[int, DraftRelease]:
        bad = self._directory.state().bad
        return {r.version: r for r in self.list(target_id) if r.version not in bad}

    def _before(self, version: int, offered: dict[int, DraftRelease]) -> DraftRelease | None:
        """The nearest offered ancestor. Where the chain is broken, the newest one offered before
        `version`."""
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
            raise ReleaseError(
                f"draft v{version} is pinned; `osd drafts unpin` lets another one serve"
            )

    def _turn_to(self, release: DraftRelease) -> None:
        """Point at an existing release. To choose the current one again is no change."""
        self._point_at(release, turns=int(self.current(release.target_id) != release))

    def _point_at(self, release: DraftRelease, turns: int = 0) -> None:
        pointer, target_id = self._directory.pointer(), release.target_id
        pointer = Pointer(
            version=release.version,
            per_target=pointer.per_target | {target_id: release.version},
            turns=pointer.turns | {target_id: pointer.turns.get(target_id, 0) + turns},
        )
        self._directory.write_pointer(pointer)
