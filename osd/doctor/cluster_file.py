"""The file for `ray up`: what in it would keep the cluster from starting, by line.

YAML ──► Ray's own schema ──► words not filled in ──► key, token, folders ──► our commands and the
configuration they carry ──► machines of a cloud that have what it asks for
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd.config import reading
from osd.config.schema import Config
from osd.doctor.checks import Check
from osd.doctor.documents import BEGIN_WITH, Document, check_filled_in, documents_of
from osd.errors import ConfigError, OSDError
from osd.service.cluster import schema_problem
from osd.service.host import head_overrides, units_of
from osd.service.plan import asked_of_machines, check_remote_parts, remote_parts

TOKEN = "~/.ray/auth_token"
COMMANDS = {"head": "head_start_ray_commands", "worker": "worker_start_ray_commands"}


@dataclass(frozen=True, slots=True)
class ClusterFile(Document):
    """A file for `ray up`."""

    path: Path

    @property
    def is_local(self) -> bool:
        """Whether the machines are named in the file; else a cloud starts them."""
        return self.get("provider.type") == "local"

    @property
    def hosts(self) -> list[str]:
        """Addresses that are named, the head's first."""
        head = self.get("provider.head_ip")
        return [*([str(head)] if head else []), *self.texts("provider.worker_ips")]


def read(path: Path) -> ClusterFile:
    """Raises `ConfigError` with the line where the file is no YAML mapping."""
    documents = documents_of(path)
    if len(documents) != 1:
        raise ConfigError(f"{path}: not one YAML document; {BEGIN_WITH}")
    (one,) = documents
    lines = {key: line for key, line in one.lines.items() if key}
    return ClusterFile(one.text, one.content, lines, path)


def check_file(file: ClusterFile) -> Iterator[Check]:
    """What the file says by itself. A broken check may explain those after it."""
    if "provider" not in file.content:
        text = "no file for `ray up`, which has a provider; `osd doctor` checks a configuration"
        yield Check("schema", False, text)
        return
    problem = schema_problem(file.content)
    where = f"{file.at(_named(file, problem))}: " if _named(file, problem) else ""
    yield Check("schema", not problem, f"{where}{problem}" if problem else "Ray's own accepts it")
    filled_in = check_filled_in(file.text)
    yield filled_in
    if filled_in.ok and (file.is_local or file.get("auth.ssh_private_key")):
        yield _key(file)
    yield _token(file)
    yield from _mounts(file)


def check_commands(file: ClusterFile) -> Iterator[Check]:
    """Our commands that start the machines, and the configuration that the head serves by."""
    for kind, key in COMMANDS.items():
        command = _command(file, key, kind)
        if command is None:
            text = f"{file.at(key)}: no `osd cluster {kind}` in {key}"
            yield Check(kind, False, text)
            continue
        yield Check(kind, True, " ".join(["osd", *command]))
    if _command(file, COMMANDS["head"], "head") is None:
        return
    try:
        config = head_configuration(file)
        check_remote_parts(config)
        lacking = _lacking(file, config)
    except OSDError as error:
        yield Check("configuration", False, f"{file.at(COMMANDS['head'])}: {error}")
        return
    if lacking:
        yield Check("configuration", False, f"{file.at(COMMANDS['worker'])}: {lacking}")
        return
    yield Check("configuration", True, f"target {config.serving.target}, every key is known")
    if not file.is_local:
        yield from _node_types(file, config)


def _lacking(file: ClusterFile, config: Config) -> str:
    """Which custom resource the machines are not started with, or have too few units of; "" where
    all parts find theirs. Raises `ConfigError`."""
    of_head, of_worker = units_of_machine(file, "head"), units_of_machine(file, "worker")
    asked: Counter[str] = Counter()
    for key in remote_parts(config):
        name = getattr(config.ray, key)
        if name not in of_head | of_worker:
            return f"no machine is started with --resource {name}, which ray.{key} asks for"
        asked[name] += config.serving.replicas.min if key == "replica_resource" else 1
        there = of_head.get(name, 0) + of_worker.get(name, 0) * (len(file.hosts) - 1)
        if file.is_local and asked[name] > there:
            return (
                f"{asked[name]} parts ask for the resource {name} (ray.{key}), and the machines "
                f"have {there}; start more of them with it, or with --resource {name}=N"
            )
    return ""


def units_of_machine(file: ClusterFile, kind: str) -> dict[str, int]:
    """Custom resource -> units of it that each head or worker is started with. Raises
    `ConfigError`."""
    words = _command(file, COMMANDS[kind], kind) or []
    return units_of(_take_option(words, "--resource"))


