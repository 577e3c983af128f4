"""Runs checks in processes of their own, within a budget each and a limit together.

Checks that measure time run alone, neighbours that do not run several at a time. A check that
crashes or hangs gives `failed` with the reason, and the others go on. What the limit leaves no time
for is `not run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol

from benchmarks.gpu import findings
from benchmarks.gpu.findings import FAILED, NOT_MEASURED, NOT_RUN, PASSED, Found, Outcome
from benchmarks.gpu.registry import RUNNER, Check

LOG_LINES = 14
OUT_OF_TIME = "out of time"
LEAST_SECONDS = 15.0
"""With less than this left, no check begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a process ended: `status` as Python's `returncode`, None where its time was over."""

    status: int | None
    log: str


class Start(Protocol):
    """Runs one check in a process, for at most so many seconds, and returns how it ended."""

    def __call__(
        self, check: Check, findings: Path, environ: dict[str, str], seconds: float
    ) -> Ended: ...


class Runner:
    """`jobs` = how many checks that measure no time run at once."""

    def __init__(
        self,
        start: Start,
        directory: Path,
        *,
        has_gpu: bool,
        deadline: float,
        jobs: int,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._directory = start, directory
        self._has_gpu, self._deadline, self._jobs = has_gpu, deadline, jobs
        self._say, self._clock = say, clock

    def run(self, checks: Sequence[Check]) -> list[Outcome]:
        """The outcome of each, in their order."""
        outcomes: list[Outcome] = []
        for group in self._groups(checks):
            with ThreadPoolExecutor(self._jobs if len(group) > 1 else 1) as pool:
                outcomes += pool.map(self.one, group)
        return outcomes

    def _groups(self, checks: Sequence[Check]) -> Iterator[list[Check]]:
        """What may run at once. Without a GPU nothing is timed."""
        for is_timed, neighbours in groupby(checks, lambda c: c.is_timed and self._has_gpu):
            group = list(neighbours)
            yield from [[check] for check in group] if is_timed else [group]

    def one(self, check: Check) -> Outcome:
        """Run one check, and once more where that can say why it failed."""
        if not (self._has_gpu or check.has_dry_run):
            return Outcome(check=check.name, verdict=NOT_MEASURED)
        outcome = self._attempt(check, dict(check.environ))
        if outcome.verdict == FAILED and check.again_with and self._has_gpu:
            again = self._attempt(check, {**check.environ, **check.again_with})
            outcome = _with_second_try(outcome, again, check)
        self._say(f"{check.name}: {outcome}")
        return outcome

    def _attempt(self, check: Check, environ: dict[str, str]) -> Outcome:
        left = self._deadline - self._clock()
        if left < LEAST_SECONDS:
            return Outcome(check=check.name, verdict=NOT_RUN, reason=OUT_OF_TIME)
        own = environ if self._has_gpu else {}
        path = self._directory / f"{check.name}-{'-'.join(own.values()) or 'plain'}.jsonl"
        began = self._clock()
        self._say(f"{check.name} ...")
        seconds = min(check.seconds, left)
        ended = self._start(check, path, {RUNNER: "1" if check.mode.is_v2 else "0", **own}, seconds)
        found = findings.read(path)
        verdict, reason = self._judge(check, found, ended, is_cut=seconds < check.seconds)
        return Outcome(
            check=check.name,
            verdict=verdict,
            reason=reason,
            seconds=self._clock() - began,
            figures=found.figures,
            details=found.details,
            log_tail="\n".join(ended.log.splitlines()[-LOG_LINES:]),
        )

    def _judge(self, check: Check, found: Found, ended: Ended, *, is_cut: bool) -> tuple[str, str]:
        """(verdict, reason)"""
        if ended.status is None:
            over = f"no end within {check.seconds:.0f} s"
            return (NOT_RUN, OUT_OF_TIME) if is_cut else (FAILED, over)
        if found.error:
            return FAILED, found.error.splitlines()[0]
        if ended.status != 0 or not found.is_done:
            return FAILED, f"its process ended with {_status(ended.status)}"
        if found.missed:
            return FAILED, findings.say_missed(found.missed)
        if not any(figure.is_met for figure in found.figures):
            return FAILED, "it ended without a figure that could be judged"
        is_silent = check.needs_gpu and not self._has_gpu
        return (NOT_MEASURED, "its code ran on the CPU") if is_silent else (PASSED, "")


def is_good(outcomes: Sequence[Outcome]) -> bool:
    """Whether all that ran passed."""
    return not any(outcome.verdict == FAILED for outcome in outcomes)


def _with_second_try(first: Outcome, again: Outcome, check: Check) -> Outcome:
    """The first verdict stands; what the second try found stands below it."""
    how = ", ".join(f"{key}={value}" for key, value in check.again_with.items())
    lines = [f"once more with {how}: {again}"]
    lines += [f"  {f.name}: {findings.show(f)}" for f in again.figures]
    lines += [f"  {text}" for text in again.details]
    return replace(first, details=(*first.details, *lines), seconds=first.seconds + again.seconds)


def _status(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


class Processes:
    """Starts checks as processes, each the leader of a group, and ends the groups."""

    def __init__(self, device: str, models: Path, directory: Path) -> None:
        self.device, self.models, self.directory = device, models, directory
        self.is_over = False
        """Nothing begins any more."""
        self._running: set[int] = set()
        self._lock = threading.Lock()

    def start(self, check: Check, findings: Path, environ: dict[str, str], seconds: float) -> Ended:
        """As `Start`."""
        command = [sys.executable, "-m", "benchmarks.gpu.child", check.name]
        command += ["--device", self.device, "--models", str(self.models)]
        return self.run([*command, "--findings", str(findings)], environ, seconds)

    def run(self, command: Sequence[str], environ: dict[str, str], seconds: float) -> Ended:
        """A process, and what it wrote."""
        if self.is_over:
            return Ended(status=None, log="")
        log = self.directory / f"log-{threading.get_ident()}-{time.monotonic_ns()}"
        with log.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        status = None
        with self.listed(child.pid), suppress(subprocess.TimeoutExpired):
            status = child.wait(seconds)
        child.wait()
        return Ended(status=status, log=log.read_text(errors="replace"))

    @contextmanager
    def listed(self, pid: int) -> Iterator[None]:
        """While a process runs. At the end, what is left of its group ends."""
        with self._lock:
            self._running.add(pid)
        try:
            yield
        finally:
            self._end(pid)

    def end_all(self) -> None:
        """End what still runs."""
        with self._lock:
            self.is_over, running = True, list(self._running)
        for pid in running:
            self._end(pid)

    def _end(self, pid: int) -> None:
        with self._lock:
            self._running.discard(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
