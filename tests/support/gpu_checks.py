"""Checks of `scripts/gpu` that end in every way a check can, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Run, attempt, leave
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.registry import Check
from benchmarks.gpu.runner import Ended, Processes


def a_check(name: str, **fields: Any) -> Check:
    """`name` says how it ends; see `measure`."""
    values: dict[str, Any] = {"shows": f"{name}: shown", "means": "Passed: well.", "seconds": 60.0}
    values |= {"module": __name__, "needs_gpu": False, "is_timed": False}
    return Check(name=name, **(values | fields))


def measure(run: Run) -> None:
    """One figure first, then the end that the check is named after."""
    run.findings.fact("begun", 1, equals=1, is_key=True)
    match run.check.name:
        case "raises":
            raise RuntimeError("the engine is gone")
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            run.findings.detail(f"child {child.pid}")
            time.sleep(600)
        case "misses":
            run.findings.fact("rows lost", 3, equals=0)
        case "leaves":
            leave(0)
        case "times":
            run.findings.of_gpu("pause", 12.5, "ms", at_most=20, is_key=True)


class StartFake:
    """Starts the checks of this module as real processes."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.processes = Processes(device, directory, directory)
        self._device = device

    def __call__(
        self, check: Check, findings: Path, environ: dict[str, str], seconds: float
    ) -> Ended:
        command = [sys.executable, "-m", __name__, check.name, self._device, str(findings)]
        return self.processes.run(command, environ, seconds)


def main() -> None:
    name, device, path = sys.argv[1:]
    findings = Findings(Path(path), has_gpu=device == "cuda")
    run = Run(check=a_check(name), device=device, models=Path("none"), findings=findings)
    leave(0 if attempt(run, prepare=lambda: None) else 1)


if __name__ == "__main__":
    main()
