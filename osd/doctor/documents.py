"""YAML that knows its lines: the documents of a file, and the line of each of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from osd.doctor.checks import Check
from osd.errors import ConfigError

WORDS = (
    *("HEAD", "WORKER", "USER", "KEY", "CONFIG"),
    *("REGION", "ZONE", "PROJECT", "IMAGE"),
    *("TARGET", "DRAFT", "PASSWORD"),
)
"""What is to be filled in, in the files that are shipped."""
BEGIN_WITH = "begin with configs/cluster-local.yaml, -aws.yaml, -gcp.yaml, or configs/kuberay.yaml"
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A megabyte takes the one without C half a minute."""


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML mapping, with the line of each key."""

    text: str
    """of the whole file"""
    content: dict[str, Any]
    lines: Mapping[str, int]
    """"spec.ports.0.port" -> its line, from 1; "" -> the first one"""

    def at(self, key: str) -> str:
        """Where a key stands, or should stand."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"line {self.lines[key]}" if key in self.lines else "the file"

    def get(self, key: str) -> Any:
        """The value of a dotted key, in which a number counts in a list; None where there is
        none."""
        found: Any = self.content
        for name in key.split("."):
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def mapping(self, key: str) -> dict[str, Any]:
        """The mapping at a key; empty where there is none."""
        found = self.get(key)
        return found if isinstance(found, dict) else {}

    def mappings(self, key: str) -> list[dict[str, Any]]:
        """The mappings in the list at a key, another value as an empty one."""
        found = self.get(key)
        return [e if isinstance(e, dict) else {} for e in found] if isinstance(found, list) else []

    def texts(self, key: str) -> list[str]:
        """What is in the list at a key, as text; empty where there is no list."""
        found = self.get(key)
        return [str(each) for each in found] if isinstance(found, list) else []

    def walk(self) -> Iterator[tuple[str, Any]]:
        """Every key in it with its value, outer ones first."""
        yield from _values(self.content, "")


def documents_of(path: Path) -> list[Document]:
    """Raises `ConfigError` with the line where the file is no YAML, or a document no mapping."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', '') or 'no text'}") from None
    try:
        return list(_documents(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "the file"
        raise ConfigError(
            f"{path}, {where}: no YAML ({getattr(error, 'problem', error)})"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from None


def check_filled_in(text: str) -> Check:
    """Whether a word in capitals is left outside of comments."""
    left = [
        f"line {number}: fill in {word}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in re.findall(r"(?<![\w$])[A-Z]{3,}(?!\w)", line.partition("#")[0])
        if word in WORDS
    ]
    return Check("filled in", not left, "; ".join(left) or "no word in capitals is left")


def lines_of(text: str, offset: int = 0) -> dict[str, int]:
    """Key -> line in one document. `offset` lines stand before the text. Raises
    `yaml.YAMLError`."""
    return dict(_lines(yaml.compose(text, Loader), "", offset))


def _documents(text: str) -> Iterator[Document]:
    # Not `yaml.compose_all`: it may not be left before its end.
    for content, root in zip(
        list(_contents(text)), list(yaml.compose_all(text, Loader)), strict=True
    ):
        if content is None:
            continue  # nothing but comments between two separators
        if not isinstance(content, dict):
            raise ConfigError(f"line {root.start_mark.line + 1}: no YAML mapping; {BEGIN_WITH}")
        yield Document(text, content, {"": root.start_mark.line + 1, **dict(_lines(root, "", 0))})


def _contents(text: str) -> Iterator[Any]:
    loader = Loader(text)
    try:
        while loader.check_data():
            yield loader.get_data()
    finally:
        loader.dispose()


def _lines(node: Any, prefix: str, offset: int) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        parts = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(str(number), value, value) for number, value in enumerate(node.value)]
    else:
        return
    for name, key, value in parts:
        yield f"{prefix}{name}", key.start_mark.line + 1 + offset
        yield from _lines(value, f"{prefix}{name}.", offset)


def _values(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, each in items:
        yield f"{prefix}{name}", each
        yield from _values(each, f"{prefix}{name}.")
