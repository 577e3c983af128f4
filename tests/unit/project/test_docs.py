"""Docs under test: what is documented exists, and what exists is documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osd.config import docs
from osd.config.reading import ENVIRONMENT_ALONE, known_keys
from osd.observe.exposition import COUNTERS, GAUGES, SPECULATION
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


def test_the_configuration_page_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == docs.render(), "run `make docs`"


def test_every_key_and_variable_has_its_heading() -> None:
    page = (DOCS / "configuration.md").read_text()
    for key in known_keys():
        assert f"### `{key}`" in page
    for name in ENVIRONMENT_ALONE:
        assert f"* `{name}`: " in page


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    sources = "\n".join(p.read_text() for p in (ROOT / "osd").rglob("*.py"))
    parts = "spec|speculation|step|draft|capture|buffer|round|swap|rollback|trainer|replica|redis"
    named = set(re.findall(rf'"(osd_(?:(?:{parts})_\w+|replicas|alarm))"', sources))
    assert named >= {*COUNTERS, *GAUGES, *SPECULATION}
    page = (DOCS / "operations.md").read_text()
    documented = set(re.findall(r"`(osd_\w+)", page))
    assert {n.removesuffix("_total") for n in named} == {n.removesuffix("_total") for n in documented}


def test_every_endpoint_is_documented() -> None:
    from osd.observe.dashboard import build_app

    class Nothing:
        pass

    page = (DOCS / "operations.md").read_text()
    paths = build_app(Nothing(), Nothing(), "token", traces=lambda: iter([])).openapi()["paths"]
    assert len(paths) >= 15
    for path in [*paths, "/dashboard", "/openapi.json"]:
        assert path in page, path


def test_every_command_has_an_example_and_runs_its_help() -> None:
    import typer

    from osd.cli import app

    def check(command: object, path: list[str]) -> None:
        subcommands = getattr(command, "commands", None)
        if subcommands:
            for name, sub in subcommands.items():
                check(sub, [*path, name])
            return
        result = CliRunner().invoke(app, [*path, "--help"])
        assert result.exit_code == 0
        assert "Example" in result.output, f"osd {' '.join(path)} has no example"

    check(typer.main.get_command(app), [])


def test_the_readmes_commands_are_the_ones_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)`?", readme):
        assert f"\n{target}:" in makefile, f"README names make {target}"
    assert "make demo" in readme
    assert "make test" in readme
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda p: p.name)
def test_files_and_links_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:osd|serving|buffers|trainer|configs|tests|scripts|docs)/[\w./-]+?\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_osd_commands_in_the_readme_parse() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"^(?:\.venv/bin/)?osd (\w+(?: (?:list|show|pin|promote|rollback))?)", readme, re.M))
    assert commands
    for command in commands:
        result = subprocess.run(
            [sys.executable, "-m", "osd", *command.split(), "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert result.returncode == 0, f"osd {command}: {result.stderr}"


def test_the_capture_page_names_every_field_and_every_reason() -> None:
    from osd.records import Trace
    from serving.capture.skips import SKIP_REASONS

    page = (DOCS / "capture.md").read_text()
    table = page[page.index("## The trace") : page.index("## Chats")]
    documented = {name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert documented == set(Trace.__dataclass_fields__)
    reasons = page[page.index("## What is left out") :]
    assert set(re.findall(r"^\| `(\w+)` \|", reasons, re.M)) == set(SKIP_REASONS)
