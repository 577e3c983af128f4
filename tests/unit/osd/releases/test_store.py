"""The release store on full disks, with damaged files, and after kills.

The current release stays current and complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from osd.errors import ReleaseError
from osd.records import DraftRelease, RoundOutcome
from osd.releases.store import ReleaseStore

TARGET = "9f2c"


def make_model(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def make_outcome(loss_last: float = 0.5) -> RoundOutcome:
    return RoundOutcome(
        base_version=1,
        path="/x",
        num_steps=4,
        num_tokens=99,
        loss_first=2.0,
        loss_last=loss_last,
        seconds=1.0,
        trace_age_mean_s=1.0,
        trace_age_max_s=2.0,
        eval=None,
    )


@pytest.fixture
def store(tmp_path: Path) -> ReleaseStore:
    return ReleaseStore(tmp_path / "releases")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "candidate")


def publish_line(
    store: ReleaseStore, model: Path, count: int, target_id: str = TARGET
) -> list[DraftRelease]:
    """v1 <- v2 <- ... each trained from the one before."""
    releases: list[DraftRelease] = []
    for _ in range(count):
        parent = releases[-1].version if releases else 0
        releases.append(store.publish(model, parent=parent, target_id=target_id))
    return releases


def versions(store: ReleaseStore, target_id: str | None = None) -> list[int]:
    return [release.version for release in store.list(target_id)]


def current_version(store: ReleaseStore, target_id: str | None = None) -> int | None:
    current = store.current(target_id)
    return None if current is None else current.version


def test_publish_is_a_complete_copy_that_becomes_current(store: ReleaseStore, model: Path) -> None:
    assert store.current() is None
    (model / "tokenizer.json").write_text("{}")
    for name in ("pytorch_model.bin", "model.gguf", ".gitattributes", "release.json"):
        (model / name).write_bytes(b"the same again, or not of the model")
    (model / "logs").mkdir()
    (model / "vocab.json").symlink_to(model / "tokenizer.json")
    outcome = replace(make_outcome(), kind="lora")
    begun = time.time()
    release = store.publish(model, parent=0, target_id=TARGET, outcome=outcome)
    assert (release.version, release.parent, release.target_id, release.outcome) == (
        1,
        0,
        TARGET,
        outcome,
    )
    assert (release.draft, release.kind) == ("default", "lora")
    assert begun <= release.created_at <= time.time()
    assert release.sha256 == hashlib.sha256(b"weights").hexdigest()
    files = list(Path(release.path).iterdir())
    assert {path.name for path in files} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.json",
        "release.json",
    }
    assert not any(path.is_symlink() for path in files)
    assert Path(release.path).stat().st_mode & 0o777 == 0o755, (
        "others may read it, as with any directory"
    )
    (model / "model.safetensors").write_bytes(b"trained on")
    store.verify(release)
    assert store.current() == store.get(1) == release
    assert ReleaseStore(store.root).list() == [release], "another process finds the same"


def test_a_store_may_be_anywhere_and_of_any_draft(tmp_path: Path, model: Path) -> None:
    store = ReleaseStore(tmp_path / "a" / "b", "small")
    release = store.publish(model, parent=0, target_id=TARGET)
    assert (release.draft, release.kind) == ("small", "full")
    assert Path(release.path) == tmp_path / "a" / "b" / "v000001"


def test_moved_store_gives_paths_that_exist(
    store: ReleaseStore, model: Path, tmp_path: Path
) -> None:
    store.publish(model, parent=0, target_id=TARGET)
    moved = store.root.rename(tmp_path / "elsewhere")
    release = ReleaseStore(moved).current()
    assert release is not None
    assert Path(release.path) == moved / "v000001"


@pytest.mark.parametrize("damage", ["changed", "truncated", "gone"])
def test_verify_notices(store: ReleaseStore, model: Path, damage: str) -> None:
    release = store.publish(model, parent=0, target_id=TARGET)
    weights = Path(release.path) / "model.safetensors"
    weights.unlink() if damage == "gone" else weights.write_bytes(
        {"changed": b"wEights"}.get(damage, b"wei")
    )
    with pytest.raises(ReleaseError, match="draft v1: .*model.safetensors"):
        store.verify(release)


def test_publish_killed_while_copying_leaves_nothing(store: ReleaseStore, model: Path) -> None:
    store.publish(model, parent=0, target_id=TARGET)
    make_model(store.root / ".tmp-publish-abc", b"half")
    (store.root / ".tmp-pointer").write_bytes(b"{")
    again = ReleaseStore(store.root)
    assert versions(again) == [1]
    assert current_version(again) == 1
    assert not list(store.root.glob(".tmp-*"))


def test_publish_killed_before_the_pointer_changes_nothing(
    store: ReleaseStore, model: Path
) -> None:
    store.publish(model, parent=0, target_id=TARGET)
    pointer = (store.root / "CURRENT").read_bytes()
    store.publish(model, parent=1, target_id=TARGET)
    (store.root / "CURRENT").write_bytes(pointer)
    again = ReleaseStore(store.root)
    assert current_version(again) == 1
    assert again.publish(model, parent=1, target_id=TARGET).version == 3, (
        "no version is given twice"
    )


PUBLISH_AND_DIE = """
import itertools, os, pathlib, sys
from osd.releases.store import ReleaseStore

