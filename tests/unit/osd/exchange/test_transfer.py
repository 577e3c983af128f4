"""Drafts that come to another machine: whole, once, and what they were published as."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osd.common.model_directory import digests
from osd.errors import AwayError, ReleaseError
from osd.exchange import transfer
from osd.exchange.transfer import (
    DraftsHere,
    FetchedDrafts,
    are_files,
    content_id,
    is_release,
    read_part,
)
from osd.records import DraftRelease
from osd.releases.store import ReleaseStore
from tests.unit.osd.releases.test_store import TARGET, make_model

WEIGHTS = bytes(range(256)) * 100


class Source:
    """The store's side. Reads in parts of 1,000 bytes, the first `num_good` of which succeed."""

    def __init__(self, release: DraftRelease) -> None:
        self.release = release
        self.reads: list[tuple[str, int]] = []
        self.num_good = 10_000
        self.spoils = ""
        """Name of a file that comes damaged."""

    def read(self, version: int, name: str, offset: int, size: int) -> bytes:
        assert version == self.release.version
        self.reads.append((name, offset))
        if len(self.reads) > self.num_good:
            raise AwayError("cut off")
        part = read_part(Path(self.release.path), self.release.files, name, offset, min(size, 1000))
        return bytes(len(part)) if name == self.spoils else part

    @property
    def num_begun(self) -> dict[str, int]:
        """File -> how often it was read from its beginning."""
        begun = [name for name, offset in self.reads if offset == 0]
        return {name: begun.count(name) for name in begun}


@pytest.fixture
def release(tmp_path: Path) -> DraftRelease:
    store = ReleaseStore(tmp_path / "releases")
    return store.publish(make_model(tmp_path / "model", WEIGHTS), parent=0, target_id=TARGET)


@pytest.fixture
def source(release: DraftRelease) -> Source:
    return Source(release)


@pytest.fixture
def here(tmp_path: Path, source: Source) -> DraftsHere:
    return machine(tmp_path, source)


def machine(tmp_path: Path, source: Source, keep: int = 8) -> DraftsHere:
    return DraftsHere(FetchedDrafts(tmp_path / "fetched", keep), source.read)


def elsewhere(release: DraftRelease) -> DraftRelease:
    """The release as another machine hears of it."""
    return replace(release, path="/data/of/another/machine/v000001")


