"""Docs under test: what is documented exists, and what exists is documented."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osd.config.reading import ENVIRONMENT_ALONE, known_keys
from osd.config.schema import Config
from osd.observe.exposition import SERIES
from tests.integration.engines import matrix
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "HISTORY.md", *sorted(DOCS.glob("*.md"))]
GENERATED = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))["pages"]()


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATED[name], "run `make docs`"


def test_the_readmes_row_of_promises_is_up_to_date() -> None:
    assert matrix.readme_row() in (ROOT / "README.md").read_text().splitlines(), "run `make docs`"


def test_every_key_and_variable_has_its_heading() -> None:
    page = (DOCS / "configuration.md").read_text()
    for key in known_keys():
        assert f"### `{key}`" in page
    for name in ENVIRONMENT_ALONE:
        assert f"* `{name}`: " in page


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    sources = "\n".join(p.read_text() for p in (ROOT / "osd").rglob("*.py"))
    parts = "spec|speculation|step|draft|capture|buffer|round|swap|rollback|trainer|replica|redis"
    named = set(re.findall(rf'"(osd_(?:(?:{parts})_\w+|replicas(?:_wanted)?|alarm))"', sources))
    assert named == SERIES.keys()
    page = (DOCS / "metrics.md").read_text()
    documented = set(re.findall(r"`(osd_\w+)", page))
    assert {n.removesuffix("_total") for n in named} == {
        n.removesuffix("_total") for n in documented
    }
    explained = re.findall(r"`(osd_\w+)`", (DOCS / "dashboard.md").read_text())
    assert set(explained) <= named


def test_every_kind_of_event_is_documented() -> None:
    found = set()
    for path in (ROOT / "osd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            named = [k.value for k in node.keywords if k.arg == "kind"]
            name = ast.unparse(node.func).split(".")[-1]
            kinds = {"Event": named, "_say": node.args[:1]}.get(name, [])
            found |= {kind.value for kind in kinds if isinstance(kind, ast.Constant)}
    assert found >= {"swapped", "replica_lost", "scaled"}
    table = (DOCS / "dashboard.md").read_text().split("### Kinds of events")[1]
    assert found - set(re.findall(r"`(\w+)`", table)) == set()


def test_every_endpoint_is_documented() -> None:
    from osd.observe.dashboard import build_app

    class Nothing:
        pass

    page = (DOCS / "http.md").read_text()
    paths = build_app(Nothing(), Nothing(), "token", traces=lambda: iter([])).openapi()["paths"]
    assert len(paths) >= 15
    for path in [*paths, "/dashboard", "/openapi.json"]:
        assert path in page, path


def test_every_command_has_an_example_and_runs_its_help() -> None:
    import typer

    from osd.cli import app

    page = (DOCS / "commands.md").read_text()

    def check(command: object, path: list[str]) -> None:
        subcommands = getattr(command, "commands", None)
        if subcommands:
            for name, sub in subcommands.items():
                check(sub, [*path, name])
            return
        result = CliRunner().invoke(app, [*path, "--help"])
        assert result.exit_code == 0
        assert "Example" in result.output, f"osd {' '.join(path)} has no example"
        assert f"\n## `osd {' '.join(path)}`\n" in page

    check(typer.main.get_command(app), [])


def test_the_readmes_commands_are_the_ones_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([\w-]+)`?", readme):
        assert f"\n{target}:" in makefile, f"README names make {target}"
    promised = {"make demo", "make test", "make test-slow", "make test-cluster"}
    assert promised <= set(re.findall(r"make [\w-]+", readme))
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_and_links_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    rooms = "osd|serving|buffers|trainer|configs|tests|scripts|docs|benchmarks"
    for name in re.findall(rf"`((?:{rooms})/[\w./-]+?\.\w+|(?:{rooms})/[\w./-]*/)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_named_in_the_docs_exist(page: Path) -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    text = "".join(file.read_text() for file in files)
    known = {file.name for file in files} | set(re.findall(r"def (test_\w+)\(", text))
    named = set(re.findall(r"`(?:[\w/]+/)?(test_\w+(?:\.py)?)`", page.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_prose_is_wrapped(page: Path) -> None:
    """But for tables, what stands in fences, and the settings' own texts."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    lines = text.splitlines() if page.name != "configuration.md" else []
    assert [line for line in lines if len(line) > 100 and not line.lstrip().startswith("|")] == []


