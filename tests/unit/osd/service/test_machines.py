"""Parts of a service on several machines: what they fetch from one another, and how each finds its
own."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.common.model_directory import digests
from osd.config.schema import Config
from osd.errors import ConfigError, ReleaseError
from osd.exchange.transfer import DraftsHere
from osd.models.resolve import fingerprint
from osd.releases.store import ReleaseStore
from osd.service import actors
from osd.service import remote as remote_module
from osd.service.actors import ControlActor, ReplicaActor
from osd.service.remote import RemoteTrainer
from tests.unit.osd.releases.test_store import TARGET, make_model, make_outcome
from trainer.loop import Trainer


class Beside:
    """Actors of this process, called by name as Ray's would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
        self.calls: list[str] = []
        self._parts = parts
        monkeypatch.setattr(actors.cluster, "call", self.call)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        self.calls.append(f"{name}.{method}")
        return getattr(self._parts[name], method)(*arguments)


@pytest.fixture
def control(tmp_path: Path) -> ControlActor:
    control = ControlActor.__new__(ControlActor)
    control._releases = ReleaseStore(tmp_path / "head/releases")
    return control


def test_a_release_comes_from_the_control_actor(
    control: ControlActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    release = control._releases.publish(model, parent=0, target_id=TARGET)
    beside = Beside(monkeypatch, control=control)
    here = actors.drafts_here(Config(data_dir=str(tmp_path / "worker")))
    found = here(replace(release, path="/nowhere/v000001"))
    assert digests(Path(found.path)) == release.files
    assert Path(found.path).is_relative_to(tmp_path / "worker")
    assert set(beside.calls) == {"control.read_release"}
    with pytest.raises(ReleaseError, match="draft v7: no such release"):
        here(replace(release, version=7, path="/nowhere", files={"x": "ab"}))
    lost = replace(release, version=7, path="/nowhere", files={"x": "ab"})
    there = replace(release, path="/nowhere/v000001")
    assert [one.version for one in here.those_of([lost, there])] == [1]


async def test_a_candidate_comes_from_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = Trainer.__new__(Trainer)
    trainer._candidates = tmp_path / "worker/candidates"
    candidate = make_model(tmp_path / "worker/candidates/3", b"candidate")
    outcome = replace(make_outcome(), path=str(candidate), files=digests(candidate))
    beside = Beside(monkeypatch, trainer=trainer)
    remote = RemoteTrainer(None, Config(data_dir=str(tmp_path / "head")))
    assert await remote.candidate(outcome) == str(candidate) and beside.calls == []
    monkeypatch.setattr(remote_module, "are_files", lambda *_: False)  # not on this machine
    found = Path(await remote.candidate(outcome))
    assert digests(found) == outcome.files and found.is_relative_to(tmp_path / "head")
    assert set(beside.calls) == {"trainer.read_candidate"}


@pytest.mark.parametrize("path", ["/etc", "{}/..", "{}"])
def test_a_trainer_gives_away_nothing_but_its_candidates(tmp_path: Path, path: str) -> None:
    trainer: Any = Trainer.__new__(Trainer)
    trainer._candidates = tmp_path
    with pytest.raises(ReleaseError, match="no candidate of this trainer"):
        trainer.read_candidate(path.format(tmp_path), {"passwd": "ab"}, "passwd", 0, 9)


def test_another_target_of_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_model(tmp_path / "target")
    config = Config.model_validate({"serving": {"target": str(target)}})
    assert actors.target_here(config, fingerprint(target)) == target
    with pytest.raises(ConfigError, match=r"serving.target=.*: another model on .*copy that"):
        actors.target_here(config, "0123456789abcdef")
    gone = Config.model_validate({"serving": {"target": str(target / "gone")}})
    with pytest.raises(ConfigError, match=f"^on {socket.gethostname()}: serving.target=.*gone: no"):
        actors.target_here(gone, "0123456789abcdef")


@pytest.mark.parametrize(("node", "is_home"), [("head", True), ("other", False)])
def test_a_replica_on_another_machine_finds_its_own_target_and_fetches_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, is_home: bool
) -> None:
    given: dict[str, Any] = {}

    def replica(config: Config, **more: Any) -> Any:
        given.update(more)
        return SimpleNamespace(wait_ready=None)

    monkeypatch.setattr(actors, "begin_log", lambda *_: None)
    monkeypatch.setattr(actors.cluster, "node_id", lambda: node)
    monkeypatch.setattr(actors.server, "prepare_environment", lambda: None)
    monkeypatch.setattr(actors, "exit_when_failed", lambda wait_ready: None)
    monkeypatch.setattr(actors, "was_restarted", lambda: False)
    monkeypatch.setattr("serving.replica.Replica", replica)
    target = make_model(tmp_path / "target")
    ReplicaActor(
        Config.model_validate(
            {"data_dir": str(tmp_path / "data"), "serving": {"target": str(target)}}
        ),
        name="replica-0",
        target_dir="/of/the/head",
        target_id=fingerprint(target),
        draft_release=None,
        redis_url="redis://127.0.0.1:1",
        log_dir=str(tmp_path),
        home="head",
    )
    assert given["target_dir"] == ("/of/the/head" if is_home else str(target))
    assert isinstance(given["here"], DraftsHere) is not is_home