def contents(directory: str | Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def whole(tmp_path: Path) -> list[str]:
    """The drafts that may serve."""
    found = (tmp_path / "fetched").iterdir()
    return [path.name for path in found if path.is_dir() and path.name[0] != "."]


def test_a_release_comes_whole_and_once(
    here: DraftsHere, source: Source, release: DraftRelease
) -> None:
    found = here(elsewhere(release))
    assert contents(found.path) == {"config.json": b"{}", "model.safetensors": WEIGHTS}
    assert replace(found, path=release.path) == release
    assert here(elsewhere(release)) == found
    assert source.num_begun == {"config.json": 1, "model.safetensors": 1}


def test_what_is_seen_where_it_was_written_does_not_travel(
    here: DraftsHere, source: Source, release: DraftRelease
) -> None:
    assert here(release) == release
    assert source.reads == []


def test_another_release_at_the_same_place_is_not_taken_for_it(
    here: DraftsHere, source: Source, release: DraftRelease, tmp_path: Path
) -> None:
    """This machine served by itself once: its store has a v1 too."""
    store = ReleaseStore(tmp_path / "own")
    own = store.publish(make_model(tmp_path / "other", b"other"), parent=0, target_id=TARGET)
    assert not is_release(Path(own.path), release)
    found = here(replace(release, path=own.path))
    assert contents(found.path)["model.safetensors"] == WEIGHTS


def test_processes_of_a_machine_fetch_it_once_between_them(
    tmp_path: Path, source: Source, release: DraftRelease
) -> None:
    paths: list[str] = []

    def fetch() -> None:
        paths.append(machine(tmp_path, source)(elsewhere(release)).path)

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8 and len(set(paths)) == 1
    assert source.num_begun == {"config.json": 1, "model.safetensors": 1}


def test_an_interrupted_transfer_serves_nothing_and_goes_on_where_it_ended(
    here: DraftsHere, source: Source, release: DraftRelease, tmp_path: Path
) -> None:
    source.num_good = 10
    with pytest.raises(AwayError, match="cut off"):
        here(elsewhere(release))
    assert whole(tmp_path) == []
    source.num_good = 10_000
    num_read = len(source.reads)
    found = here(elsewhere(release))
    assert contents(found.path)["model.safetensors"] == WEIGHTS
    assert source.num_begun["model.safetensors"] == 1
    assert len(source.reads) - num_read < len(WEIGHTS) // 1000, "what had come did not come again"


@pytest.mark.parametrize("patience", [0.0, 0.3])
def test_one_that_is_patient_waits_for_a_store_that_is_starting(
    tmp_path: Path,
    source: Source,
    release: DraftRelease,
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
) -> None:
    monkeypatch.setattr(transfer, "SECONDS_BETWEEN_TRIES", 0.1)
    here = DraftsHere(FetchedDrafts(tmp_path / "fetched"), source.read, patience=patience)
    source.num_good = 0
    with pytest.raises(AwayError, match="cut off"):
        here(elsewhere(release))
    tries = len(source.reads)
    assert (tries > 1) is bool(patience)
    threading.Timer(0.15, setattr, (source, "num_good", 10_000)).start()
    if patience:
        assert contents(here(elsewhere(release)).path)["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_transfer_serves_nothing_and_begins_anew(
    here: DraftsHere, source: Source, release: DraftRelease, tmp_path: Path, name: str
) -> None:
    source.spoils = name
    with pytest.raises(ReleaseError, match=f"draft v1: {name} came damaged: sha256 "):
        here(elsewhere(release))
    assert whole(tmp_path) == []
    source.spoils = ""
    assert contents(here(elsewhere(release)).path)["model.safetensors"] == WEIGHTS


def test_what_was_damaged_on_the_disk_is_fetched_again(
    here: DraftsHere, release: DraftRelease
) -> None:
    path = Path(here(elsewhere(release)).path)
    (path / "model.safetensors").write_bytes(b"weights")
    assert contents(here(elsewhere(release)).path)["model.safetensors"] == WEIGHTS
    (path / "config.json").unlink()
    assert contents(here(elsewhere(release)).path)["config.json"] == b"{}"


def test_a_half_written_directory_of_a_killed_process_serves_nothing(
    here: DraftsHere, release: DraftRelease, tmp_path: Path
) -> None:
    aside = tmp_path / "fetched" / f".part-{content_id(release.files)}"
    aside.mkdir(parents=True)
    (aside / "model.safetensors").write_bytes(WEIGHTS[:999])
    (aside / "config.json").write_bytes(b"{}")
    assert contents(here(elsewhere(release)).path)["model.safetensors"] == WEIGHTS
    assert not aside.exists()


def test_a_full_disk_is_said(
    here: DraftsHere, release: DraftRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer.os, "fsync", full)
    with pytest.raises(ReleaseError, match="v1: .* not fetched: .*No space left.*free some space"):
        here(elsewhere(release))
    assert whole(tmp_path) == []
    monkeypatch.undo()
    assert contents(here(elsewhere(release)).path)["model.safetensors"] == WEIGHTS


def test_where_the_disk_is_full_nothing_stays_of_drafts_that_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each newer draft would leave another part of itself there, and none would ever come."""
    store, most = ReleaseStore(tmp_path / "releases"), 30_000
    sources = []
    for weights in (WEIGHTS * 2, WEIGHTS * 2 + b"1", WEIGHTS):
        model = make_model(tmp_path / "model", weights)
        sources.append(Source(store.publish(model, parent=0, target_id=TARGET)))

    def room(handle: int) -> None:
        taken = sum(p.stat().st_size for p in (tmp_path / "fetched").rglob("*") if p.is_file())
        if taken > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer.os, "fsync", room)
    told = []
    for source in sources:
        try:
            machine(tmp_path, source)(elsewhere(source.release))
            told.append("here")
        except ReleaseError:
            told.append("full")
    assert told == ["full", "full", "here"]


def test_what_was_read_of_drafts_that_are_gone_is_forgotten(tmp_path: Path) -> None:
    """A trainer fetches a draft each round, for weeks."""
    store, fetched = ReleaseStore(tmp_path / "releases"), FetchedDrafts(tmp_path / "fetched", 2)
    for n in range(6):
        model = make_model(tmp_path / "model", b"%d" % n)
        source = Source(store.publish(model, parent=0, target_id=TARGET))
        here = DraftsHere(fetched, source.read)
        for _ in range(2):
            assert here(elsewhere(source.release)).path
    assert {Path(name).parent.name for name, _ in fetched._verified} <= set(whole(tmp_path))


def test_those_asked_for_longest_ago_are_removed(tmp_path: Path) -> None:
    store = ReleaseStore(tmp_path / "releases")
    found = []
    for n in range(4):
        model = make_model(tmp_path / "model", b"%d" % n)
        source = Source(store.publish(model, parent=0, target_id=TARGET))
        found.append((source, machine(tmp_path, source, keep=2)))
        path = Path(found[-1][1](elsewhere(source.release)).path)
        os.utime(path, (n, n))
        if n == 2:  # the second is asked for again
            found[1][1](elsewhere(found[1][0].release))
    kept = {content_id(found[n][0].release.files) for n in (1, 3)}
    assert set(whole(tmp_path)) == kept


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", ".hidden", "a/b"])
def test_names_that_lead_elsewhere_are_refused(
    here: DraftsHere, source: Source, release: DraftRelease, name: str
) -> None:
    with pytest.raises(ReleaseError, match="no name of a draft's file"):
        here(replace(elsewhere(release), files={name: "ab"}))
    with pytest.raises(ReleaseError, match="no file of that draft"):
        read_part(Path(release.path), release.files, name, 0, 9)
    assert source.reads == []


def test_a_release_that_does_not_say_what_it_consists_of_stays_where_it_is(
    here: DraftsHere, release: DraftRelease
) -> None:
    with pytest.raises(ReleaseError, match="draft v1: /data/of/.* is not on this machine"):
        here(replace(elsewhere(release), files={}))


def test_files_are_told_from_others_of_the_same_names(tmp_path: Path) -> None:
    one, other = make_model(tmp_path / "one", b"one"), make_model(tmp_path / "other", b"other")
    assert are_files(one, digests(one)) and not are_files(one, digests(other))
    assert not are_files(tmp_path / "gone", digests(one))


def test_a_part_is_no_longer_than_asked_for(release: DraftRelease) -> None:
    def part(offset: int, size: int) -> bytes:
        return read_part(Path(release.path), release.files, "model.safetensors", offset, size)

    assert part(10, 5) == WEIGHTS[10:15]
    assert part(len(WEIGHTS) - 2, 5) == WEIGHTS[-2:]
    assert part(len(WEIGHTS), 5) == b""
    (Path(release.path) / "model.safetensors").unlink()
    with pytest.raises(ReleaseError, match="No such file"):
        part(0, 5)
