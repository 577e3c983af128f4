"""Reads a configuration: merges its sources, validates the tree of `osd/config/schema.py`, and
keeps each value's origin.

Precedence: command line flags > overrides (`section.key=value`) > environment (`OSD_SECTION__KEY`)
> file > defaults. An unknown key is an error in each of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from osd.config.schema import Config
from osd.config.secrets import without_secrets
from osd.errors import ConfigError

ENVIRONMENT_ALONE = {
    "OSD_CACHE_DIR",
    "OSD_DEBUG",
    "OSD_EXTRA",
    "OSD_PYTHON",
    "OSD_RUNTIME_DIR",
    "OSD_TOKEN",
    "OSD_URL",
    "OSD_VENV",
}
"""Variables with our prefix that are not configuration keys."""


NUMBERS = ("serving.replicas",)
"""Sections that may be given as a number."""
VLLM = "serving.vllm"
MAPPINGS = (VLLM, "serving.env")
"""Keys whose values are free mappings. The keys below them are not checked here."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and the origin of the value of each key (`serving.port`)."""

    config: Config
    origins: dict[str, str]


def load(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Read a configuration.

    overrides: `section.key=value` with YAML values
    flags: dotted key -> value; None = not given

    Raises `ConfigError` with the key, its origin, the value and what would fit.
    """
    values: dict[str, tuple[Any, str]] = {}

    def put(given: Mapping[str, Any], origin: str) -> None:
        for key, value in given.items():
            name = _with_underscores(key)
            values.pop(name, None)  # what comes later also stands later
            values[name] = (value, origin)

    if path is not None:
        put(_read_file(Path(path)), str(path))
    for key, value in _read_environment(os.environ if environ is None else environ).items():
        variable = f"environment variable {_variable_name(key)}"
        put(_flatten({key: value}, variable), variable)
    for text in overrides:
        put(_flatten(_parse_override(text), text), "command line")
    put({k: v for k, v in (flags or {}).items() if v is not None}, "command line")
    values = dict(_with_limits(values))
    origins = {key: origin for key, (_, origin) in values.items()}
    try:
        config = Config.model_validate(_nest({key: value for key, (value, _) in values.items()}))
    except ValidationError as error:
        raise _first_problem(error, origins) from None
    return Resolved(config, origins)


def _with_limits(values: dict[str, tuple[Any, str]]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """A number for a section that has `min` and `max` is both, where a later source says no
    other."""
    for key, (value, origin) in values.items():
        if key in NUMBERS and type(value) is int:
            yield from ((f"{key}.{name}", (value, origin)) for name in ("min", "max"))
        else:
            yield key, (value, origin)


def leaves(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of every field."""
    out: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            out |= leaves(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8; give the path of a YAML file") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise ConfigError(
            f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(tree).__name__}")
    return _flatten(tree, str(path))


BOOL = "tag:yaml.org,2002:bool"
MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML in which off, no, on and yes are words, and a repeated key is an error.

    pydantic accepts these words for a boolean. Plain YAML keeps only the last of repeated keys.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != BOOL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} stands there twice", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _parse(text: str) -> Any:
    """Parse one YAML document. Raises `yaml.YAMLError` for every text that has no value."""
    try:
        return _Loader(text).get_single_data()
    except yaml.reader.ReaderError as error:
        raise yaml.YAMLError(
            f"a character that is not allowed at position {error.position}"
        ) from None
    except (ValueError, KeyError) as error:
        raise yaml.YAMLError(" ".join(str(error).split())) from None
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


def _flatten(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """Dotted key -> value, without mappings but those of `MAPPINGS`."""
    try:
        return _flattened(tree)
    except RecursionError:
        raise ConfigError(f"{where}: a section contains itself") from None


def _flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not _is_mapped(name) and name not in MAPPINGS:
            flat |= _flattened(value, f"{name}.")
        elif isinstance(value, dict) and name in MAPPINGS:
            flat |= {f"{name}.{k}": _copied(v) for k, v in value.items()}
        else:
            flat[name] = _copied(value)
    return flat


def _copied(value: Any) -> Any:
    """A value of its own, where YAML's aliases share one. Raises `RecursionError` where it contains
    itself."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _is_mapped(key: str) -> bool:
    return any(key.startswith(f"{mapping}.") for mapping in MAPPINGS)


def _with_underscores(key: str) -> str:
    """The key under which an argument of vLLM that is written with dashes is one with itself."""
    if not key.startswith(f"{VLLM}."):
        return key
    name, dot, parts = key.removeprefix(f"{VLLM}.").partition(".")
    return f"{VLLM}.{name.replace('-', '_')}{dot}{parts}"


def _variable_name(key: str) -> str:
    return "OSD_" + key.replace(".", "__").upper()


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    by_name = {_variable_name(key): key for key in (*known_keys(), *NUMBERS)}
    out: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith("OSD_") or name in ENVIRONMENT_ALONE:
            continue
        if name.startswith("OSD_SERVING__VLLM__"):
            argument = name.removeprefix("OSD_SERVING__VLLM__").lower().replace("__", ".")
            out[f"{VLLM}.{argument}"] = _parse_value(text)
        elif name in by_name:
            out[by_name[name]] = _parse_value(text)
        else:
            raise ConfigError(f"environment variable {name}: no such key{_suggest(name, by_name)}")
    return out


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: an override has the form section.key=value")
    return {key.strip(): _parse_value(value)}


def _parse_value(text: str) -> Any:
    try:
        return _parse(text) if text else ""
    except yaml.YAMLError:
        return text


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        # vLLM's arguments have parts, and names without dots.
        is_whole = _is_mapped(key) and not key.startswith(f"{VLLM}.")
        *parents, leaf = key.split(".", 2) if is_whole else key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {parent} is a value, not a section")
        leaf_value = node.get(leaf)
        if isinstance(leaf_value, dict) and isinstance(value, dict):
            leaf_value.update(value)
        else:
            node[leaf] = value
    return tree


PLAIN_WORDS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "model_type": "is a section: set a key of it, like serving.port=8000",
    "string_pattern_mismatch": "must be lower-case letters, digits and -, at most 32, "
    "beginning with a letter or digit",
}
"""Type of a validation error -> our words, where pydantic's are technical."""


def _first_problem(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    near = (o for k, o in origins.items() if k.startswith(key + ".") or key.startswith(k + "."))
    origin = origins.get(key) or next(near, "defaults")
    if problem["type"] == "extra_forbidden":
        given = next((k for k in origins if k.startswith(key)), key)
        return ConfigError(
            f"{given} ({origin}): no such key{_suggest(given, (*known_keys(), *NUMBERS))}"
        )
    message = PLAIN_WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key}={without_secrets(problem['input'])!r} ({origin}): {message}")


def _suggest(name: str, known: Any) -> str:
    """The likeliest meaning of a misspelt key. The leaf counts more than the section."""
    import difflib

    def likeness(candidate: str) -> float:
        parts = [(a.rpartition(".")[2].lower(), a.lower()) for a in (name, candidate)]
        return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in zip(*parts, strict=True))

    best = max(known, key=likeness)
    return (
        f"; did you mean {best}?" if likeness(best) > 1.5 else "; `osd config show` lists all keys"
    )
