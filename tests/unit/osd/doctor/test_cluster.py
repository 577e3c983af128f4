"""`osd cluster check`: a file that is right, and what is said where one is broken in one place."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from osd.cli import app
from osd.config import reading
from osd.doctor import cluster, cluster_file, cluster_hosts
from osd.doctor.checks import Check
from tests.support.filled_in import filled_in
from tests.support.paths import ROOT

CONFIGURATION = "serving: {target: /models/target, draft: /models/draft}\n"
LOCAL, AWS, GCP = (ROOT / f"configs/cluster-{name}.yaml" for name in ("local", "aws", "gcp"))
FILES = [LOCAL, AWS, GCP]
WORDS = {
    LOCAL: {"HEAD": "10.0.0.1", "WORKER": "10.0.0.2", "USER": "me"},
    AWS: {"REGION": "us-west-2", "IMAGE": "ami-0a1b2c3d"},
    GCP: {"PROJECT": "mine", "REGION": "us-central1", "ZONE": "us-central1-a", "IMAGE": "ubuntu"},
}


class Shipped:
    """A file that is shipped, filled in, with a key and a configuration that are there."""

    def __init__(self, folder: Path, file: Path = LOCAL) -> None:
        self.key, self.configuration, self.path = (
            folder / "key",
            folder / "osd.yaml",
            folder / "cluster.yaml",
        )
        self.key.touch(0o600)
        self.configuration.write_text(CONFIGURATION)
        words = WORDS[file] | {"KEY": self.key, "CONFIG": self.configuration}
        text = filled_in(file.read_text(), words)
        self.text = text.replace('"~/osd-checkout": "."', f'"~/osd-checkout": "{ROOT}"')

    def checked(self, **options: Any) -> list[Check]:
        self.path.write_text(self.text)
        return list(cluster.checks(cluster_file.read(self.path), options.pop("is_offline", True)))

    def broken(self) -> list[str]:
        return [f"{c.name}: {c.text}" for c in self.checked() if c.ok is False]


@pytest.fixture
def shipped(tmp_path: Path) -> Shipped:
    return Shipped(tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_what_is_shipped_is_right_when_it_is_filled_in(tmp_path: Path, file: Path) -> None:
    shipped = Shipped(tmp_path, file)
    assert shipped.broken() == []
    found = {check.name: check.text for check in shipped.checked()}
    assert found["configuration"] == "target /models/target, every key is known"
    head = "10.0.0.1" if file == LOCAL else "here"
    assert found["head"].startswith(f"osd cluster head {head} --config")
    assert found.get("node types") == (None if file == LOCAL else "head, trainer")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_each_word_that_is_not_filled_in_is_named_with_its_line(file: Path) -> None:
    result = CliRunner().invoke(app, ["cluster", "check", "--offline", str(file)])
    assert result.exit_code == 1
    (said,) = [line for line in result.output.splitlines() if line.startswith("NO  filled in")]
    wanted = {
        f"line {number}: fill in {word}"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for word in (*WORDS[file], "CONFIG", *(["KEY"] if file == LOCAL else []))
        if re.search(rf"(^|[^\w]){word}([^\w]|$)", line.partition("#")[0])
    }
    assert len(wanted) == {LOCAL: 7, AWS: 4, GCP: 6}[file]
    assert set(said.split("filled in", 1)[1].strip().split("; ")) == wanted


def test_the_machines_of_a_cloud_are_not_asked(tmp_path: Path) -> None:
    said = {check.name: check for check in Shipped(tmp_path, AWS).checked(is_offline=False)}
    assert (
        said["machines"].ok is None and said["machines"].text == "not asked: the cloud starts them"
    )


Change = Callable[[Shipped], None]


def replacing(old: str, new: str) -> Change:
    def change(shipped: Shipped) -> None:
        assert old in shipped.text
        shipped.text = shipped.text.replace(old, new)

    return change


def configured(text: str) -> Change:
    return lambda shipped: shipped.configuration.write_text(text) and None


EVERYWHERE = [
    (replacing("\nsetup_commands:", "\nsetup_comands:"), "setup_comands:", "schema: line {}: Addi"),
    (replacing("\nmax_workers: 1", "\nmax_workers: 0"), "max_workers: 0", "schema: line {}: "),
    (
        replacing("cluster_synced_files: [", "initialization_commands: [] #"),
        "",
        "token: the file: ",
    ),
    (replacing('["~/.ray/auth_token"]', "[]"), "cluster_synced", "token: line {}: the head wo"),
    (replacing('~/osd-checkout"', '~/osd"'), "file_mounts:", "file_mounts: line {}: process"),
    (lambda s: s.configuration.unlink(), "file_mounts:", "file_mounts: line {}: {config}: no"),
    (replacing("osd cluster worker", "ray start"), "worker_start_ray", "worker: line {}: no"),
    (
        replacing("osd cluster head", "ray start --head"),
        "head_start_ray",
        "head: line {}: no `osd cl",
    ),
    (replacing("--resource train", "--resource fast"), "worker_start", "--resource train, whi"),
    (configured("serving: {targt: x}"), "head_start_ray", "configuration: line {}: serving.targt"),
    (configured("serving: {"), "head_start_ray", "configuration: line {}: "),
    (configured("buffer: {host: 127.0.0.1}"), "head_start_ray", "reach buffer.host=127.0.0.1"),
    (configured("buffer: {redis_url: redis://localhost}"), "head_start_ray", "by an address that"),
    (replacing("serving.host=0.0.0.0", "serving.hots=0.0.0.0"), "head_start", "serving.hots"),
    (
        replacing("--resource train", "--resource 'train"),
        "worker_start",
        "worker: line {}: no `osd",
    ),
    (replacing("--config ~/osd.yaml", "--config ~/else.yaml"), "head_start", "is not carried"),
]
OF_LOCAL = [
    (replacing("ssh_private_key: ", "ssh_public_key: "), "auth:", "ssh_private_key is missing"),
    (lambda s: s.key.unlink(), "ssh_private_key", "ssh key: line {}: {key}: no such file"),
    (lambda s: s.key.chmod(0o644), "ssh_private_key", "line {}: {key} is open to others"),
]
OF_CLOUDS = [
    (
        replacing("    min_workers: 1", "    min_workers: 2"),
        "\nmax_workers: 1",
        "schema: line {}: T",
    ),
    (replacing("head_node_type: head", "head_node_type: haed"), "", "schema: "),
    (
        replacing("    resources: {GPU: 1, train", "    resorces: {GPU: 1, train"),
        "resorces",
        "schema: l",
    ),
    (replacing("{GPU: 1, train: 1}", "{GPU: 1}"), "resources: {GPU: 1}", "node types: line "),
    (
        replacing("{GPU: 1, train: 1}", "{GPU: 1}"),
        "",
        "asks for {{train: 1, GPU: 1}}, which type tra",
    ),
    (
        replacing("trainer.num_gpus=1", "trainer.num_gpus=2"),
        "train: 1",
        "node types: line {}: the con",
    ),
    (
        replacing("serving.num_gpus=1", "serving.num_gpus=2"),
        "{GPU: 1}",
        "{{GPU: 2}}, which type head",
    ),
    (
        replacing("ssh_user: ubuntu", "ssh_private_key: /nowhere/key"),
        "/nowhere",
        "line {}: /nowhere/key",
    ),
    (
        replacing("osd cluster head here", "osd cluster head"),
        "head_start",
        "configuration: line {}: ",
    ),
]


@pytest.mark.parametrize(
    ("file", "change", "at", "says"),
    [
        *((file, *case) for file in FILES for case in EVERYWHERE),
        *((LOCAL, *case) for case in OF_LOCAL),
        *((file, *case) for file in (AWS, GCP) for case in OF_CLOUDS),
    ],
)
def test_what_is_broken_is_named_with_its_line_and_remedy(
    tmp_path: Path, file: Path, change: Change, at: str, says: str
) -> None:
    shipped = Shipped(tmp_path, file)
    change(shipped)
    found = shipped.broken()
    line = shipped.text[: shipped.text.index(at)].count("\n") + 1 + at.count("\n") if at else ""
    wanted = says.format(line, key=shipped.key, config=shipped.configuration)
    assert any(wanted in text for text in found), found
    assert all("\n" not in text for text in found)


REPLICAS = "serving: {{target: /t, draft: /d, replicas: {}}}\nray: {{replica_resource: serve}}\n"


@pytest.mark.parametrize(
    ("num", "changes", "says"),
    [
        (2, {}, ""),
        ("{min: 2, max: 8}", {}, ""),
        (3, {}, "3 parts ask for the resource serve (ray.replica_resource), and the machines have"),
        (3, {"--resource serve serv": "--resource=serve=2 serv"}, ""),
        (2, {"--resource serve serv": "serv"}, "2 parts ask for the resource serve"),
        (2, {"--resource serve": ""}, "no machine is started with --resource serve, which ray.rep"),
        (2, {"--resource train": "", "resource=train": "resource=serve"}, "3 parts ask for the"),
        (2, {"--resource serve serv": "--resource serve=no serv"}, "--resource serve=no: not NAME"),
    ],
)
def test_a_cluster_has_a_unit_of_the_resource_for_each_engine(
    shipped: Shipped, num: object, changes: dict[str, str], says: str
) -> None:
    configured(REPLICAS.format(num))(shipped)
    for old, new in changes.items():
        replacing(old, new)(shipped)
    found = shipped.broken()
    assert len(found) == bool(says) and says in "".join(found), found


def test_gpus_that_a_type_does_not_mention_are_counted_by_ray(tmp_path: Path) -> None:
    shipped = Shipped(tmp_path, AWS)
    for old, new in (
        ("resources: {GPU: 1}", "resources: {}"),
        ("{GPU: 1, train: 1}", "{train: 1}"),
    ):
        replacing(old, new)(shipped)
    replacing("  head:\n", "  ray.head.default:\n")(shipped)
    replacing("head_node_type: head", "head_node_type: ray.head.default")(shipped)
    assert shipped.broken() == []


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_head_is_reached_by_others_wherever_it_is(tmp_path: Path, file: Path) -> None:
    """Nobody has to say `buffer.host`."""
    shipped = Shipped(tmp_path, file)
    shipped.path.write_text(shipped.text)
    config = cluster_file.head_configuration(cluster_file.read(shipped.path))
    assert config.buffer.host == ("10.0.0.1" if file == LOCAL else "here")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1\nb: 2", "line 2: no YAML"),
        ("- 1", "line 1: no YAML mapping; begin with configs/cluster-local.yaml"),
        ("", "not one YAML document; begin with configs/cluster-local.yaml"),
        ("a: 1\n---\nb: 1", "not one YAML document; begin with"),
        ("\0", "no YAML"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_file_of_a_cluster_is_one_line(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(app, ["cluster", "check", str(path)])
    assert result.exit_code != 0 and says in str(result.exception)


# -- the machines ---------------------------------------------------------------------------------

WELL = {
    "python": [3, 11],
    "programs": ["rsync", "make", "sh"],
    "disk": 50 << 30,
    "gpus": 1,
    "taken": [],
    "runs": False,
    "versions": {"ray": "2.60.0"},
    "fingerprint": "9f2c",
}


class Machines:
    """What each answers; a text is what ssh says instead."""

    def __init__(self, file: cluster_file.ClusterFile) -> None:
        self.file, self.answers = file, dict[str, Any]()
        self.asked: list[tuple[str, Any]] = []

    def ask(self, host: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append((host, json.loads(arguments[0])))
        answer = self.answers.get(host, WELL)
        if isinstance(answer, str):
            return subprocess.CompletedProcess([], 255, "", answer)
        return subprocess.CompletedProcess([], 0, json.dumps(answer), "")

    def broken(self) -> list[str]:
        checks = cluster.checks(self.file, False, self.ask)
        return [f"{c.name}: {c.text}" for c in checks if c.ok is False]


@pytest.fixture
def machines(shipped: Shipped) -> Machines:
    shipped.path.write_text(shipped.text)
    return Machines(cluster_file.read(shipped.path))


def test_all_machines_are_asked_and_the_head_for_its_ports(machines: Machines) -> None:
    assert machines.broken() == []
    ports = [6380, 8000, 8001]
    assert machines.asked == [
        ("10.0.0.1", [ports, "/models/target"]),
        ("10.0.0.2", [[], "/models/target"]),
    ]


@pytest.mark.parametrize("host", ["10.0.0.1", "10.0.0.2"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("Permission denied (publickey).", "cannot be asked by ssh (Permission denied"),
        ("", "cannot be asked by ssh (ssh lets nobody in, or it has no python3)"),
        ({"python": [3, 9]}, "python3 is 3.9; install 3.11, 3.12 or 3.13"),
        ({"python": [3, 14]}, "python3 is 3.14; install"),
        ({"programs": ["make"]}, "rsync is missing; install it"),
        ({"disk": 1 << 30, "versions": {}}, "1.0 GiB free in the home, 8.0 GiB needed"),
        ({"taken": [6380]}, "port 6380 is in use; end what uses it"),
        ({"versions": {"ray": "2.61.0"}}, "versions differ: 10.0.0.1: ray 2.6"),
        ({"fingerprint": "77aa"}, "target /models/target differ: 10.0.0.1: "),
    ],
)
def test_a_machine_that_lacks_something_is_named(
    machines: Machines, host: str, answer: Any, says: str
) -> None:
    machines.answers[host] = answer if isinstance(answer, str) else WELL | answer
    (found,) = machines.broken()
    assert says.format(host) in found
    key = "provider.head_ip" if host == "10.0.0.1" else "provider.worker_ips"
    assert (machines.file.at(key) in found) == ("differ" not in found)


def test_the_head_needs_the_target_and_others_may_train_without(machines: Machines) -> None:
    machines.answers["10.0.0.2"] = WELL | {"fingerprint": ""}
    assert machines.broken() == []
    said = [check.text for check in cluster.checks(machines.file, False, machines.ask)]
    assert "target /models/target equal on 10.0.0.1" in said
    machines.answers["10.0.0.1"] = WELL | {"fingerprint": ""}
    assert machines.broken() == ["target: /models/target is no directory on 10.0.0.1"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("serving.num_gpus=1", ""),
        ("serving.num_gpus=2", "serving.num_gpus=2, and 10.0.0.1 has 1; ask for no more"),
        ("serving.num_gpus=1 trainer.num_gpus=1", ""),
        ("trainer.num_gpus=2", "trainer.num_gpus=2, and 10.0.0.2 has 1; ask for no more"),
        ("trainer.num_gpus=2 trainer.enabled=false", ""),
    ],
)
def test_gpus_that_no_machine_has_are_named(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, overrides: str, says: str
) -> None:
    given = ["ray.trainer_resource=train", "ray.address=10.0.0.1:6380", "buffer.host=10.0.0.1"]
    given += overrides.split()
    config = reading.load(overrides=given, environ={}).config
    monkeypatch.setattr(cluster_file, "head_configuration", lambda file: config)
    assert machines.broken() == ([f"GPUs: {says}"] if says else [])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("serving.num_gpus=1", ""),
        ("serving.num_gpus=2", "GPUs: serving.num_gpus=2, and 10.0.0.1 or 10.0.0.2 has 1; ask for"),
        ("serving.num_gpus=1 trainer.num_gpus=2", "GPUs: trainer.num_gpus=2, and 10.0.0.1 has 1"),
    ],
)
def test_engines_on_other_machines_find_gpus_and_target_there(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, overrides: str, says: str
) -> None:
    given = ["ray.replica_resource=serve", "ray.address=10.0.0.1:6380", "buffer.host=10.0.0.1"]
    given += ["serving.target=/models/target", "serving.replicas=2", *overrides.split()]
    config = reading.load(overrides=given, environ={}).config
    monkeypatch.setattr(cluster_file, "head_configuration", lambda file: config)
    found = machines.broken()
    assert len(found) == bool(says) and says in "".join(found), found
    machines.answers["10.0.0.2"] = WELL | {"fingerprint": ""}
    assert "target: /models/target is no directory on 10.0.0.2" in machines.broken()


def test_without_a_machine_of_its_own_the_trainer_needs_gpus_of_the_head(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["serving.num_gpus=0.7", "trainer.num_gpus=0.5"]
    config = reading.load(overrides=given, environ={}).config
    monkeypatch.setattr(cluster_file, "head_configuration", lambda file: config)
    (found,) = machines.broken()
    assert found.startswith("GPUs: serving.num_gpus + trainer.num_gpus=1.2, and 10.0.0.1 has 1")


def test_ports_of_our_own_service_are_not_in_the_way(machines: Machines) -> None:
    machines.answers["10.0.0.1"] = WELL | {"taken": [6380, 8000], "runs": True}
    assert machines.broken() == []


def test_machines_that_are_not_set_up_are_not_compared(machines: Machines) -> None:
    machines.answers["10.0.0.2"] = WELL | {"versions": {}, "fingerprint": ""}
    assert machines.broken() == []


def test_without_ssh_it_is_said_of_this_machine_and_of_the_others(
    monkeypatch: pytest.MonkeyPatch, machines: Machines
) -> None:
    monkeypatch.setenv("PATH", "")
    broken = {c.name: c.text for c in cluster.checks(machines.file, False) if c.ok is False}
    assert broken["this machine"] == "ssh and rsync missing"
    for host in machines.file.hosts:
        assert broken[host].endswith("cannot be asked by ssh (no answer (FileNotFoundError))")


def test_a_target_with_an_apostrophe_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, machines: Machines, tmp_path: Path
) -> None:
    """A shell reads the command there."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = cluster_hosts.ssh(machines.file)("10.0.0.1", [json.dumps([[], "/data/o'brien/llama"])])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["taken"] == []


def test_the_look_at_a_machine_runs_with_nothing_but_python() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", json.dumps([[0], "/nowhere"])],
        input=cluster_hosts.LOOK,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.keys() == WELL.keys() and found["python"] == [*sys.version_info[:2]]
    assert found["disk"] > 0 and ("rsync" in found["programs"]) == bool(shutil.which("rsync"))


def test_a_file_that_is_broken_is_not_asked_about(machines: Machines) -> None:
    content = yaml.safe_load(machines.file.text) | {"cluster_synced_files": []}
    machines.file.path.write_text(yaml.safe_dump(content))
    machines.file = cluster_file.read(machines.file.path)
    assert len(machines.broken()) == 1 and machines.asked == []
