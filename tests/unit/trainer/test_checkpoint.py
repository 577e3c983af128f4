"""The trainer's state on disk: what is restored, from which checkpoint, whatever was damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from osd.errors import OSDError
from tests.support.tiny_drafts import chain_traces, files_of_at_most, tiny_llama, write_over
from tests.support.tiny_rounds import config
from trainer import adapter
from trainer.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from trainer.distiller import Distiller
from trainer.draft import RowModel
from trainer.optimizer import moments_of
from trainer.replay import ReplayState


def state_of(round: int) -> TrainerState:
    """No field as it is by default."""
    return TrainerState(
        draft="math",
        target_id="target-z",
        round=round,
        base_version=7,
        line=2,
        candidate_sha256="ab12",
        cursor={"": 12, "sql": 3},
        replay=ReplayState(past=[{}, {"": 5}], num_offered=9, places=[0, 1]),
        rate_scale=0.25,
    )


def distiller_after_a_step(method: str = "full") -> Distiller:
    distiller = Distiller(RowModel(tiny_llama(scale=0.3, vocab_size=64)), config(method=method))
    assert distiller.step(distiller.collate(chain_traces(1)), 0) is not None
    return distiller


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounds 9 and 10."""
    directory = tmp_path_factory.mktemp("checkpoints")
    distiller = distiller_after_a_step()
    for round in (9, 10):
        save_checkpoint(directory, state_of(round), distiller)
    return directory


@pytest.fixture
def copied(tmp_path: Path, saved: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copied")


def round_of(directory: Path) -> int | None:
    found = load_checkpoint(directory)
    return None if found is None else found.state.round


@pytest.mark.parametrize("method", ["full", "lora"])
def test_all_that_was_saved_comes_back(tmp_path: Path, method: str) -> None:
    distiller = distiller_after_a_step(method)
    hf = distiller.model.hf
    save_checkpoint(tmp_path, state_of(3), distiller)
    found = load_checkpoint(tmp_path)
    assert found is not None and found.state == state_of(3)
    for got, expected in (
        (found.model.hf.state_dict(), adapter.below(hf)),
        (found.moments, moments_of(distiller.optimizer)),
        (found.adapters, adapter.adapters(hf)),
    ):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert bool(found.adapters) is (method == "lora")
    assert found.moments


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_was_read_does_not_depend_on_the_files_any_more(tmp_path: Path, method: str) -> None:
    """Another machine may share them: a mapped file that it removes or cuts short ends this
    process with the next look at a tensor."""
    distiller = distiller_after_a_step(method)
    average = {"w": torch.arange(9000.0)}
    save_checkpoint(tmp_path, state_of(3), distiller, average)
    found = load_checkpoint(tmp_path)
    assert found is not None
    write_over(tmp_path)
    for got, expected in (
        (found.model.hf.state_dict(), adapter.below(distiller.model.hf)),
        (found.moments, moments_of(distiller.optimizer)),
        (found.adapters, adapter.adapters(distiller.model.hf)),
        (found.average, average),
    ):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


FILES = [
    "state.json",
    "model.safetensors",
    "config.json",
    "adapter.safetensors",
    "optimizer.safetensors",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [b"torn", None], ids=["torn", "gone"])
def test_a_damaged_one_means_the_one_before(
    copied: Path, name: str, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    broken = copied / "10" / name
    broken.unlink() if damage is None else broken.write_bytes(damage)
    assert round_of(copied) == 9
    assert f"checkpoint {copied / '10'} cannot be used" in caplog.text


def test_where_all_are_damaged_there_is_none(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for round in (9, 10):
        (copied / str(round) / "state.json").write_bytes(b'{"draft": "math"}')
    assert load_checkpoint(copied) is None
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "pointer, expected", [(b"10", 10), (b"9", 9), (b"11", 10), (b"8", None), (b"ten", None)]
)
def test_what_is_newer_than_the_pointer_was_never_finished(
    copied: Path, pointer: bytes, expected: int | None
) -> None:
    (copied / "latest").write_bytes(pointer)
    assert round_of(copied) == expected


def test_before_the_first_there_is_none(tmp_path: Path, copied: Path) -> None:
    assert load_checkpoint(tmp_path / "nothing") is None
    (copied / "latest").unlink()
    assert load_checkpoint(copied) is None


def test_a_full_disk_leaves_the_last_one(copied: Path) -> None:
    with (
        files_of_at_most(10_000),
        pytest.raises(OSDError, match="11: cannot be written .*free space"),
    ):
        save_checkpoint(copied, state_of(11), distiller_after_a_step())
    assert sorted(path.name for path in copied.iterdir()) == ["10", "9", "latest"]
    assert round_of(copied) == 10


def test_the_pointer_comes_last_and_only_then_the_oldest_goes(copied: Path) -> None:
    (copied / "latest").unlink()
    (copied / "latest").mkdir()  # it cannot be replaced
    (copied / "latest" / "in the way").touch()
    with pytest.raises(OSDError, match="latest: cannot be written"):
        save_checkpoint(copied, state_of(11), distiller_after_a_step())
    shutil.rmtree(copied / "latest")
    (copied / "latest").write_text("10")
    assert sorted(path.name for path in copied.iterdir() if path.name.isdigit()) == [
        "10",
        "11",
        "9",
    ]
    assert round_of(copied) == 10
    save_checkpoint(copied, state_of(11), distiller_after_a_step())
    assert sorted(path.name for path in copied.iterdir()) == ["10", "11", "latest"], (
        "two, and nothing half-written"
    )
    assert round_of(copied) == 11
