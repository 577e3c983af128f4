"""Options and small helpers that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.errors import ConfigError

if TYPE_CHECKING:
    from osd.client.http import Client

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Control port of the service (default: the one running)."),
]
DeploymentOption = Annotated[
    str | None, typer.Option("--deployment", help="Which running service, by name.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="All of it, as JSON.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file with settings.")
]
OutOption = Annotated[
    Path, typer.Option(help="New directory for the draft, in Hugging Face format.")
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", help="Draft model or EAGLE-3 head: directory, hub name, or tiny."),
]
FirstDraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Draft model or EAGLE-3 head to begin with: directory, hub name, or tiny.",
    ),
]


def _say_where_heads_go(given: bool) -> None:
    if given:
        raise ConfigError(
            "--head: is of `osd evaluate` alone; --draft takes an EAGLE-3 head, too, and `osd "
            "distil --new-head` makes one"
        )


NoHeadOption = Annotated[bool, typer.Option("--head", hidden=True, callback=_say_where_heads_go)]
"""Refuses what `--draft` takes, too, and says so; else `--help` would be proposed."""
EpochsOption = Annotated[int, typer.Option(min=1, help="Passes over the traces.")]


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Positional arguments: at most one without `=`, the others `name.name=value`."""
    plain = [a for a in arguments if not is_override(a)]
    if len(plain) > 1:
        raise ConfigError(
            f"{plain[1]!r}: one model or file and overrides of the form section.key=value are "
            "expected"
        )
    return (plain[0] if plain else None), [a for a in arguments if is_override(a)]


def is_override(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and all(part.isidentifier() for part in key.split("."))


def client_of(url: str | None, deployment: str | None) -> Client:
    from osd.client.http import Client

    return Client(url, deployment)


def warn(line: str) -> None:
    typer.echo(f"osd: {line}", err=True)


def show(answer: Any) -> None:
    typer.echo(json.dumps(answer, indent=2))
