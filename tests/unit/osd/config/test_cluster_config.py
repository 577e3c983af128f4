"""`configs/cluster-*.yaml` are complete and valid by Ray's own schema, without a cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

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


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.name)
def test_it_starts_the_service_with_a_command_line_that_exists(path: Path) -> None:
    from osd.cli import app

    text = " ".join(yaml.safe_load(path.read_text())["head_start_ray_commands"])
    command = re.search(r"bin/osd (serve .*?)(?:;|&&|$)", text)
    assert command, "the head never starts the service"
    arguments = shlex.split(command.group(1))
    assert "--address" in arguments
    # Parsed by the real command line; it then stops at the first thing it cannot have here: the
    # models.
    arguments = [a for a in arguments if a != "--detach"] + ["serving.port=0", "control.port=0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert "no such directory" in str(result.exception), result.output


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.name)
def test_it_avoids_the_traps_of_local_clusters(path: Path) -> None:
    text = path.read_text()
    assert "--port=6380" in text  # 6379 is Redis's
    assert text.count("RAY_AUTH_MODE=token") == 3
    assert "~/.ray/auth_token" in text
    assert "RAY_UP_enable_autoscaler_v2=0" in text