def die(event, args):
    global left
    if event == "open" or event.partition(".")[0] in ("os", "shutil", "tempfile", "fcntl"):
        left -= 1
        if left < 0:
            os._exit(9)

for left in itertools.count():
    store = ReleaseStore(pathlib.Path(sys.argv[1], f"{left:03d}"))
    store.publish(sys.argv[2], parent=0, target_id="9f2c")
    if not (pid := os.fork()):
        sys.addaudithook(die)
        store.publish(sys.argv[2], parent=1, target_id="9f2c")
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        break
"""
"""Store after store: publishes v1, then v2 in a process that is gone before its n-th file
operation, with nothing flushed, as by kill -9. Ends with the first that gets through."""


def test_publish_killed_anywhere_never_points_at_what_is_not_there(
    tmp_path: Path, model: Path
) -> None:
    """What is in place is whole, and the pointer names what is in place."""
    (tmp_path / "stores").mkdir()
    command = [sys.executable, "-c", PUBLISH_AND_DIE, str(tmp_path / "stores"), str(model)]
    subprocess.run(command, check=True, timeout=120)
    pointed: list[int] = []
    for root in sorted((tmp_path / "stores").iterdir()):
        pointed.append(json.loads((root / "CURRENT").read_bytes())["version"])
        assert (root / f"v{pointed[-1]:06d}" / "model.safetensors").is_file(), (
            f"after {root.name} operations"
        )
        again = ReleaseStore(root)
        in_place = [path.name for path in sorted(root.glob("v*"))]
        assert in_place == [f"v{version:06d}" for version in versions(again)], (
            f"after {root.name} operations"
        )
        assert current_version(again, TARGET) == pointed[-1]
        for release in again.list():
            again.verify(release)
    assert pointed == sorted(pointed) and {*pointed} == {1, 2}, "v1 serves until v2 is complete"
    assert len(pointed) > 10


def test_first_publish_killed_before_the_pointer_still_serves(
    store: ReleaseStore, model: Path
) -> None:
    store.publish(model, parent=0, target_id=TARGET)
    (store.root / "CURRENT").unlink()
    assert current_version(ReleaseStore(store.root), TARGET) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "release.json").write_bytes((path / "release.json").read_bytes()[:20]),
        lambda path: (path / "release.json").unlink(),
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "config.json").unlink(),
        lambda path: (path / "release.json").write_bytes(
            (path.parent / "v000001/release.json").read_bytes()
        ),
    ],
    ids=["truncated record", "no record", "no weights", "no config", "record of another"],
)
def test_damaged_release_is_never_offered(
    store: ReleaseStore, model: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    publish_line(store, model, 3)
    assert callable(damage)
    damage(store.root / "v000003")
    with caplog.at_level(logging.WARNING):
        assert versions(store) == [1, 2]
        assert current_version(store, TARGET) == 2
    assert len([r for r in caplog.records if "v000003" in r.getMessage()]) == 1, "said once"
    with pytest.raises(ReleaseError, match="draft v3: no such release in .*; there are: v1, v2"):
        store.get(3)
    assert store.publish(model, parent=2, target_id=TARGET).version == 4


@pytest.mark.parametrize("text", [b"", b"7", b'{"version": 99, "per_target": {"9f2c": 99}}'])
def test_damaged_pointer_falls_back_to_the_newest(
    store: ReleaseStore, model: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    publish_line(store, model, 2)
    (store.root / "CURRENT").write_bytes(text)
    assert current_version(store) == current_version(store, TARGET) == 2
    num_said = caplog.text.count("CURRENT is damaged, the newest release counts as current")
    assert num_said == (len(text) < 9), "once"


def test_damaged_state_says_so(store: ReleaseStore) -> None:
    (store.root / "state.json").write_bytes(b'{"bad": 1}')
    with pytest.raises(ReleaseError, match=r"state\.json: .*; repair the file or delete it"):
        store.is_bad(1)


def test_candidate_without_weights_is_refused_and_leaves_nothing(
    store: ReleaseStore, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReleaseError, match=r"empty: no config\.json"):
        store.publish(tmp_path / "empty", parent=0, target_id=TARGET)
    assert [path.name for path in store.root.iterdir()] == ["LOCK"]


def test_record_that_could_not_be_read_again_is_refused(store: ReleaseStore, model: Path) -> None:
    with pytest.raises(ReleaseError, match="draft v1: its record cannot be stored"):
        store.publish(
            model, parent=0, target_id=TARGET, outcome=make_outcome(loss_last=float("nan"))
        )
    assert store.list() == []


def test_two_stores_publishing_at_once(store: ReleaseStore, tmp_path: Path) -> None:
    def work(number: int) -> None:
        mine = ReleaseStore(store.root)
        source = make_model(tmp_path / f"candidate{number}", str(number).encode())
        for _ in range(5):
            mine.publish(source, parent=0, target_id=TARGET)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions(store) == list(range(1, 21))
    assert current_version(store) == 20
    for release in store.list():
        store.verify(release)


def test_start_leaves_alone_what_another_process_is_writing(
    store: ReleaseStore, model: Path
) -> None:
    program = (
        "import sys, pathlib; from osd.common.files import locked; root = "
        "pathlib.Path(sys.argv[1])\n"
        "with locked(root / 'LOCK'): (root / '.tmp-publish-busy').mkdir(); print(flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        ReleaseStore(store.root)
        assert (store.root / ".tmp-publish-busy").is_dir()
        other.communicate()
    ReleaseStore(store.root)
    assert not (store.root / ".tmp-publish-busy").exists()


def test_rollback_goes_to_the_nearest_ancestor_that_is_not_bad(
    store: ReleaseStore, model: Path
) -> None:
    publish_line(store, model, 4)
    store.mark_bad(3, "disappointed")
    assert store.previous().version == 2
    assert store.rollback().version == 2
    assert current_version(store) == 2
    assert store.rollback().version == 1
    with pytest.raises(ReleaseError, match="draft v1: there is no earlier release to go back to"):
        store.rollback()


def test_rollback_follows_parents_not_numbers(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 3)
    store.set_current(1)
    store.publish(model, parent=1, target_id=TARGET)
    assert store.rollback().version == 1


def test_bad_current_is_not_offered_even_before_the_pointer_moves(
    store: ReleaseStore, model: Path
) -> None:
    publish_line(store, model, 3)
    store.mark_bad(3, "alpha fell")
    assert current_version(ReleaseStore(store.root), TARGET) == 2
    for offer in (store.set_current, store.pin):
        with pytest.raises(ReleaseError, match="draft v3: not offered again: alpha fell"):
            offer(3)


def test_one_that_is_marked_bad_gives_way_to_its_parent(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 3)
    store.set_current(1)
    store.publish(model, parent=1, target_id=TARGET)
    store.mark_bad(4, "disappointed")
    assert current_version(store, TARGET) == current_version(store) == 1
    store.mark_bad(1, "damaged")
    assert store.bad() == {4: "disappointed", 1: "damaged"}
    assert current_version(store, TARGET) == 3, "the newest there is, rather than nothing"


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_version_that_was_lost_is_not_given_again(
    store: ReleaseStore, model: Path, is_bad: bool
) -> None:
    publish_line(store, model, 3)
    if is_bad:
        store.mark_bad(3, "disappointed")
        store.set_current(1)
    shutil.rmtree(store.root / "v000003")
    assert store.publish(model, parent=1, target_id=TARGET).version == 4


def test_a_line_ends_where_another_than_the_newest_is_chosen(
    store: ReleaseStore, model: Path
) -> None:
    def line() -> int:
        return ReleaseStore(store.root).line(TARGET)

    publish_line(store, model, 3)
    store.publish(model, parent=0, target_id="other")
    lines = [line()]
    for change in (
        store.rollback,
        lambda target=TARGET: store.set_current(3),
        lambda target=TARGET: store.pin(1),
        lambda target=TARGET: store.mark_bad(1, "damaged"),
    ):
        change(TARGET)
        lines.append(line())
    assert len({*lines}) == 5
    store.unpin()
    for same in (
        lambda: store.publish(model, parent=2, target_id=TARGET),
        lambda: store.set_current(5),
        lambda: store.pin(5),
        lambda: store.keep(2),
        store.unpin,
        lambda: store.publish(model, parent=4, target_id="other"),
        lambda: store.set_current(4),
    ):
        same()
        assert line() == lines[-1]


def test_a_target_began_with_its_first_release(store: ReleaseStore, model: Path) -> None:
    assert store.began_at(TARGET) == 0.0
    first, *_ = publish_line(store, model, 2)
    assert store.began_at(TARGET) == first.created_at
    assert store.began_at("other") == 0.0


def test_pin_serves_one_version_until_unpinned(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 3)
    store.pin(2)
    assert current_version(store) == 2
    assert ReleaseStore(store.root).pinned() == 2
    for change in (
        lambda: store.publish(model, parent=2, target_id=TARGET),
        lambda: store.set_current(3),
        store.rollback,
    ):
        with pytest.raises(ReleaseError, match="draft v2 is pinned; `osd drafts unpin`"):
            change()
    assert store.set_current(2).version == 2
    store.unpin()
    assert store.pinned() is None
    assert current_version(store) == 2
    assert store.publish(model, parent=2, target_id=TARGET).version == 4


def test_what_cannot_serve_for_a_full_disk_is_not_pinned(
    store: ReleaseStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be published any more, beside another draft that serves."""
    publish_line(store, model, 3)

    def refuse(pointer: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(store._directory, "write_pointer", refuse)
        with pytest.raises(ReleaseError, match="No space left"):
            store.pin(2)
    assert store.pinned() is None and current_version(store) == 3
    assert store.publish(model, parent=3, target_id=TARGET).version == 4


def test_another_target_starts_another_line(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 2)
    store.pin(2)
    assert store.current("other") is None
    assert store.pinned("other") is None
    assert store.publish(model, parent=0, target_id="other").version == 3, (
        "a pin of another target is no pin"
    )
    assert current_version(store, TARGET) == 2
    assert current_version(store, "other") == current_version(store) == 3
    with pytest.raises(ReleaseError, match="no earlier release"):
        store.previous("other")


def test_prune_keeps_what_may_be_needed(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 12)
    store.publish(model, parent=0, target_id="other")
    store.keep(3)
    store.pin(4)
    store.unpin()
    store.set_current(8)
    assert list(store.prune(keep=3, serving={5})) == [2, 4, 6, 9, 10]
    assert versions(store) == [1, 3, 5, 7, 8, 11, 12, 13]
    assert list(store.prune(keep=3, serving={5})) == []
    assert not list(store.root.glob(".tmp-*"))
    assert store.previous(TARGET).version == 7


def test_prune_keeps_the_pinned_one(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 6)
    store.pin(2)
    store.prune(keep=2, serving=set())
    assert versions(store) == [1, 2, 5, 6]


def test_rollback_over_a_pruned_parent(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 6)
    store.prune(keep=1, serving=set())
    assert versions(store) == [1, 5, 6]
    assert [store.rollback().version, store.rollback().version] == [5, 1]


def test_paused_and_kept_survive_a_restart(store: ReleaseStore, model: Path) -> None:
    publish_line(store, model, 3)
    assert not store.paused()
    store.set_paused(True)
    for version in (3, 1, 3):
        store.keep(version)
    store.mark_bad(2, "disappointed")
    store.pin(3)
    again = ReleaseStore(store.root)
    again.unpin()
    assert again.paused()
    assert again.kept() == (1, 3)
    assert again.bad() == {2: "disappointed"} and again.is_bad(2) and not again.is_bad(3)
    again.set_paused(False)
    assert not store.paused() and store.kept() == (1, 3)


def test_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ReleaseError, match="file/releases: Not a directory; give a directory"
    ) as caught:
        ReleaseStore(tmp_path / "file" / "releases")
    assert "\n" not in str(caught.value)


def test_full_disk_is_one_clear_line_and_changes_nothing(store: ReleaseStore, model: Path) -> None:
    """A file size limit stands for the full disk: both end a write half way."""
    publish_line(store, model, 1)
    make_model(model, b"x" * (1 << 20))
    program = (
        "import resource, signal, sys\n"
        "from osd.errors import ReleaseError\n"
        "from osd.releases.store import ReleaseStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: ReleaseStore(sys.argv[1]).publish(sys.argv[2], parent=1, target_id='9f2c')\n"
        "except ReleaseError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.root), str(model)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "releases cannot be stored: " in done.stdout and "File too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert current_version(store) == 1
    assert not list(store.root.glob(".tmp-*"))