def test_the_readme_fits() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100


CONSTANTS = [
    ("control.md", r"chosen every (\d+) steps", "serving/speculation", "STEPS_PER_DECISION"),
    ("control.md", r"must promise (\d+) %", "serving/speculation", "HYSTERESIS"),
    ("control.md", r"accepted is at least ([\d.]+) of", "serving/speculation", "MARGIN"),
    ("control.md", r"\(([\d.]+) if nobody did\)", "serving/speculation", "UNKNOWN"),
    ("control.md", r"half, (\d+) to (\d+),", "serving/speculation", "MIN_WEIGHT, MAX_WEIGHT"),
    (
        "control.md",
        r"newest (\d+) finished requests",
        "serving/speculation/estimates.py",
        "MAX_FINISHED",
    ),
    ("control.md", r"as at most (\d+) tests", "serving/speculation", "MAX_SHARE"),
    ("control.md", r"newest (\d+) of each shape", "serving/speculation", "CELL_SIZE"),
    ("control.md", r"Every (\d+) steps their", "serving/speculation", "STEPS_PER_FIT"),
    ("control.md", r"not seen for (\d+) steps", "serving/speculation", "STALE_STEPS"),
    ("control.md", r"used, (\d+) steps of it", "serving/speculation", "PROBE_STEPS"),
    ("control.md", r"steps of it with k = (\d+)", "serving/speculation", "PROBE_K"),
    ("control.md", r"\(([\d.]+) standard deviations\)", "serving/speculation", "SURPRISE"),
    ("control.md", r"aims at (\d+) % of", "serving/speculation", "PROBE_SHARE"),
    ("control.md", r"memory proposes ([\d.]+) %;", "serving/speculation", "WATCHED_SHARE"),
    ("control.md", r"%; (\d+) % until", "serving/speculation", "FRESH_SHARE"),
    ("control.md", r"newest (\d+) look-ups", "serving/speculation", "NUM_RECENT"),
    ("control.md", r"look-ups did \((\d+) standard", "serving/speculation", "CHANGE"),
    ("control.md", r"until (\d+) first tokens", "serving/speculation", "FRESH_TESTS"),
    (
        "control.md",
        r"found out; (\d+) to (\d+) steps",
        "serving/speculation",
        "MIN_STEPS_TO_PROBE, MAX_STEPS_TO_PROBE",
    ),
    ("control.md", r"that promises (\d+) % of the best", "serving/speculation", "NEARLY"),
    ("control.md", r"at most once in (\d+);", "serving/speculation", "STEPS_PER_TRIAL"),
    ("control.md", r"at most (\d+) for a batch size", "serving/speculation", "MAX_TRIALS"),
    ("control.md", r"not used for (\d+) steps", "serving/speculation", "STEPS_TO_RETRY"),
    ("control.md", r"over (\d+) % from those", "serving/speculation", "MAX_DIFFERENCE"),
    ("control.md", r"there are (\d+) windows", "serving/speculation", "MIN_FOR_INTERVAL"),
    (
        "control.md",
        r"requests, (\d+), (\d+), (\d+) and (\d+) at",
        "serving/speculation/client.py",
        "BATCHES",
    ),
    ("capture.md", r"at most (\d+) characters", "osd/records", "MAX_DOMAIN_LENGTH"),
    ("capture.md", r"One trace in (\d+) is held", "osd/records", "HOLDOUT_ONE_IN"),
    ("capture.md", r"in blocks of (\d+)", "serving/capture/prefixes.py", "BLOCK"),
    ("capture.md", r"what comes within ([\d.]+) seconds", "serving/capture", "SECONDS_TO_GATHER"),
    ("architecture.md", r"One trace in (\d+) is", "osd/records", "HOLDOUT_ONE_IN"),
    ("dashboard.md", r"At most (\d+) classes", "osd/observe/history.py", "MAX_CLASSES"),
    ("dashboard.md", r"1 after (\d+) seconds", "osd/control", "LAGGING_AFTER_S"),
    ("dashboard.md", r"at most (\d+), those with most", "osd/observe", "MAX_LINES"),
    ("offline.md", r"far over (\d+) rounds", "osd/offline", "MAX_ROUNDS"),
    ("offline.md", r"chance and by (\d+) %", "trainer", "LEAST_RISE"),
    ("offline.md", r"`--draft-vocab`, (\d+) by", "osd/offline/new_head.py", "USUAL_SIZE"),
    ("heads.md", r"with weights ([\d.]+)\^j", "trainer/eagle3/head.py", "DECAY"),
    ("operations.md", r"are cut to (\d+) characters", "osd/records", "MAX_DOMAIN_LENGTH"),
    ("operations.md", r"at most (\d+) are counted", "serving/capture", "MAX_DOMAINS"),
]
"""Page, the numbers in its prose, and the room or file with the constant that they restate."""


