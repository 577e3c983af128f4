"""Write the pages of docs/ that are made from the code.

docs/configuration.md    the fields of osd/config
docs/commands.md         the help texts of osd/cli
docs/metrics.md          the tables of osd/observe/metrics.py and speculation_metrics.py
docs/http.md             the OpenAPI description of the control port
docs/engines.md          tests/integration/engines/matrix.py, also a row of the README
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from osd.cli import app
from osd.config import docs as configuration
from osd.observe.dashboard import build_app
from osd.observe.metrics import DEPLOYMENT, Series
from osd.observe.speculation_metrics import SPECULATION

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the tests, which are not installed

from tests.integration.engines import matrix  # noqa: E402

DOCS = ROOT / "docs"
WIDTH = 100

COMMANDS = """# Commands

<!-- Generated from osd/cli by `make docs`; a test fails when it is out of date. -->

A command finds the running service by `--url` or the variable `OSD_URL` (with `OSD_TOKEN`), else it
takes the one that runs under this user. A command exits with 2 for what the user can put right, and
with 1 when the service says no or does not answer. What operators do with these commands stands in
[operations](operations.md). `osd bench` exists in a checkout of the project only.
"""

METRICS = """# Metrics

<!-- Generated from osd/observe by `make docs`; a test fails when it is out of date. -->

The control port serves these series at `/metrics`, for the whole deployment. vLLM's own metrics are
on the service port. The values of the labels, what each series leaves out, and formulas in PromQL
stand in [the dashboard's page](dashboard.md#what-the-metrics-count). Alerts stand in
[operations](operations.md#prometheus-and-grafana).

## The deployment
"""

SPECULATION_METRICS = """
## Control of speculation

Each replica reports these for its own [control of speculation](control.md). They begin with the
first request, count since the engine started, and are absent while no heartbeat comes.
"""

HTTP = """# HTTP on the control port

<!-- Generated from the control port's OpenAPI description by `make docs`; a test fails when it is
out of date. -->

The routes of the control port (`control.host`, `control.port`). Besides them there are `/dashboard`
([the page](dashboard.md)) and `/openapi.json` (this description, for programs). The keys of the
answers stand in [the dashboard's page](dashboard.md#the-same-as-json). The service port is vLLM's
OpenAI API.
"""

TAGS = {
    "status": "Reading. Needs no token.",
    "admin": "Changing, and taking traces out. Needs `Authorization: Bearer TOKEN`.",
}
LIMITS = {
    "minimum": "≥ {}",
    "maximum": "≤ {}",
    "maxLength": "at most {} characters",
}


def pages() -> dict[str, str]:
    """File name in docs/ -> its text."""
    return {
        "configuration.md": configuration.render(),
        "commands.md": commands(),
        "metrics.md": metrics(),
        "http.md": http(),
        "engines.md": matrix.page(),
    }


def commands() -> str:
    """A section for each command: its usage, help text, options and examples."""
    found = list(_commands(typer.main.get_command(app), "osd"))
    rows = [
        f"| [`{path}`](#{path.replace(' ', '-')}) | {_plain(command.help)} |"
        for path, command in found
    ]
    sections = [_command(path, command) for path, command in found]
    return "\n".join([COMMANDS, "| command | purpose |", "|---|---|", *rows, "", *sections])


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, command) of every command below this one that is no group."""
    inner = getattr(command, "commands", {})
    for name, sub in inner.items():
        yield from _commands(sub, f"{path} {name}")
    if not inner:
        yield path, command


def _command(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([path, *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
    parts = [f"## `{path}`\n\n`{usage}`\n\n{_wrapped(command.help)}\n"]
    if options:
        parts += ["| option | meaning |\n|---|---|", *map(_option, options), ""]
    return "\n".join([*parts, "```", *_examples(command.epilog or "", path), "```\n"])


def _option(option: Any) -> str:
    notes = [option.help]
    if option.required:
        notes.append("Required.")
    elif option.default not in (None, False):
        notes.append(f"Default: `{option.default}`.")
    return f"| {', '.join(f'`{name}`' for name in option.opts)} | {' '.join(notes)} |"


def _examples(epilog: str, path: str) -> Iterator[str]:
    for example in re.split(r"\s{4,}", epilog.partition(":")[2].strip()):
        yield example if example.startswith("osd ") else f"{path} {example}"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _wrapped(text: str) -> str:
    return textwrap.fill(_plain(text), WIDTH, break_on_hyphens=False)


def metrics() -> str:
    """A row for each series."""
    return METRICS + _series(DEPLOYMENT) + SPECULATION_METRICS + _series(SPECULATION)


def _series(table: Sequence[Series]) -> str:
    rows = [f"| `{s.name}{_labels(s.labels)}` | {s.kind} | {s.text} |" for s in table]
    return "\n".join(["", "| series | type | meaning |", "|---|---|---|", *rows, ""])


def _labels(labels: tuple[str, ...]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


def http() -> str:
    """A section for each tag, with a part for each route."""
    api = build_app(None, None, "token", traces=lambda: iter(())).openapi()
    routes = [
        (method.upper(), path, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    sections = []
    for tag, text in TAGS.items():
        inner = [_route(*route) for route in routes if route[2]["tags"] == [tag]]
        sections.append("\n".join([f"## {tag.capitalize()}\n\n{text}\n", *inner]))
    return "\n".join([HTTP, *sections])


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"### `{method} {path}`\n\n{_wrapped(operation['summary'])}\n"]
    if parameters := operation.get("parameters"):
        parts.append("| parameter | type | meaning |\n|---|---|---|")
        parts += [_parameter(parameter) for parameter in parameters]
        parts.append("")
    if body := operation.get("requestBody"):
        properties = body["content"]["application/json"]["schema"]["properties"]
        names = ", ".join(f"`{name}`" for name in properties)
        parts.append(f"A JSON body may give {names} instead.\n")
    return "\n".join(parts)


def _parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    schema = schema | next((s for s in schema.get("anyOf", ()) if s["type"] != "null"), {})
    choices = " or ".join(f"`{choice}`" for choice in schema.get("enum", ()) if choice)
    notes = [parameter.get("description", "").rstrip("."), choices]
    notes += [text.format(schema[key]) for key, text in LIMITS.items() if key in schema]
    if schema.get("default", "") != "":
        notes.append(f"default `{json.dumps(schema['default'])}`")
    return f"| `{parameter['name']}` | {schema['type']} | {'; '.join(n for n in notes if n)} |"


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    readme = ROOT / "README.md"
    row = rf"^.*{re.escape(matrix.IN_README)}.*$"
    readme.write_text(re.sub(row, matrix.readme_row(), readme.read_text(), flags=re.M))
