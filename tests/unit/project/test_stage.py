"""A test run is green only if everything ran, and at most two tests needed a second try."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ways import WAYS

FIRST_TRY_FAILS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({num}))
def test_it(number):
    tried = pathlib.Path(__file__).with_name(f"tried-{{number}}")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried and {comes_right}
"""


class Stage:
    """`scripts/stage` over a file of tests of its own, as stages of one run."""

    def __init__(self, folder: Path) -> None:
        self.again = folder / "again"
        self.again.touch()
        self._file = folder / "test_of_a_stage.py"

    def run(
        self, num: int, *, comes_right: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Tests that fail when they are first tried, and then `comes_right`."""
        self._file.write_text(FIRST_TRY_FAILS.format(num=num, comes_right=comes_right))
        for tried in self._file.parent.glob("tried-*"):
            tried.unlink()
        shutil.copyfile(ROOT / "tests" / "conftest.py", self._file.with_name("conftest.py"))
        command = ["scripts/stage", str(self.again), str(self._file)]
        command += ["-q", "-p", "xdist.plugin", "-c", os.devnull]
        ours = {
            "OSD_TEST_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **ours, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_two_tests_of_a_run_may_need_a_second_try_and_are_named_and_no_third(stage: Stage) -> None:
    first = stage.run(2)
    assert first.returncode == 0
    named = [line.rpartition("::")[2] for line in stage.again.read_text().splitlines()]
    assert named == ["test_it[0]", "test_it[1]"]
    later = stage.run(1)
    assert later.returncode == 1
    why = "red: 3 tests failed at first, and at most 2 of a run may need a second try"
    assert later.stderr.splitlines()[-1] == why


def test_what_fails_twice_is_red(stage: Stage) -> None:
    result = stage.run(1, comes_right=False)
    assert result.returncode == 1
    assert "test_it[0]" in result.stderr
    assert result.stderr.splitlines()[-1] == "red: failed twice, or beside one that did"


def test_time_that_is_over_is_red_and_nothing_is_tried_again(stage: Stage) -> None:
    result = stage.run(1, TEST_DEADLINE=str(int(time.time()) - 1))
    assert result.returncode == 1
    why = "red: the time of this run (TEST_DEADLINE) was over before all its tests had begun"
    assert result.stderr.splitlines()[-1] == why
    assert "passed" not in result.stdout and not stage.again.read_text()


def test_whatever_is_marked_slow_is_run_by_the_script_for_it() -> None:
    script = (ROOT / "scripts" / "test_slow").read_text()
    stages = re.findall(r"^\w+\(\) { stage (.*); }$", script, re.MULTILINE)
    paths = [word for line in stages for word in line.split()]
    assert [re.findall('-m "(.*)"', line) for line in stages[:3]] == [
        *(["slow and not variants"], ["slow and variants"], []),
    ]
    run = [ROOT / path for path in paths if path.startswith("tests/")]
    assert len(run) == 6 and all(path.exists() for path in run)
    slow = [
        file
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(r"pytest\.mark\.slow\b", file.read_text()) and file != Path(__file__)
    ]
    assert len(slow) > 5
    variants = [file for file in slow if "mark.variants" in file.read_text()]
    folder = ROOT / "tests" / "integration" / "service"
    assert len(variants) == 5 and {file.parent for file in variants} == {folder}
    assert [file for file in slow if not any(file.is_relative_to(path) for path in run)] == []


def test_each_way_in_which_vllm_runs_belongs_to_a_stage() -> None:
    script = (ROOT / "scripts" / "test_slow").read_text()
    stages = dict(re.findall(r"^(\w+)\(\) { ways (\w+); }$", script, re.MULTILINE))
    assert f"|| set -- services variants benches {' '.join(stages)}\n" in script
    assert set(stages.values()) == {way.stage for way in WAYS}


SLOW = {"services", "variants", "engines_v1", "engines_v2", "benches", "ranks"}
GROUPS = {*(f"test-slow STAGES={name}" for name in SLOW), "test-cluster"}


def run_groups(
    folder: Path, first: int, seconds_ago: int, *, fails: str = "none"
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What `.ci/run` makes after `make test`, at a commit and so long after its beginning, where
    one group fails; and how it ends."""
    script = (ROOT / ".ci" / "run").read_text()
    _, _, rest = script.partition("\nmake test\n")
    make = f'echo "$*" >>{folder}/made; case "$*" in *{fails}) exit 2; esac'
    for name, does in (("make", make), ("git", f"echo {first}")):
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    (folder / "made").write_text("")
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    begun = f"set -eu\nstarted=$(($(date +%s) - {seconds_ago})) tested=$started\n"
    done = subprocess.run(["sh", "-c", begun + rest], env=environ, capture_output=True, text=True)
    return (folder / "made").read_text().splitlines(), done


def test_ci_runs_all_groups_where_there_is_time_and_begins_with_another_each_time(
    tmp_path: Path,
) -> None:
    orders = []
    for first in range(7):
        order, done = run_groups(tmp_path, first, 0)
        assert set(order) == GROUPS and len(order) == 7
        assert done.returncode == 0 and done.stdout == ""
        orders.append(order)
    assert {order[0] for order in orders} == GROUPS


def test_ci_names_what_it_left_out(tmp_path: Path) -> None:
    made, done = run_groups(tmp_path, 0, 3300)
    assert made == [] and done.returncode == 0
    left_out = "services engines_v1 cluster variants engines_v2 benches ranks"
    assert done.stdout.startswith(f"LEFT OUT for want of time: {left_out};")


def test_ci_begins_what_will_end_within_the_hour(tmp_path: Path) -> None:
    """After 40 minutes a group takes 1.7 times as long as is usual."""
    made, done = run_groups(tmp_path, 0, 2400)
    assert made == ["test-slow STAGES=benches"] and done.returncode == 0
    assert "services engines_v1 cluster variants engines_v2 ranks;" in done.stdout
    made, _ = run_groups(tmp_path, 3, 2000)
    assert "test-cluster" in made and "test-slow STAGES=engines_v2" not in made


@pytest.mark.parametrize("group", [*sorted(SLOW), "test-cluster"])
def test_a_group_that_fails_is_red_and_ends_the_run(group: str, tmp_path: Path) -> None:
    made, done = run_groups(tmp_path, 0, 0, fails=group)
    assert done.returncode != 0
    assert made[-1].endswith(group)


def test_a_stage_that_is_none_is_refused() -> None:
    done = subprocess.run(
        ["scripts/test_slow", "servers"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        "test_slow: servers is no stage; give some of: "
        "services variants benches engines_v1 engines_v2 ranks\n"
    )
