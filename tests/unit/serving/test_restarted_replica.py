"""What a restarted replica begins with.

Its arguments are those of the first start, and may be out of date.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from osd.records import Canary, DraftRelease
from osd.releases.store import ReleaseStore, what_serves
from serving.pull import release_to_start
from tests.unit.osd.control.test_controller import MemoryRegistry
from tests.unit.osd.releases.test_store import make_model, publish_line


@pytest.fixture
def line(tmp_path: Path) -> list[DraftRelease]:
    """v1 to v6 of one target, of which v2 to v4 are pruned."""
    store = ReleaseStore(tmp_path / "releases")
    releases = publish_line(store, make_model(tmp_path / "candidate"), 6)
    assert store.prune(keep=2, serving=set()) == [2, 3, 4]
    return releases


def begun(line: list[DraftRelease], registry: MemoryRegistry, known: int) -> DraftRelease:
    """What a replica begins with whose first start was with v`known`."""
    release = line[known - 1]
    return release_to_start(registry, what_serves(Path(release.path).parent, release))  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [1, 2, 6])
@pytest.mark.parametrize("redis", ["away", "empty", "behind"])
def test_it_begins_with_what_the_disk_says_when_redis_cannot(
    line: list[DraftRelease], redis: str, known: int
) -> None:
    registry = MemoryRegistry()
    registry.is_away = redis == "away"
    if redis == "behind":
        registry.wishes = {"default": line[2]}  # pruned since
    assert begun(line, registry, known) == line[5]


def test_it_begins_with_what_is_wanted(line: list[DraftRelease]) -> None:
    registry = MemoryRegistry()
    registry.set_wanted(line[4])
    assert begun(line, registry, 1) == line[4]
    registry.set_wanted(replace(line[4], target_id="other"))
    assert begun(line, registry, 1) == line[5], "of another target"


def test_each_target_and_draft_has_its_own(line: list[DraftRelease], tmp_path: Path) -> None:
    other = ReleaseStore(tmp_path / "releases").publish(
        tmp_path / "candidate", parent=0, target_id="other"
    )
    assert begun(line, MemoryRegistry(), 1) == line[5]
    assert what_serves(tmp_path / "releases", replace(other, version=1)) == other


def test_without_a_store_it_begins_with_what_it_was_given(
    line: list[DraftRelease], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "releases")
    assert what_serves(tmp_path / "releases", line[0]) == line[0]
    (tmp_path / "file").write_text("")
    assert what_serves(tmp_path / "file" / "releases", line[0]) == line[0]


def test_it_begins_with_what_it_is_to_serve_first(line: list[DraftRelease]) -> None:
    registry = MemoryRegistry()
    registry.set_wanted(line[4])
    registry.set_canary(Canary(replica="one", release=line[5], before=line[4]))
    found = {
        name: release_to_start(registry, line[0], replica=name)  # type: ignore[arg-type]
        for name in ("one", "other")
    }
    assert found == {"one": line[5], "other": line[4]}
