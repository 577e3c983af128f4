"""`configs/cluster-*.yaml` are complete and valid by Ray's own schema, without a cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from osd.config import reading
from tests.support.paths import ROOT

CLUSTERS = sorted((ROOT / "configs").glob("cluster-*.yaml"))


def prepared(path: Path, **changes: Any) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config({**yaml.safe_load(path.read_text()), **changes})
    validate_config(config)
    return config


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.name)
def test_ray_accepts_it(path: Path) -> None:
    config = prepared(path)
    assert config["cluster_name"] == "osd"
    assert config["available_node_types"]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.name)
def test_ray_would_refuse_a_misspelt_key(path: Path) -> None:
    from jsonschema import ValidationError

    with pytest.raises(ValidationError):
        prepared(path, setup_comands=[])


def command_of(path: Path, kind: str) -> list[str]:
    """The arguments of `osd cluster ...` in the commands that start one kind of machine."""
    (line,) = yaml.safe_load(path.read_text())[f"{kind}_start_ray_commands"]
    program, *arguments = shlex.split(line)
    assert program == f"~/{CHECKOUT}/.venv/bin/osd"
    return arguments


CHECKOUT = "osd-checkout"
"""Not `osd`: what Ray starts in the home would take that folder for the package."""


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", ["head", "worker"])
def test_it_starts_machines_with_a_command_line_that_exists(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osd.cli import app
    from osd.service import host

    started: list[Any] = []
    for name in ("start_head", "start_worker"):
        monkeypatch.setattr(host, name, lambda *given: started.append(given))
    result = CliRunner().invoke(app, command_of(path, kind))
    assert result.exit_code == 0, result.output
    ((*given, _),) = started
    if kind == "worker":
        resources = ["train", "serve"] if is_local(path) else ["train"]
        assert given == ["$RAY_HEAD_IP", "WORKER" if is_local(path) else "here", resources]
    else:
        address, config, overrides, resources = given
        assert resources == (["serve"] if is_local(path) else [])
        assert (address, str(config)) == ("HEAD" if is_local(path) else "here", "~/osd.yaml")
        resolved = reading.load(overrides=overrides, environ={}).config
        assert resolved.ray.trainer_resource == "train" and resolved.serving.host == "0.0.0.0"
        given = host.head_overrides("10.0.0.1", None, overrides, {})
        assert reading.load(overrides=given, environ={}).config.buffer.host == "10.0.0.1"


def is_local(path: Path) -> bool:
    return bool(yaml.safe_load(path.read_text())["provider"]["type"] == "local")


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.name)
def test_it_avoids_the_traps_of_clusters(path: Path) -> None:
    file = yaml.safe_load(path.read_text())
    assert file["file_mounts"][f"~/{CHECKOUT}"] == "."
    assert file["cluster_synced_files"] == ["~/.ray/auth_token"], "which the head draws"
    if is_local(path):
        assert file["auth"]["ssh_private_key"], "the head logs in on the worker"
    setup = " ".join(file["setup_commands"])
    assert f"PATH=~/{CHECKOUT}/.venv/bin:$PATH" in setup, "`ray down` runs `ray stop` there"


CLOUDS = [path for path in CLUSTERS if not is_local(path)]


@pytest.mark.parametrize("path", CLOUDS, ids=lambda p: p.name)
def test_a_cloud_starts_what_the_commands_ask_for(path: Path) -> None:
    config = prepared(path)
    assert config["head_node_type"] == "head" and config["max_workers"] == 1
    assert config["available_node_types"]["head"]["resources"] == {"GPU": 1}
    trainer = config["available_node_types"]["trainer"]
    assert trainer["resources"] == {"GPU": 1, "train": 1}
    assert (trainer["min_workers"], trainer["max_workers"]) == (1, 1)
    file = yaml.safe_load(path.read_text())
    setup = " ".join(file["setup_commands"])
    for needed in ("OSD_EXTRA=gpu make setup", "python3-venv", "python3-dev", "gcc", "make"):
        assert needed in setup
    (library,) = file["head_setup_commands"]
    assert {"aws": "boto3", "gcp": "google-api-python-client"}[file["provider"]["type"]] in library
    assert "This file is validated" in path.read_text() and "it was not run" in path.read_text()
