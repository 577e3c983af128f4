"""A machine of a cluster: what is started, what is left alone, and what is ended."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from osd.config.schema import Config
from osd.errors import ConfigError, OSDError
from osd.service import host, note, ray_leader
from osd.service.note import Running

RAY = """#!/bin/sh
echo "$@" > "$FAKE_RAY/arguments"
env | grep RAY_ > "$FAKE_RAY/environment"
[ ! -e "$FAKE_RAY/broken" ] || { echo "ConnectionError: already running"; exit 1; }
"$FAKE_RAY/raylet" 1000 &
echo "Ray runtime started."
exec sleep 1000
"""
"""`ray start --block`, with a process that would outlive it."""


class Machine:
    """A machine whose Ray is a script, and the service another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.said, self.served = folder, list[str](), list[list[str]]()
        self.stopped: list[str] = []
        self.resources: list[str] = []
        self.services: list[Running] = []
        (folder / "bin").mkdir()
        (folder / "home").mkdir()
        (folder / "bin/ray").write_text(RAY)
        (folder / "bin/ray").chmod(0o700)
        (folder / "bin/python").symlink_to(Path(sys.executable).resolve())
        (folder / "raylet").symlink_to(shutil.which("sleep") or "")
        monkeypatch.setenv("FAKE_RAY", str(folder))
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.setenv("OSD_RUNTIME_DIR", str(folder / "run"))
        for name in ("RAY_AUTH_MODE", "RAY_enable_autoscaler_v2"):
            monkeypatch.setenv(name, "")
        monkeypatch.setattr(sys, "executable", str(folder / "bin/python"))
        self.missing = ""
        monkeypatch.setattr(host, "connected", lambda head: None)
        monkeypatch.setattr(host.plan, "check", self._check)
        monkeypatch.setattr(host, "serve_detached", self._serve)
        monkeypatch.setattr(host, "stop_service", self._stop)
        monkeypatch.setattr(note, "find_all", lambda: self.services)

    def _serve(self, config: Config, argv: list[str], report: host.Report) -> None:
        self.served.append(argv)
        self.services = [Running(config.deployment, 1, "http://a", "http://b", "token")]

    def _check(self, config: Config) -> None:
        if self.missing:
            raise ConfigError(self.missing)

    def _stop(self, deployment: str) -> str:
        self.stopped.append(deployment)
        self.services = []
        return deployment

    def head(self, *overrides: str, address: str = "10.0.0.1") -> None:
        host.start_head(address, None, overrides, self.resources, self.said.append)

    def worker(self, *resources: str, address: str = "10.0.0.2") -> None:
        host.start_worker("10.0.0.1", address, resources, self.said.append)

    @property
    def arguments(self) -> str:
        return (self.folder / "arguments").read_text()

    @property
    def ray(self) -> int:
        return int(json.loads((self.folder / "run/ray.state").read_text())["pid"])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    host.end_ray()


def members(group: int) -> list[int]:
    return [pid for pid in psutil.pids() if host._group_of(pid) == group and note.is_alive(pid)]


def wait_until(look: Any) -> None:
    deadline = time.monotonic() + 5
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_head_is_ray_and_the_service_on_it(machine: Machine) -> None:
    machine.head("serving.port=9000")
    for argument in ("start --block", "--head", "--port=6380", "--node-ip-address=10.0.0.1"):
        assert argument in machine.arguments
    assert "--autoscaling-config" not in machine.arguments
    environment = (machine.folder / "environment").read_text()
    for line in ("RAY_AUTH_MODE=token", "RAY_enable_autoscaler_v2=0", "RAY_worker_niceness=0"):
        assert line in environment
    assert machine.served == [["osd", "serve", "serving.port=9000", "ray.address=10.0.0.1:6380"]]
    token = machine.folder / "home/.ray/auth_token"
    assert len(token.read_text()) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600


