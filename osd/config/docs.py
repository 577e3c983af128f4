"""Renders docs/configuration.md from the texts of the configuration's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from osd.config.reading import ENVIRONMENT_ALONE
from osd.config.schema import Config
from osd.config.serving import OWNED_VLLM_KEYS

HEAD = """# Configuration

<!-- Generated from osd/config by `make docs`; a test fails when it is out of date. -->

Precedence: command line flags, then overrides (`section.key=value`), then environment variables
(`OSD_SECTION__KEY`), then the file given with `--config`, then the defaults below. \
An unknown key is an error wherever
it stands. `osd config show [FILE] [section.key=value ...]` prints every value with its origin.

Values of overrides and environment variables are read as YAML: \
`serving.vllm.enforce_eager=true` is a boolean.
"""

ENVIRONMENT_TEXTS = {
    "OSD_CACHE_DIR": "where the tiny models are kept (default `$XDG_CACHE_HOME/osd`, "
    "else `~/.cache/osd`)",
    "OSD_DEBUG": "set to anything: errors come with their traceback",
    "OSD_EXTRA": "set-up only: `cpu` or `gpu` (default: `gpu` where `nvidia-smi` answers)",
    "OSD_PYTHON": "set-up only: the Python to use (default `python3`)",
    "OSD_RUNTIME_DIR": "where a running service leaves its note for other commands "
    "(default `$XDG_RUNTIME_DIR/osd`, else `osd-UID` in the temporary directory)",
    "OSD_TOKEN": "the admin token, for commands that name a service with `--url` or `OSD_URL`",
    "OSD_URL": "the control port commands talk to",
    "OSD_VENV": "set-up only: where the environment goes (default `.venv`)",
}


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## Top level\n"]
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, info in Config.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            sections.append((name, inner))
        else:
            parts.append(_field(name, info))
    for name, section in sections:
        parts.append(f"## {name}\n\n{(section.__doc__ or '').strip()}\n")
        parts += [
            part for key, info in section.model_fields.items() for part in _key(name, key, info)
        ]
    parts.append(
        "## vLLM arguments that are ours\n\n`serving.vllm` passes everything to vLLM but these:\n"
    )
    parts.append(
        "\n".join(f"* `{key}`: use {remedy}" for key, remedy in OWNED_VLLM_KEYS.items()) + "\n"
    )
    parts.append("## Environment variables that are not configuration keys\n")
    parts.append(
        "\n".join(f"* `{name}`: {ENVIRONMENT_TEXTS[name]}" for name in sorted(ENVIRONMENT_ALONE))
        + "\n"
    )
    return "\n".join(parts)


def _key(section: str, key: str, info: FieldInfo) -> Iterator[str]:
    """A key, or a section within a section."""
    inner = info.annotation
    if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
        yield _field(f"{section}.{key}", info)
        return
    yield f"### `{section}.{key}`\n\n{' '.join((inner.__doc__ or '').split())}\n"
    for name, field in inner.model_fields.items():
        yield _field(f"{section}.{key}.{name}", field)


def _field(key: str, info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    text = " ".join((info.description or "").split())
    allowed = f"{_limits(info)}{_choices(info)}"
    return f"### `{key}`\n\n{text}\n\nDefault: `{_shown(default)}`{allowed}\n"


def _choices(info: FieldInfo) -> str:
    """The values of a `Literal`, also within a list."""
    inner = [info.annotation, *get_args(info.annotation)]
    literal = next((kind for kind in inner if get_origin(kind) is Literal), None)
    return "".join(f", `{value}`" for value in get_args(literal)).replace(", ", "; one of ", 1)


def _shown(value: Any) -> str:
    return json.dumps(value)


def _limits(info: FieldInfo) -> str:
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "matches"}
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in words.items()
        if getattr(rule, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""
