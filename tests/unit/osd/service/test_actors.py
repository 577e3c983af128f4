"""What actors do in processes of their own, beside building the plain parts there."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.models import resolve
from osd.service import actors
from osd.service.actors import (
    ReplicaActor,
    TrainerActor,
    awake_note,
    teacher_here,
)
from osd.service.fleet import room
from tests.support.tiny_drafts import chain_traces, save_draft
from trainer.eagle3.purges import Purges


@pytest.mark.parametrize(
    ("there", "resource", "num_gpus", "says"),
    [
        ({"CPU": 2.0}, "train", 0, "no machine of the Ray cluster has the resource 'train'"),
        ({"train": 1.0}, "train", 1, "trainer.num_gpus=1, and the Ray cluster has 0 GPUs"),
        ({"GPU": 1.0}, "", 2, "trainer.num_gpus=2, and the Ray cluster has 1 GPUs"),
    ],
)
def test_why_a_trainer_is_silent(
    there: dict[str, float], resource: str, num_gpus: float, says: str
) -> None:
    keys = "trainer_resource", "trainer.num_gpus"
    assert says in room.lacking(there, resource, num_gpus, *keys)
    assert room.lacking({"train": 1.0, "GPU": 2.0}, resource, num_gpus, *keys) == ""


def test_a_draft_that_failed_to_sleep_is_remembered_until_the_service_is_started_anew(
    tmp_path: Path,
) -> None:
    config = Config(data_dir=str(tmp_path))
    note = awake_note(config, "replica-0", is_restart=False)
    note.write_text("KeyError: 3")
    assert awake_note(config, "replica-0", is_restart=True) == note and note.exists()
    assert awake_note(config, "replica-1", is_restart=False) != note and note.exists()
    assert not awake_note(config, "replica-0", is_restart=False).exists()


@pytest.mark.parametrize("is_restart", [True, False])
def test_a_replica_that_is_restarted_finds_the_note_of_the_one_before(
    tmp_path: Path, is_restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def replica(config: Config, **more: Any) -> Any:
        given.update(more)
        return SimpleNamespace(wait_ready=None)

    monkeypatch.setattr(actors, "begin_log", lambda *_: None)
    monkeypatch.setattr(actors.cluster, "node_id", lambda: "head")
    monkeypatch.setattr(actors.server, "prepare_environment", lambda: None)
    monkeypatch.setattr(actors, "exit_when_failed", lambda wait_ready: None)
    monkeypatch.setattr(actors, "was_restarted", lambda: is_restart)
    monkeypatch.setattr("serving.replica.Replica", replica)
    note = tmp_path / "replica-0.awake"
    note.write_text("KeyError: 3")
    ReplicaActor(
        Config(data_dir=str(tmp_path)),
        name="replica-0",
        target_dir="/t",
        target_id="t",
        draft_release=None,
        redis_url="redis://127.0.0.1:1",
        log_dir=str(tmp_path),
        home="head",
    )
    assert given["awake_note"] == str(note) and note.exists() is is_restart


@pytest.mark.parametrize("step", ["limit_gpu_memory", "import", "teacher_here", "Trainer"])
def test_a_trainer_without_memory_for_any_step_of_its_start_is_started_again(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray never starts one again whose constructor raises."""

    class Module(ModuleType):
        """`trainer.loop`, whose import may need more memory than there is."""

        def __getattr__(self, name: str) -> Any:
            return no_room() if step == "import" else no_room

    class Exited(BaseException):
        pass

    def no_room(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    def exited(status: int) -> Any:
        raise Exited(status)

    monkeypatch.setattr(actors, "begin_log", lambda *_: None)
    monkeypatch.setattr(actors, "give_way", lambda config: None)
    monkeypatch.setattr(actors, "teacher_here", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "trainer.loop", Module("trainer.loop"))
    if hasattr(actors, step):
        monkeypatch.setattr(actors, step, no_room)
    again = partial(actors.started_again_when_out, pause_s=0.0)
    monkeypatch.setattr(actors, "started_again_when_out", again)
    monkeypatch.setattr(os, "_exit", exited)
    url = "redis://127.0.0.1:1"
    settings: dict[str, Any] = {"redis_url": url, "target_id": "t", "log_dir": str(tmp_path)}
    with pytest.raises(Exited, match="^1$"):
        TrainerActor(Config(data_dir=str(tmp_path)), is_head=False, **settings)


class Heard:
    """A trainer and its pace that remember what they were told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.num_purges = 0
        self.is_purged_meanwhile = False

    def begin(self) -> None:
        self.heard.append("begin")

    def run_round(self, base: str, on_step: Any = None, *, line: int = 0, size: int = 0) -> str:
        self.heard.append((base, on_step, line, size))
        self.num_purges += self.is_purged_meanwhile
        return "outcome"

    def num_new_traces(self) -> int:
        return 5

    def forget(self) -> None:
        self.heard.append("forget")

    def evaluate_releases(self, versions: list[str], num_traces: int) -> None:
        self.heard.append((versions, num_traces))

    def compare_earlier(self, base: str, earlier: list[str], num_traces: int) -> None:
        self.heard.append((base, earlier, num_traces))


class Here:
    """Where drafts are fetched to; a lost one cannot be."""

    def __call__(self, release: str) -> str:
        return f"{release} here"

    def those_of(self, releases: list[str]) -> list[str]:
        return [self(release) for release in releases if release != "lost"]


@pytest.fixture
def actor() -> TrainerActor:
    """On another machine than the store."""
    actor = TrainerActor.__new__(TrainerActor)
    heard = Heard()
    actor._trainer = actor._pace = heard  # type: ignore[assignment]
    actor._purges = Purges(lambda: heard.num_purges, heard.forget)
    actor._here = Here()  # type: ignore[assignment]
    return actor


def test_a_round_over_there_is_paced_and_told_what_it_needs(actor: TrainerActor) -> None:
    heard: Any = actor._trainer
    assert actor.run_round("base", 7, 9) == "outcome"  # type: ignore[arg-type, comparison-overlap]
    assert heard.heard == ["begin", ("base here", heard, 7, 9)]


def test_the_trainer_forgets_where_traces_were_purged(actor: TrainerActor) -> None:
    heard: Any = actor._trainer
    assert actor.num_new_traces() == 5 and heard.heard == []
    heard.num_purges = 1
    assert actor.num_new_traces() == 5 and heard.heard == ["forget"]
    heard.is_purged_meanwhile = True
    actor.run_round("base", 7, 9)  # type: ignore[arg-type]
    assert heard.heard[-1] == "forget", "the round went on with what it had read"


def test_a_trainer_that_begins_removes_what_old_targets_left(
    actor: TrainerActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(data_dir=str(tmp_path))
    for number in range(6):
        left = config.checkpoint_path / f"t{number}" / "checkpoints"
        left.mkdir(parents=True)
        os.utime(left, (number, number))
    given: list[Any] = []
    monkeypatch.setattr("trainer.loop.Trainer", lambda *arguments, **_: given.extend(arguments))
    actor._begin(config, "redis://127.0.0.1:1", "t0", False)
    assert given[4] == config.checkpoint_path / "t0"
    kept = {path.parent.name for path in config.checkpoint_path.glob("*/checkpoints")}
    assert kept == {"t0", "t3", "t4", "t5"}


def test_what_is_replayed_over_there_is_fetched_first(actor: TrainerActor) -> None:
    heard: Any = actor._trainer
    actor.evaluate_releases(["v1", "v2"], 9)  # type: ignore[list-item]
    actor.compare_earlier("v2", ["v1", "lost"], 16)  # type: ignore[arg-type, list-item]
    assert heard.heard == [(["v1 here", "v2 here"], 9), ("v2 here", ["v1 here"], 16)]


def test_the_trainers_target_is_the_one_that_serves_in_the_engines_type(tmp_path: Path) -> None:
    target = save_draft(tmp_path / "target", dtype=torch.bfloat16)
    serving = {"target": str(target), "vllm": {"dtype": "float32"}}
    settings = {"serving": serving, "capture": {"top_k": 4}}
    config = Config.model_validate(settings | {"trainer": {"sampling": "student"}})
    teacher = teacher_here(config, resolve.fingerprint(target))
    assert teacher is not None
    (row, *_) = teacher.label(chain_traces(1))
    assert row.target_ids.shape[1] == 4
    assert teacher.model.hf.dtype == torch.float32
    with pytest.raises(ConfigError, match="another model on"):
        teacher_here(config, "0123456789abcdef")
    served_alone = Config.model_validate(settings)
    assert teacher_here(served_alone, resolve.fingerprint(target)) is None
    assert teacher_here(served_alone, resolve.fingerprint(target), is_head=True) is not None
