"""Processes of a dry run: forked from one that has imported vLLM, which on a CPU takes longer than
most checks. With a GPU each check begins afresh, since vLLM reads some switches when it is imported
(`runner.Processes`)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

from benchmarks.engines.engine import ENVIRONMENT
from benchmarks.gpu import child, registry
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.registry import Check
from benchmarks.gpu.runner import Ended, Processes

IMPORTED_ONCE = ["benchmarks.gpu.engines", "vllm.entrypoints.llm"]


class Forked(Processes):
    """As `Processes`, on the CPU alone."""

    def __init__(self, models: Path, directory: Path) -> None:
        super().__init__(child.CPU, models, directory)
        os.environ.update(ENVIRONMENT)  # read when torch and vLLM are imported
        # A check leaves without cleaning up; Python's tracker does that, and need not say so.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED_ONCE)

    def start(self, check: Check, findings: Path, environ: dict[str, str], seconds: float) -> Ended:
        """As `Start`."""
        if self.is_over:
            return Ended(status=None, log="")
        log = self.directory / f"log-{threading.get_ident()}-{time.monotonic_ns()}"
        process = self._context.Process(
            target=_work, args=(check.name, self.models, findings, environ, log)
        )
        process.start()
        assert process.pid is not None
        with self.listed(process.pid):
            process.join(seconds)
            status = process.exitcode
        process.kill()  # where it had not yet become the leader of its group
        process.join()
        return Ended(status=status, log=log.read_text(errors="replace") if log.exists() else "")


def _work(name: str, models: Path, findings: Path, environ: Mapping[str, str], log: Path) -> None:
    """What `python -m benchmarks.gpu.child` does, in a process that is there already."""
    os.setsid()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.environ |= environ
    check = registry.find(name)
    found = Findings(findings, has_gpu=False)
    run = child.Run(check=check, device=child.CPU, models=models, findings=found)
    child.leave(0 if child.attempt(run) else 1)