def _node_types(file: ClusterFile, config: Config) -> Iterator[Check]:
    """Whether some type of machine has what is asked for. Ray would wait for it for ever."""
    types, head = file.mapping("available_node_types"), file.get("head_node_type")
    broken = False
    for resource, num_gpus in asked_of_machines(config).items():
        asked = ({resource: 1} if resource else {}) | ({"GPU": num_gpus} if num_gpus else {})
        among = [name for name in types if (name != head) == bool(resource)]
        if any(_offers(types[name], asked) for name in among):
            continue
        broken = True
        where = file.at(f"available_node_types.{(among or [''])[0]}.resources")
        needed = ", ".join(f"{name}: {num:g}" for name, num in asked.items())
        who = f"type {' or '.join(map(str, among))} has not" if among else "no type has"
        text = (
            f"{where}: the configuration asks for {{{needed}}}, which {who}; offer it or ask less"
        )
        yield Check("node types", False, text)
    if not broken:
        yield Check("node types", True, ", ".join(map(str, types)))


def _offers(machine: Any, asked: Mapping[str, float]) -> bool:
    """Whether a type of machine has all that is asked for. GPUs that it does not mention are
    counted by Ray itself, where the cloud says how many there are."""
    has = machine.get("resources") or {} if isinstance(machine, dict) else {}
    return all(has.get(name, num if name == "GPU" else 0) >= num for name, num in asked.items())


def head_configuration(file: ClusterFile) -> Config:
    """What the head would serve by: the file that is carried to it, and the command's overrides.
    Raises `ConfigError` where either is wrong."""
    arguments, config = _command(file, COMMANDS["head"], "head") or [], None
    for given in (_take_option(arguments, "--config"), _take_option(arguments, "-c")):
        config = given[-1] if given else config
    _take_option(arguments, "--resource")
    carried = file.mapping("file_mounts").get(config) if config else None
    if len(arguments) < 3 or "=" in arguments[2]:
        raise ConfigError("osd cluster head: no address; give one, or `here`")
    address, overrides = arguments[2], arguments[3:]
    if config and not carried:
        raise ConfigError(f"{config} is not carried to the head; name it under file_mounts")
    path = Path(str(carried)).expanduser() if carried else None
    return reading.load(path, head_overrides(address, path, overrides, {}), environ={}).config


def _take_option(words: list[str], option: str) -> list[str]:
    """The values of an option, which are taken out of the words."""
    values: list[str] = []
    for at in reversed(range(len(words))):
        name, is_joined, value = words[at].partition("=")
        if name == option and is_joined:
            values.append(value)
            del words[at]
        elif words[at] == option:
            values += words[at + 1 : at + 2]
            del words[at : at + 2]
    return values[::-1]


def _command(file: ClusterFile, key: str, kind: str) -> list[str] | None:
    """The arguments of `osd cluster KIND` among the commands of a key; None where it is missing."""
    for line in file.texts(key):
        try:
            words = shlex.split(line)
        except ValueError:  # a quotation that does not end
            continue
        for at, word in enumerate(words):
            if Path(word).name == "osd" and words[at + 1 : at + 3] == ["cluster", kind]:
                return words[at + 1 :]
    return None


def _named(file: ClusterFile, problem: str) -> str:
    """The key that a message of Ray's schema quotes, as far as the file has it."""
    for word in re.findall(r"['`]([\w.]+)['`]", problem):
        for key in file.lines:
            if key == word or key.endswith(f".{word}"):
                return key
    return ""


def _key(file: ClusterFile) -> Check:
    named = file.get("auth.ssh_private_key")
    where = file.at("auth.ssh_private_key")
    if not named:
        text = f"{where}: auth.ssh_private_key is missing, so the head could not reach the worker"
        return Check("ssh key", False, text)
    path = Path(str(named)).expanduser()
    if not path.is_file():
        return Check("ssh key", False, f"{where}: {named}: no such file")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return Check("ssh key", False, f"{where}: {named} is open to others; chmod 600 {named}")
    return Check("ssh key", True, str(named))


def _token(file: ClusterFile) -> Check:
    if TOKEN in (*file.texts("cluster_synced_files"), *file.mapping("file_mounts")):
        return Check("token", True, f"{TOKEN} reaches the workers")
    where = file.at("cluster_synced_files")
    text = f"{where}: the head would not let the workers in; add {TOKEN} to cluster_synced_files"
    return Check("token", False, text)


def _mounts(file: ClusterFile) -> Iterator[Check]:
    for target, source in file.mapping("file_mounts").items():
        where = file.at("file_mounts")
        if target.rstrip("/") == "~/osd":
            text = f"{where}: processes in the home would take ~/osd for the package; rename it"
            yield Check("file_mounts", False, text)
        elif not Path(os.path.expanduser(str(source))).exists():
            yield Check("file_mounts", False, f"{where}: {source}: no such file or folder")