def test_here_is_the_address_by_which_a_machine_reaches_the_network(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "network_address", lambda: "172.31.0.7")
    machine.head("ray.trainer_resource=train", address="here")
    assert "--node-ip-address=172.31.0.7" in machine.arguments
    given = ["ray.address=172.31.0.7:6380", "buffer.host=172.31.0.7"]
    assert machine.served == [["osd", "serve", "ray.trainer_resource=train", *given]]
    machine.head("ray.trainer_resource=train", address="172.31.0.7")
    assert machine.said[-1] == "nothing has changed: Ray and the service run on"
    machine.worker("train", address="here")
    assert "--address=10.0.0.1:6380" in machine.arguments
    assert "--node-ip-address=172.31.0.7" in machine.arguments


def test_a_machine_without_a_network_has_to_be_told_its_address(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "network_address", lambda: "127.0.0.1")
    for start in (machine.head, machine.worker):
        with pytest.raises(ConfigError, match="^here: this machine has no address but 127.0.0.1"):
            start(address="here")
    assert not (machine.folder / "arguments").exists()


@pytest.mark.parametrize("key", ["ray.trainer_resource", "ray.replica_resource"])
def test_parts_on_other_machines_reach_the_private_valkey(key: str, tmp_path: Path) -> None:
    """By the head's address, unless something else was said, wherever it was."""
    given = [f"{key}=there"]
    assert host.head_overrides("10.0.0.1", None, given, {})[1:] == [
        "ray.address=10.0.0.1:6380",
        "buffer.host=10.0.0.1",
    ]
    for said in ("buffer.host=10.0.0.9", "buffer.redis_url=redis://10.0.0.9", "buffer.host=::1"):
        name, _, value = said.partition("=")
        variable = "OSD_" + name.replace(".", "__").upper()
        path = tmp_path / "osd.yaml"
        path.write_text(f"{name.replace('.', ': {')}: '{value}'}}")
        for resolved in (
            host.head_overrides("10.0.0.1", None, [*given, said], {}),
            host.head_overrides("10.0.0.1", None, given, {variable: value}),
            host.head_overrides("10.0.0.1", path, given, {}),
        ):
            assert "buffer.host=10.0.0.1" not in resolved


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["ray.trainer_resource=there", "trainer.enabled=false"],
        ["ray.replica_resource=there", "serving.engines=attached", "buffer.port=6400"],
    ],
)
def test_a_service_of_one_machine_keeps_its_valkey_to_itself(given: list[str]) -> None:
    expected = [*given, "ray.address=10.0.0.1:6380"]
    assert host.head_overrides("10.0.0.1", None, given, {}) == expected


def test_the_autoscaler_is_told_of_the_cluster_that_ray_up_describes(machine: Machine) -> None:
    description = machine.folder / "home/ray_bootstrap_config.yaml"
    description.touch()
    machine.head()
    assert f"--autoscaling-config={description}" in machine.arguments


def test_the_same_again_changes_nothing(machine: Machine) -> None:
    machine.head("serving.port=9000")
    ray, token = machine.ray, (machine.folder / "home/.ray/auth_token").read_text()
    machine.head("serving.port=9000")
    assert machine.said[-1] == "nothing has changed: Ray and the service run on"
    assert machine.ray == ray and len(machine.served) == 1 and machine.stopped == []
    machine.head("serving.port=9001")
    assert machine.stopped == ["default"] and len(machine.served) == 2 and machine.ray != ray
    assert members(ray) == []
    assert (machine.folder / "home/.ray/auth_token").read_text() == token


def test_models_that_are_missing_end_nothing_that_serves(machine: Machine) -> None:
    machine.head()
    ray, machine.missing = machine.ray, "serving.target=/gone: no such directory"
    with pytest.raises(ConfigError, match="^serving.target=/gone: no such directory$"):
        machine.head("serving.target=/gone")
    assert machine.stopped == [] and machine.services and machine.ray == ray and members(ray)


@pytest.mark.parametrize("gone", ["ray", "service"])
def test_what_has_ended_is_started_again(machine: Machine, gone: str) -> None:
    machine.head()
    ray = machine.ray
    if gone == "ray":
        os.killpg(ray, 9)
        wait_until(lambda: not members(ray))
    else:
        machine.services = []
    machine.head()
    assert len(machine.served) == 2 and machine.ray != ray and members(ray) == []


