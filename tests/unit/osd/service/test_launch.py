"""What keeps a service from starting is reported before anything waits for it."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from osd.common.memory import FIRST
from osd.config import reading
from osd.config.schema import Config
from osd.errors import ConfigError
from osd.service.cluster import check_gpus
from osd.service.launch import Service
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("overrides", "num", "says"),
    [
        ([], 0, ""),
        (["serving.num_gpus=1"], 1, ""),
        (["serving.num_gpus=0.7", "trainer.num_gpus=0.3"], 1, ""),
        (["serving.num_gpus=1"], 0, "serving.num_gpus=1: Ray finds 0 GPUs"),
        (
            ["serving.num_gpus=1", "trainer.num_gpus=1"],
            1,
            "serving.num_gpus=1, trainer.num_gpus=1: Ray finds 1 GPUs",
        ),
        (["serving.num_gpus=1", "serving.replicas=3"], 3, ""),
        (
            ["serving.num_gpus=1", "serving.replicas=3"],
            2,
            "serving.num_gpus=1 for each of 3 replicas: Ray finds 2 GPUs",
        ),
        (["trainer.num_gpus=1"], 0, "trainer.num_gpus=1: Ray finds 0 GPUs"),
        (["trainer.num_gpus=1", "trainer.enabled=false"], 0, ""),
    ],
)
def test_more_gpus_than_there_are_are_refused(overrides: list[str], num: int, says: str) -> None:
    config = reading.load(overrides=overrides, environ={}).config
    if not says:
        return check_gpus(config, num)
    with pytest.raises(ConfigError, match=says):
        check_gpus(config, num)


class FakeRay:
    """Keeps what it was started with, and what its environment said then."""

    def init(self, **options: Any) -> None:
        self.options, self.environ = options, dict(os.environ)

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def available_resources(self) -> dict[str, float]:
        return {}

    def nodes(self) -> list[dict[str, Any]]:
        where = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 7000}
        return [{"NodeID": "one", "Alive": True, **where}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="127.0.0.1:6380", get_node_id=lambda: "one")

    def shutdown(self) -> None:
        pass


class Begun(Service):
    """A service of which nothing is there yet."""

    def __init__(self, config: Config) -> None:
        self.config, self._stack, self._report = config, ExitStack(), lambda text: None
        self.url, self._actors, self.trainer, self.engines = "", [], None, None


RAY_VARIABLES = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_worker_niceness",
    "RAY_memory_monitor_refresh_ms",
    "RAY_worker_oom_score_adjustment",
)

HOW_WORKERS_RUN = RAY_VARIABLES[-4:]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    for name in RAY_VARIABLES:
        monkeypatch.setenv(name, "as it was")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "ray", ray := FakeRay())
    return ray


def started(ray: FakeRay, *overrides: str) -> dict[str, str]:
    """What Ray found of its variables."""
    service = Begun(reading.load(overrides=list(overrides), environ={}).config)
    service._start_ray()
    service.stop()
    return {name: value for name, value in ray.environ.items() if name in RAY_VARIABLES}


def test_a_private_ray_lets_in_only_who_has_its_token(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens on all addresses, and runs what it is told to."""
    found = started(ray)
    token = found["RAY_AUTH_TOKEN"]
    assert found["RAY_AUTH_MODE"] == "token" and len(token) == 32 and len(set(token)) > 4
    assert ray.options["address"] == "local" and ray.options["include_dashboard"] is False
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    assert started(ray)["RAY_AUTH_TOKEN"] != token, "drawn anew"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    assert started(ray)["RAY_AUTH_TOKEN"] == "mine"


def test_where_memory_runs_out_ray_ends_no_engine_and_the_kernel_the_trainer(ray: FakeRay) -> None:
    """Of processes that count alike, the kernel ends the largest: the engine."""
    found = started(ray)
    assert found["RAY_memory_monitor_refresh_ms"] == "0"
    lead = int(FIRST) - int(found["RAY_worker_oom_score_adjustment"])
    assert lead == 1000, "as much as all memory counts, so that no engine is large enough"


def test_a_ray_on_kubernetes_is_started_alike(ray: FakeRay) -> None:
    ours = {name: value for name, value in started(ray).items() if name in HOW_WORKERS_RUN}
    assert len(ours) == len(HOW_WORKERS_RUN)
    (cluster,) = [
        one
        for one in yaml.safe_load_all((ROOT / "configs/kuberay.yaml").read_text())
        if one["kind"] == "RayJob"
    ]
    spec = cluster["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert ours.items() <= given.items()


def test_a_cluster_of_others_has_its_own_ways_to_let_somebody_in(ray: FakeRay) -> None:
    found = started(ray, "ray.address=ray://head:10001", "deployment=blue")
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(found)
    assert (ray.options["address"], ray.options["namespace"]) == ("ray://head:10001", "osd-blue")
    assert "include_dashboard" not in ray.options and "_temp_dir" not in ray.options
