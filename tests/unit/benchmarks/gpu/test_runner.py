"""Every way a check can end has its verdict, and the others go on, within the time there is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu.findings import FAILED, NOT_MEASURED, NOT_RUN, PASSED, Findings, Outcome
from benchmarks.gpu.registry import CHECKS, RUNNER, V2_ASYNC, Check
from benchmarks.gpu.runner import Ended, Runner, is_good
from tests.support.gpu_checks import StartFake, a_check


class Scripted:
    """Starts nothing: each check takes the seconds it is told, on a clock of its own."""

    def __init__(self, *, seconds: float = 1.0, has_gpu: bool = True) -> None:
        self.now, self.seconds, self.has_gpu = 0.0, seconds, has_gpu
        self.begun: list[tuple[str, dict[str, str], float]] = []
        self.at_once = self.most_at_once = 0
        self.find: Callable[[Check, Findings, dict[str, str]], None] = lambda check, found, how: (
            found.fact("fine", True, equals=True)
        )
        self._lock = threading.Lock()

    def __call__(
        self, check: Check, findings: Path, environ: dict[str, str], seconds: float
    ) -> Ended:
        with self._lock:
            self.begun.append((check.name, environ, seconds))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.02)
        found = Findings(findings, has_gpu=self.has_gpu)
        with self._lock:
            self.at_once -= 1
            self.now += min(self.seconds, seconds)
        if self.seconds > seconds:
            return Ended(status=None, log="")
        self.find(check, found, environ)
        found.done()
        return Ended(status=0, log="one\ntwo")

    def runner(self, directory: Path, *, limit: float = 600.0, jobs: int = 4) -> Runner:
        return Runner(
            self,
            directory,
            has_gpu=self.has_gpu,
            deadline=limit,
            jobs=jobs,
            clock=lambda: self.now,
        )


# -- real processes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcome of each of these checks, all in one run."""
    directory = tmp_path_factory.mktemp("checks")
    names = ("raises", "crashes", "misses", "leaves", "times", "passes")
    checks = [a_check("hangs", seconds=4.0), *map(a_check, names)]
    runner = Runner(
        StartFake(directory),
        directory,
        has_gpu=False,
        deadline=time.monotonic() + 300,
        jobs=4,
    )
    return {outcome.check: outcome for outcome in runner.run(checks)}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("raises", "failed: RuntimeError: the engine is gone"),
        ("crashes", "failed: its process ended with SIGSEGV"),
        ("hangs", "failed: no end within 4 s"),
        ("misses", "failed: rows lost: 3, wanted = 0"),
        ("leaves", "failed: its process ended with status 0"),
        ("times", PASSED),
        ("passes", PASSED),
    ],
)
def test_each_end_has_its_verdict(ended: dict[str, Outcome], name: str, verdict: str) -> None:
    assert str(ended[name]) == verdict


def test_what_was_found_before_a_crash_is_kept(ended: dict[str, Outcome]) -> None:
    for name in ("raises", "crashes", "hangs"):
        assert [(f.name, f.value) for f in ended[name].figures] == [("begun", 1)]
    assert "RuntimeError: the engine is gone" in ended["raises"].log_tail


