"""`osd serve` as a manifest starts it: its command line, the variables of its pod, and the
configuration in a ConfigMap."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from osd.config import reading
from osd.config.schema import Config
from osd.doctor.documents import Document, lines_of
from osd.errors import ConfigError, OSDError

POD = "spec.rayClusterSpec.headGroupSpec.template.spec"
CONTAINER = f"{POD}.containers.0"
FLAGS = {
    "--draft": "serving.draft",
    "--port": "serving.port",
    "--redis-url": "buffer.redis_url",
    "--address": "ray.address",
}
"""Options of `osd serve` -> the keys that they set."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command line of `osd serve`, as far as it configures.

    Example:
        Command(config="/etc/osd/osd.yaml", flags={"ray.address": "auto"}, overrides=[])
    """

    config: str
    flags: Mapping[str, Any]
    overrides: Sequence[str]


def configuration(documents: Sequence[Document], job: Document) -> Config:
    """What the service would be configured by. Raises `ConfigError`."""
    command = command_of(str(job.get("spec.entrypoint") or ""))
    environ = {name: value for name, value, _ in _variables(job) if name.startswith("OSD_")}
    if not command.config:
        config = reading.load(None, command.overrides, command.flags, environ).config
    else:
        found, key = _config_map(documents, job, command.config)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, PurePosixPath(command.config).name)
            path.write_text(str(found.get("data")[key]))
            try:
                config = reading.load(path, command.overrides, command.flags, environ).config
            except ConfigError as error:
                raise ConfigError(str(error).replace(str(path), command.config)) from None
    if config.ray.address == "local":
        raise ConfigError("ray.address=local would start a second Ray; add --address auto")
    return config


def command_of(entrypoint: str) -> Command:
    """Raises `ConfigError` for what is no `osd serve` that goes on."""
    try:
        words = shlex.split(entrypoint)
    except ValueError as error:
        raise ConfigError(f"entrypoint: no command line ({error})") from None
    if [PurePosixPath(word).name for word in words[:2]] != ["osd", "serve"]:
        raise ConfigError(f"entrypoint: {entrypoint or 'nothing'}, and not `osd serve ...`")
    config, flags, overrides, rest = "", dict[str, Any](), list[str](), words[2:]
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith("-"):
            if equals:
                overrides.append(word)
            elif flags.setdefault("serving.target", word) != word:
                raise ConfigError(f"entrypoint: {word}: a second target; leave one of them out")
            continue
        if option == "--detach":
            raise ConfigError("entrypoint: --detach would end the job at once; leave it out")
        if option not in FLAGS and option not in ("--config", "-c"):
            raise ConfigError(f"entrypoint: {option}: `osd serve` has no such option")
        if not equals and not rest:
            raise ConfigError(f"entrypoint: {option} without a value; give it one")
        value = value if equals else rest.pop(0)
        if option in FLAGS:
            flags[FLAGS[option]] = value
        else:
            config = value
    return Command(config, flags, overrides)


def with_line(documents: Sequence[Document], job: Document, error: OSDError) -> str:
    """An error of the configuration, behind the line of what is wrong."""
    text = str(error)
    return f"{_line(documents, job, text)}: {text}"


def place_of(job: Document, variable: str) -> str:
    """The key of a variable of the head's container, or of its command."""
    return next((key for name, _, key in _variables(job) if name == variable), "spec.entrypoint")


def _variables(job: Document) -> Iterator[tuple[str, str, str]]:
    """Name, value and key of each variable. One that comes from elsewhere is some text."""
    for number, each in enumerate(job.mappings(f"{CONTAINER}.env")):
        yield str(each.get("name")), str(each.get("value", "x")), f"{CONTAINER}.env.{number}"


def _config_map(documents: Sequence[Document], job: Document, path: str) -> tuple[Document, str]:
    """The ConfigMap that holds a file of the head's container, and the key of the file in it."""
    names = {
        str(volume.get("name")): volume["configMap"].get("name")
        for volume in job.mappings(f"{POD}.volumes")
        if isinstance(volume.get("configMap"), dict)
    }
    maps = {str(d.get("metadata.name")): d for d in documents if d.get("kind") == "ConfigMap"}
    key = PurePosixPath(path).name
    for mount in job.mappings(f"{CONTAINER}.volumeMounts"):
        folder = path if mount.get("subPath") == key else str(PurePosixPath(path).parent)
        found = maps.get(str(names.get(str(mount.get("name")))))
        is_there = found is not None and key in found.mapping("data")
        if found is not None and is_there and mount.get("mountPath") == folder:
            return found, key
    raise ConfigError(f"entrypoint: {path} is in no ConfigMap of this file that the head mounts")


def _line(documents: Sequence[Document], job: Document, text: str) -> str:
    """Where the key stands that an error names first: in the ConfigMap, in a variable, or on the
    command line."""
    try:
        command = command_of(str(job.get("spec.entrypoint") or ""))
        found, key = _config_map(documents, job, command.config)
    except ConfigError:
        return job.at("spec.entrypoint")
    if variable := re.search(r"environment variable (\w+)", text):
        return job.at(place_of(job, variable[1]))
    named = text.partition("=")[0].split()[0].rstrip(":")
    offset = found.lines[f"data.{key}"]
    try:
        lines = lines_of(str(found.get("data")[key]), offset)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return f"line {offset + mark.line + 1}" if mark is not None else found.at(f"data.{key}")
    if any(override.startswith(f"{named}=") for override in command.overrides):
        return job.at("spec.entrypoint")
    return f"line {lines[named]}" if named in lines else job.at("spec.entrypoint")
