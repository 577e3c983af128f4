"""What the trainer's directory holds of each target, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.files import KEEP_TARGETS, directory_of


def use(root: Path, target_id: str, at: float) -> None:
    for part in ("checkpoints/12", "candidates/12", "curves"):
        (root / target_id / part).mkdir(parents=True)
    (root / target_id / "curves" / "loss").write_text("0.5")
    for part in ("checkpoints", "candidates"):
        os.utime(root / target_id / part, (at, at))


def parts_of(root: Path, target_id: str) -> set[str]:
    return {path.name for path in (root / target_id).iterdir()}


def test_of_targets_that_are_served_no_longer_those_served_last_stay(tmp_path: Path) -> None:
    targets = [f"target-{i}" for i in range(KEEP_TARGETS + 3)]
    for at, target_id in enumerate(targets):
        use(tmp_path, target_id, at)
    (tmp_path / "notes").write_text("of an operator")
    (tmp_path / "mine").mkdir()
    assert directory_of(tmp_path, "target-0") == tmp_path / "target-0"
    whole = {"checkpoints", "candidates", "curves"}
    assert parts_of(tmp_path, "target-0") == whole, "it is served again"
    for gone in targets[1:3]:
        assert parts_of(tmp_path, gone) == {"curves"}
        assert (tmp_path / gone / "curves" / "loss").read_text() == "0.5"
    for kept in targets[3:]:
        assert parts_of(tmp_path, kept) == whole
    assert (tmp_path / "notes").exists() and (tmp_path / "mine").exists()


def test_a_first_target_begins_with_nothing(tmp_path: Path) -> None:
    assert directory_of(tmp_path / "new", "target") == tmp_path / "new" / "target"
    assert list(tmp_path.iterdir()) == []
