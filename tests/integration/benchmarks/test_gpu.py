"""`scripts/gpu --dry-run`: every check's code on the CPU engine, and no figure of a GPU in the
report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.registry import CHECKS
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

FACTS: dict[str, tuple[str, ...]] = {
    "syncs-v1-sync": ("hook errors", "rows captured", "answers that are whole"),
    "exact-v1-sync": ("rows compared", "output tokens without exactly one row"),
    "swap": ("swaps, none of which failed", "target's weights unchanged"),
    "capture": ("rows stored", "steps or traces lost"),
    "varying-k": tuple(f"k = {k}: verified per request and step" for k in range(6)),
    "shared": ("training steps beside the engine", "loss is finite"),
    "bf16": ("rows compared", "the same, one position off (median)"),
}
"""Check -> figures that a CPU shows too."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The page and its JSON twin, of one run of all checks."""
    out = tmp_path_factory.mktemp("gpu")
    command = [ROOT / "scripts" / "gpu", "--dry-run", "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=out, timeout=540)
    assert ended.returncode == 0, ended.stdout + (out / "report.md").read_text()
    return (out / "report.md").read_text(), json.loads((out / "report.json").read_text())


def figures(report: tuple[str, dict[str, Any]], check: str) -> dict[str, dict[str, Any]]:
    found = {one["check"]: one for one in report[1]["checks"]}[check]["figures"]
    return {figure["name"]: figure for figure in found}


@pytest.mark.timeout(600)
def test_every_check_ran_or_says_why_not(report: tuple[str, dict[str, Any]]) -> None:
    by_name = {one["check"]: one for one in report[1]["checks"]}
    assert list(by_name) == [check.name for check in CHECKS]
    for check in CHECKS:
        is_silent = check.needs_gpu or not check.has_dry_run
        wanted = "not measured: no GPU" if is_silent else "passed"
        assert by_name[check.name]["verdict"] == wanted
        assert bool(by_name[check.name]["figures"]) == check.has_dry_run
    assert set(FACTS) == {check.name for check in CHECKS if check.has_dry_run}


@pytest.mark.parametrize("check", FACTS)
def test_what_a_cpu_shows_is_there_and_meets_its_goal(
    report: tuple[str, dict[str, Any]], check: str
) -> None:
    found = figures(report, check)
    for name in FACTS[check]:
        assert found[name]["is_met"] is True, found[name]


def test_acceptance_follows_the_draft(report: tuple[str, dict[str, Any]]) -> None:
    found = figures(report, "swap")
    assert found["α of the draft"]["value"] > 0.5
    assert found["α of a stranger, after the swap"]["value"] < 0.1
    assert found["α of the draft again"]["value"] > 0.5


def test_no_figure_of_a_gpu_is_made_up(report: tuple[str, dict[str, Any]]) -> None:
    of_gpu = [
        figure
        for check in report[1]["checks"]
        for figure in check["figures"]
        if figure["is_of_gpu"]
    ]
    assert len(of_gpu) > 50
    assert {figure["value"] for figure in of_gpu} == {None}
    units = {f["unit"] for c in report[1]["checks"] for f in c["figures"] if not f["is_of_gpu"]}
    assert units == {""}  # what has a unit is a time, a rate or memory
    assert "not measured: no GPU" in report[0]
    assert report[0].startswith("# OSD on a GPU: dry run on the CPU\n")


def test_the_report_can_be_published(report: tuple[str, dict[str, Any]]) -> None:
    for text in (report[0], json.dumps(report[1])):
        assert str(ROOT) not in text
        assert str(Path.home()) + "/" not in text
        assert "/tmp/" not in text