@pytest.mark.parametrize(
    ("page", "pattern", "place", "name"), CONSTANTS, ids=lambda value: value.replace(" ", "_")
)
def test_numbers_in_the_docs_are_those_of_the_code(
    page: str, pattern: str, place: str, name: str
) -> None:
    found = re.search(pattern, prose(page))
    assert found, f"{page} does not say {pattern}"
    unit = 0.01 if "%" in pattern else 1.0
    said = [unit * float(number) for number in found.groups()]
    values = [value for single in name.split(", ") for value in constant(place, single)]
    assert said == pytest.approx(values)


def constant(place: str, name: str) -> list[float]:
    """The numbers that a room or file gives to a name, read from its source."""
    files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    found = [
        value
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for target, value in _assigned(node)
        if target == name
    ]
    assert len(found) == 1, f"{name} is given {len(found)} values in {place}"
    value = ast.literal_eval(found[0])
    return list(value) if isinstance(value, tuple) else [value]


def _assigned(node: ast.Assign) -> list[tuple[str, ast.expr]]:
    """(name, value) of an assignment, each name of a tuple with its own value."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    else:
        pairs = [(target, value)]
    return [(name.id, value) for name, value in pairs if isinstance(name, ast.Name)]


SETTINGS = [
    ("capture.md", r"default K of (\d+)", "capture.top_k"),
    ("operations.md", r"\| service \| (\d+), localhost", "serving.port"),
    ("operations.md", r"\| control \| (\d+), localhost", "control.port"),
]
"""Page, a number in its prose, and the setting whose default it restates."""


@pytest.mark.parametrize(("page", "pattern", "key"), SETTINGS, ids=lambda value: value)
def test_defaults_in_the_docs_are_those_of_the_code(page: str, pattern: str, key: str) -> None:
    found = re.search(pattern, prose(page))
    section, _, name = key.partition(".")
    assert found and int(found[1]) == getattr(getattr(Config(), section), name)


def test_losses_are_counted() -> None:
    from trainer.loss import LOSSES

    assert f"holds {len(LOSSES)} losses" in prose("architecture.md")


def prose(page: str) -> str:
    """A page on one line."""
    return " ".join((DOCS / page).read_text().split())


def test_the_osd_commands_in_the_readme_parse() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = set(
        re.findall(
            r"^(?:\.venv/bin/)?osd (\w+(?: (?:list|show|pin|promote|rollback))?)", readme, re.M
        )
    )
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
    documented = {
        name
        for cell in re.findall(r"^\| (`.*?) \|", table, re.M)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert documented == set(Trace.__dataclass_fields__)
    reasons = page[page.index("## What is left out") :]
    assert set(re.findall(r"^\| `(\w+)` \|", reasons, re.M)) == set(SKIP_REASONS)