def test_other_code_is_something_else(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = host.stamp_of("head")
    assert host.stamp_of("head") == before != host.stamp_of("worker")
    monkeypatch.setattr(host, "_sources", lambda: iter(["osd/cli.py print(2)"]))
    assert host.stamp_of("head") != before


def test_a_worker_joins_the_head_with_what_it_has(machine: Machine) -> None:
    host.make_token()
    machine.worker("train", "fast")
    for argument in ("--address=10.0.0.1:6380", '{"train": 1, "fast": 1}', "=10.0.0.2"):
        assert argument in machine.arguments
    ray = machine.ray
    machine.worker("train", "fast")
    assert machine.ray == ray and machine.said[-1] == "nothing has changed: Ray runs on"
    machine.worker("train")
    assert machine.ray != ray and members(ray) == []


def test_a_head_has_custom_resources_too(machine: Machine) -> None:
    machine.head()
    ray = machine.ray
    assert "--resources" not in machine.arguments
    machine.resources = ["serve=2", "train"]
    machine.head()
    assert '--resources={"serve": 2, "train": 1}' in machine.arguments and machine.ray != ray


@pytest.mark.parametrize("word", ["", "=2", "serve=", "serve=0", "serve=-1", "serve=many"])
def test_a_resource_is_a_name_and_a_number(machine: Machine, word: str) -> None:
    machine.resources = [word]
    for start in (machine.head, lambda: machine.worker(word)):
        with pytest.raises(ConfigError, match=f"^--resource {word}: not NAME, or NAME=N"):
            start()
    assert not (machine.folder / "arguments").exists()


def test_a_worker_without_the_token_says_where_it_should_come_from(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="cluster_synced_files"):
        machine.worker("train")
    assert not (machine.folder / "arguments").exists()


def test_a_ray_that_does_not_start_is_one_line(machine: Machine) -> None:
    (machine.folder / "broken").touch()
    with pytest.raises(OSDError, match="ray does not start on 10.0.0.1: ConnectionError: already"):
        machine.head()
    assert machine.served == [] and not (machine.folder / "run/ray.state").exists()


def test_what_outlives_ray_is_ended_with_it(machine: Machine) -> None:
    """As after `ray down`, which ends the head alone."""
    host.make_token()
    machine.worker("train")
    ray = machine.ray
    wait_until(lambda: len(members(ray)) == 3)
    os.kill(children_of(ray)[0], 15)
    wait_until(lambda: not members(ray))


def test_a_command_that_waits_on_after_ray_stop_is_ended(machine: Machine) -> None:
    """`ray stop` ends the raylet and its like, and `ray start --block` takes that for wanted."""
    machine.head()
    ray = machine.ray
    wait_until(lambda: len(members(ray)) == 3)
    time.sleep(2 * ray_leader.SECONDS_BETWEEN_LOOKS)
    (blocked,) = children_of(ray)
    (raylet,) = children_of(blocked)
    os.kill(raylet, 15)
    wait_until(lambda: not members(ray))


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def test_a_process_with_the_id_of_a_ray_that_ended_is_left_alone(machine: Machine) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        try:
            (machine.folder / "run").mkdir()
            state = {"pid": other.pid, "started_at": 1.7e9, "stamp": "5f3c"}
            (machine.folder / "run/ray.state").write_text(json.dumps(state))
            assert not host.is_running("5f3c")
            host.end_ray()
            assert other.poll() is None
        finally:
            other.kill()


def test_a_clock_that_is_set_hides_no_ray_that_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel has it: with the clock, the time moves at which the machine was started."""
    machine.head()
    ray = machine.ray
    real = psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: real[0]() + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real[1](process) + 3600)
    machine.head()
    assert machine.said[-1] == "nothing has changed: Ray and the service run on"
    machine.head("serving.port=9001")
    assert members(ray) == []


def test_a_ray_that_an_earlier_version_started_is_ended(machine: Machine) -> None:
    machine.head()
    ray, path = machine.ray, machine.folder / "run/ray.state"
    started_at = psutil.Process(ray).create_time()
    path.write_text(json.dumps({"pid": ray, "started_at": started_at, "stamp": "5f3c"}))
    machine.head()
    assert machine.ray != ray and members(ray) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_note_is_none(machine: Machine, text: str) -> None:
    (machine.folder / "run").mkdir()
    (machine.folder / "run/ray.state").write_text(text)
    assert not host.is_running("5f3c")
    host.end_ray()