def test_what_a_hanging_check_started_ends_with_it(ended: dict[str, Outcome]) -> None:
    (text,) = ended["hangs"].details
    deadline = time.monotonic() + 10
    while Path(f"/proc/{text.split()[1]}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(OSError, match="No such"):
        os.readlink(f"/proc/{text.split()[1]}/exe")


def test_a_time_of_the_cpu_is_not_taken_for_one_of_a_gpu(ended: dict[str, Outcome]) -> None:
    (pause,) = (f for f in ended["times"].figures if f.name == "pause")
    assert (pause.value, pause.is_met) == (None, None)


# -- verdicts, order and time, on fakes -----------------------------------------------------------


def test_without_a_gpu_what_needs_one_is_run_but_not_called_passed(tmp_path: Path) -> None:
    start = Scripted(has_gpu=False)
    checks = [a_check("a", needs_gpu=True), a_check("b", has_dry_run=False), a_check("c")]
    found = start.runner(tmp_path).run(checks)
    assert [o.verdict for o in found] == [NOT_MEASURED, NOT_MEASURED, PASSED]
    assert sorted(name for name, *_ in start.begun) == ["a", "c"]
    assert is_good(found)


def test_a_check_without_a_figure_to_judge_has_not_passed(tmp_path: Path) -> None:
    start = Scripted()
    start.find = lambda check, found, how: found.fact("steps", 3)
    (outcome,) = start.runner(tmp_path).run([a_check("a")])
    assert str(outcome) == "failed: it ended without a figure that could be judged"
    assert not is_good([outcome])


def test_what_measures_time_runs_alone_and_the_rest_side_by_side(tmp_path: Path) -> None:
    for is_timed, most in ((True, 1), (False, 3)):
        start = Scripted()
        checks = [a_check(f"{i}", is_timed=is_timed) for i in range(6)]
        found = start.runner(tmp_path, jobs=3).run(checks)
        assert start.most_at_once == most
        assert [o.check for o in found] == [c.name for c in checks]


def test_without_a_gpu_nothing_is_timed(tmp_path: Path) -> None:
    start = Scripted(has_gpu=False)
    start.runner(tmp_path, jobs=2).run([a_check(f"{i}", is_timed=True) for i in range(4)])
    assert start.most_at_once == 2


def test_the_limit_of_all_cuts_a_check_and_leaves_out_the_rest(tmp_path: Path) -> None:
    start = Scripted(seconds=50)
    checks = [a_check(f"{i}", is_timed=True) for i in range(4)]
    found = start.runner(tmp_path, limit=120).run(checks)
    assert [str(o) for o in found] == [PASSED, PASSED, *["not run: out of time"] * 2]
    assert [seconds for *_, seconds in start.begun] == [60, 60, 20]
    assert start.now == 120
    assert is_good(found)  # all that ran passed


def test_a_check_has_its_own_budget(tmp_path: Path) -> None:
    start = Scripted(seconds=90)
    (outcome,) = start.runner(tmp_path).run([a_check("slow", seconds=60)])
    assert str(outcome) == "failed: no end within 60 s"
    assert outcome.verdict == FAILED != NOT_RUN


def test_the_environment_is_the_modes_and_the_checks(tmp_path: Path) -> None:
    start = Scripted()
    check = a_check("a", mode=V2_ASYNC, environ={"SOME": "x"})
    start.runner(tmp_path).run([check, a_check("b")])
    assert {name: how for name, how, _ in start.begun} == {
        "a": {RUNNER: "1", "SOME": "x"},
        "b": {RUNNER: "0"},
    }


def test_a_failure_that_can_say_more_runs_again_and_stays_a_failure(tmp_path: Path) -> None:
    start = Scripted()

    def find(check: Check, found: Findings, how: dict[str, str]) -> None:
        found.of_gpu("waits", 0 if how["MODE"] == "warn" else 1, equals=0)
        found.detail(f"seen with {how['MODE']}")

    start.find = find
    check = a_check("a", environ={"MODE": "error"}, again_with={"MODE": "warn"})
    (outcome,) = start.runner(tmp_path).run([check])
    assert [how["MODE"] for _, how, _ in start.begun] == ["error", "warn"]
    assert str(outcome) == "failed: waits: 1, wanted = 0"
    assert outcome.details == (
        "seen with error",
        "once more with MODE=warn: passed",
        "  waits: 0",
        "  seen with warn",
    )
    assert outcome.seconds == 2


# -- the registry ---------------------------------------------------------------------------------


def test_the_registry_names_each_check_once_and_each_module_measures() -> None:
    import ast

    from benchmarks.gpu.hardware import ROOT

    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        tree = ast.parse((ROOT / f"{check.module.replace('.', '/')}.py").read_text())
        assert "measure" in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert 30 <= check.seconds <= 150 and check.shows and check.means


def test_both_runners_are_checked_in_both_ways_of_scheduling() -> None:
    modes: dict[str, set[str]] = {}
    for check in CHECKS:
        modes.setdefault(check.module.rpartition(".")[2], set()).add(check.mode.name)
    four = {"V1 sync", "V1 async", "V2 sync", "V2 async"}
    assert modes["syncs"] == modes["exactness"] == four


def test_a_dry_run_runs_every_module(tmp_path: Path) -> None:
    dry = {check.module for check in CHECKS if check.has_dry_run}
    assert dry == {check.module for check in CHECKS}


def test_only_a_gpu_gives_vllms_switches(tmp_path: Path) -> None:
    """vLLM's CPU build knows none of them."""
    start = Scripted(has_gpu=False)
    start.runner(tmp_path).run([a_check("a", environ={"VLLM_BATCH_INVARIANT": "1"})])
    assert start.begun[0][1] == {RUNNER: "0"}
