"""Memory that runs out in a round: told with what needs less, and nothing of the round is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osd.errors import OSDError
from osd.records import DraftRelease
from tests.support.starving import MemoryFor
from tests.support.tiny_drafts import TARGET_ID, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import GATE, buffer_with, config, same_weights, trainer_at
from trainer import draft
from trainer.distiller import needing_less
from trainer.loop import Trainer
from trainer.sampling.teacher import Teacher

REMEDY = "lower trainer.batch_size=8, lower trainer.max_length=64 or use trainer.method=lora"


@pytest.fixture
def base(tmp_path: Path) -> DraftRelease:
    return release_of(save_draft(tmp_path / "base"))


@pytest.mark.parametrize("num", [0, 40, 2000], ids=["at once", "early", "in a step"])
def test_it_is_told_and_the_next_round_is_as_if_it_had_not_been(
    tmp_path: Path, base: DraftRelease, num: int
) -> None:
    trainer = trainer_at(tmp_path / "t", buffer_with(*chain_traces(24)))
    with pytest.raises(OSDError) as caught, MemoryFor(num):
        trainer.run_round(base)
    assert str(caught.value) == (
        f"memory runs out (OutOfMemoryError: pretended: out of memory); {REMEDY}"
    )
    assert trainer.num_new_traces() == 24
    unharmed = trainer_at(tmp_path / "u", buffer_with(*chain_traces(24))).run_round(base)
    assert same_weights(trainer.run_round(base).path, unharmed.path)


@pytest.mark.parametrize("num", [3, 200], ids=["at once", "later"])
def test_it_may_run_out_again_on_the_way_back_to_the_checkpoint(
    tmp_path: Path, base: DraftRelease, num: int
) -> None:
    """The trainer's rounds and its cursor would be lost, or half a round be gone on from."""

    def second_round(name: str, *room: int) -> str:
        """The candidate of the second round, which is tried with so much room first."""
        buffer = buffer_with(*chain_traces(8))
        trainer = trainer_at(tmp_path / name, buffer, replay_batches=0)
        trainer.run_round(base)
        buffer.put(chain_traces(8, start=8))
        for num in room:
            with pytest.raises(OSDError, match="^memory runs out"), MemoryFor(num):
                trainer.run_round(base)
            assert trainer.num_new_traces() == 8
        return trainer.run_round(base).path

    unharmed, path = second_round("unharmed"), second_round("starved", 40, num)
    assert Path(path).name == Path(unharmed).name == "2"
    assert same_weights(path, unharmed)


def test_it_is_told_of_a_replay_too(tmp_path: Path, base: DraftRelease) -> None:
    trainer = trainer_at(tmp_path, buffer_with(*chain_traces(8, holdout=True)))
    assert trainer.evaluate_releases([base], 8)
    told = pytest.raises(OSDError, match="^memory runs out .*; lower trainer.batch_size")
    with told, MemoryFor(5):
        trainer.evaluate_releases([base], 8)


def test_a_checkpoint_that_memory_does_not_hold_is_not_given_up(
    tmp_path: Path, base: DraftRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one, or none, would be taken in its place."""
    buffer = buffer_with(*chain_traces(24))
    path = trainer_at(tmp_path / "t", buffer).run_round(base).path

    def no_room(path: Path) -> Any:
        raise RuntimeError(f"unable to mmap 8 bytes from <{path}>: Cannot allocate memory (12)")

    with monkeypatch.context() as patch:
        patch.setattr(draft, "checkpoint_tensors", no_room)
        with pytest.raises(RuntimeError, match="^unable to mmap"):
            trainer_at(tmp_path / "t", buffer)
    with pytest.raises(RuntimeError, match="pretended"), MemoryFor(3):
        trainer_at(tmp_path / "t", buffer)
    assert trainer_at(tmp_path / "t", buffer).num_new_traces() == 0
    assert Path(path).is_dir()


def test_what_needs_less_is_what_there_is_to_lower() -> None:
    assert needing_less(config()) == REMEDY
    assert needing_less(config(method="lora", batch_size=1)) == "lower trainer.max_length=64"
    rounds = "lower trainer.batch_size=8, lower trainer.max_length=64"
    head = config(method="lora", feature_cache_bytes=4096)
    assert needing_less(head, has_teacher=True) == (
        f"{rounds}, lower trainer.feature_cache_bytes=4096 or set trainer.target_memory_bytes"
    )
    uncached = config(method="lora", feature_cache_bytes=0, target_memory_bytes=9999)
    assert needing_less(uncached, has_teacher=True) == (
        f"{rounds} or lower trainer.target_memory_bytes=9999"
    )


@pytest.mark.parametrize("sampling", ["mixed", "student"])
def test_a_draft_model_that_asks_the_target_has_no_features(
    tmp_path: Path, base: DraftRelease, sampling: str
) -> None:
    buffer, teacher = buffer_with(*chain_traces(8)), Teacher(Path(base.path), top_k=4)
    trainer = Trainer(
        config(sampling=sampling), GATE, 4, buffer, tmp_path / "t", TARGET_ID, teacher=teacher
    )
    remedy = REMEDY.replace(" or use", ", use") + " or set trainer.target_memory_bytes"
    with pytest.raises(OSDError) as caught, MemoryFor(0):
        trainer.run_round(base)
    assert str(caught.value).endswith(f"; {remedy}")
