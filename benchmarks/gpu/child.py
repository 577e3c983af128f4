"""`python -m benchmarks.gpu.child NAME`: one check in a process of its own. What it finds goes to a
file, what it prints to its log."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import registry
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.registry import Check

CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a check is told."""

    check: Check
    device: str
    """`cpu` or `cuda`"""
    models: Path
    """Where `benchmarks/gpu/pairs.py` has put the models."""
    findings: Findings

    @property
    def has_gpu(self) -> bool:
        return self.device == CUDA

    def pick(self, on_gpu: int, on_cpu: int) -> int:
        """A size: a real one with a GPU, a small one without."""
        return on_gpu if self.has_gpu else on_cpu


def main() -> None:
    """Run the check, and leave without waiting for threads or for engines to be taken down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.child")
    parser.add_argument("name")
    parser.add_argument("--device", choices=(CPU, CUDA), required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--findings", type=Path, required=True)
    arguments = parser.parse_args()
    check = registry.find(arguments.name)
    findings = Findings(arguments.findings, has_gpu=arguments.device == CUDA)
    run = Run(check=check, device=arguments.device, models=arguments.models, findings=findings)
    leave(0 if attempt(run) else 1)


def prepare() -> None:
    """The environment of engines, before torch is imported. Warnings go to the log."""
    from benchmarks.engines import engine

    engine.prepare()
    os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def attempt(run: Run, prepare: Callable[[], None] = prepare) -> bool:
    """Whether the check came to its end. An exception goes to the findings and the log."""
    try:
        prepare()
        importlib.import_module(run.check.module).measure(run)
    except Exception as error:  # noqa: BLE001  it is the verdict of this check
        traceback.print_exc()
        run.findings.error(f"{type(error).__name__}: {error}")
        return False
    run.findings.done()
    return True


def leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
