"""The file for `ray up`: what in it would keep the cluster from starting, by line.

YAML ──► Ray's own schema ──► words not filled in ──► key, token, folders ──► our commands and the
configuration they carry
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from osd.config import reading
from osd.config.schema import Config
from osd.doctor.checks import Check
from osd.errors import ConfigError, OSDError
from osd.service.cluster import schema_problem
from osd.service.plan import check_remote_parts

PLACEHOLDERS = ("HEAD", "WORKER", "USER", "KEY", "CONFIG")
TOKEN = "~/.ray/auth_token"
COMMANDS = {"head": "head_start_ray_commands", "worker": "worker_start_ray_commands"}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A file that is YAML, with the line of each key."""

    path: Path
    text: str
    content: dict[str, Any]
    lines: dict[str, int]
    """"auth.ssh_user" -> its line, from 1"""

    def at(self, key: str) -> str:
        """Where a key stands, or should stand."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"line {self.lines[key]}" if key else "the file"

    def get(self, key: str) -> Any:
        found: Any = self.content
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    @property
    def hosts(self) -> list[str]:
        """Addresses, the head's first."""
        head, workers = self.get("provider.head_ip"), self.get("provider.worker_ips")
        return [str(each) for each in (head, *(workers or [])) if each]


def read(path: Path) -> ClusterFile:
    """Raises `ConfigError` with the line where the file is no YAML mapping."""
    try:
        text = path.read_text()
        content, root = yaml.safe_load(text), yaml.compose(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "the file"
        raise ConfigError(
            f"{path}, {where}: no YAML ({getattr(error, 'problem', error)})"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: no YAML mapping; begin with configs/cluster-local.yaml")
    return ClusterFile(path, text, content, dict(_lines(root, "")))


def check_file(file: ClusterFile) -> Iterator[Check]:
    """What the file says by itself. A broken check may explain those after it."""
    problem = schema_problem(file.content)
    named = next((word for word in re.findall(r"'([\w.]+)'", problem) if word in file.lines), "")
    where = f"{file.at(named)}: " if named else ""
    yield Check("schema", not problem, f"{where}{problem}" if problem else "Ray's own accepts it")
    left = [(number, word) for number, word in _placeholders(file.text)]
    text = "; ".join(f"line {number}: fill in {word}" for number, word in left)
    yield Check("filled in", not left, text or "no word in capitals is left")
    if file.get("provider.type") == "local" and not left:
        yield _key(file)
    yield _token(file)
    yield from _mounts(file)


def check_commands(file: ClusterFile) -> Iterator[Check]:
    """Our commands that start the machines, and the configuration that the head serves by."""
    resources: set[str] = set()
    for kind, key in COMMANDS.items():
        command = _command(file, key, kind)
        if command is None:
            text = f"{file.at(key)}: no `osd cluster {kind}` in {key}"
            yield Check(kind, False, text)
            continue
        yield Check(kind, True, " ".join(["osd", *command]))
        resources |= {command[i + 1] for i, word in enumerate(command[:-1]) if word == "--resource"}
    if _command(file, COMMANDS["head"], "head") is None:
        return
    try:
        config = head_configuration(file)
        check_remote_parts(config)
    except OSDError as error:
        yield Check("configuration", False, f"{file.at(COMMANDS['head'])}: {error}")
        return
    for key in ("trainer_resource", "replica_resource"):
        wanted = getattr(config.ray, key)
        if wanted and wanted not in resources:
            text = f"no worker is started with --resource {wanted}, which ray.{key} asks for"
            yield Check("configuration", False, f"{file.at(COMMANDS['worker'])}: {text}")
            return
    yield Check("configuration", True, f"target {config.serving.target}, every key is known")


def head_configuration(file: ClusterFile) -> Config:
    """What the head would serve by: the file that is carried to it, and the command's overrides.
    Raises `ConfigError` where either is wrong."""
    arguments, config = _command(file, COMMANDS["head"], "head") or [], None
    for option in ("--config", "-c"):
        if option in arguments:
            at = arguments.index(option)
            config = arguments[at + 1]
            del arguments[at : at + 2]
    carried = (file.get("file_mounts") or {}).get(config) if config else None
    address, overrides = arguments[2], arguments[3:]
    if config and not carried:
        raise ConfigError(f"{config} is not carried to the head; name it under file_mounts")
    path = Path(carried).expanduser() if carried else None
    return reading.load(path, [*overrides, f"ray.address={address}:6380"], environ={}).config


def _command(file: ClusterFile, key: str, kind: str) -> list[str] | None:
    """The arguments of `osd cluster KIND` among the commands of a key; None where it is missing."""
    for line in file.get(key) or []:
        words = shlex.split(str(line))
        for at, word in enumerate(words):
            if Path(word).name == "osd" and words[at + 1 : at + 3] == ["cluster", kind]:
                return words[at + 1 :]
    return None


def _placeholders(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("#")[0]
        for word in re.findall(r"(?<![\w$])[A-Z]{3,}(?!\w)", code):
            if word in PLACEHOLDERS:
                yield number, word


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
    synced = [str(each) for each in file.get("cluster_synced_files") or []]
    mounted = file.get("file_mounts") or {}
    if TOKEN in synced or TOKEN in mounted:
        return Check("token", True, f"{TOKEN} reaches the workers")
    where = file.at("cluster_synced_files")
    text = f"{where}: the head would not let the workers in; add {TOKEN} to cluster_synced_files"
    return Check("token", False, text)


def _mounts(file: ClusterFile) -> Iterator[Check]:
    for target, source in (file.get("file_mounts") or {}).items():
        where = file.at("file_mounts")
        if target.rstrip("/") == "~/osd":
            text = f"{where}: processes in the home would take ~/osd for the package; rename it"
            yield Check("file_mounts", False, text)
        elif not Path(os.path.expanduser(str(source))).exists():
            yield Check("file_mounts", False, f"{where}: {source}: no such file or folder")


def _lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _lines(value, f"{name}.")
