"""`osd bench NAME`: runs one bench, keeps its files, prints its table."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import BENCHES
from benchmarks.plot import page
from benchmarks.record import Options
from benchmarks.result import Result, table
from osd.common import machine
from osd.common.files import locked
from osd.errors import ConfigError

TUNABLES = "GLIBC_TUNABLES"


def run(
    name: str,
    *,
    quick: bool,
    out: Path | None,
    say: Callable[[str], None],
    traces: Path | None = None,
    only: Sequence[str] = (),
) -> Result:
    """Run the bench `name` and write its files to `out`, by default a new directory under
    `bench-results/`. `traces`: for a bench of `READ_TRACES`; `only`: for one of `IN_PARTS`."""
    directory = out or Path("bench-results") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            is_ours = stack.enter_context(locked(directory / ".lock", wait=False))
        except OSError as error:
            raise ConfigError(
                f"--out {directory}: cannot be written ({error.strerror}); choose another directory"
            ) from None
        if not is_ours:
            raise ConfigError(
                f"--out {directory}: another run writes there; wait for it, or choose another "
                "directory"
            )
        given = Options(directory=directory, quick=quick, traces=traces, only=tuple(only), say=say)
        return _run(name, given)


def _run(name: str, options: Options) -> Result:
    _hand_on_the_path()
    # By default SIGTERM ends Python without a word to the servers a bench has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started, cpu_before = time.perf_counter(), machine.cpu_seconds()
    directory, say = options.directory, options.say
    module, _ = BENCHES[name]
    result: Result = importlib.import_module(f"benchmarks.{module}").run(options)
    seconds, cpu_after = time.perf_counter() - started, machine.cpu_seconds()
    cores = {who: (cpu_after[who] - cpu_before[who]) / seconds for who in cpu_after}
    whole = result.as_dict() | {"seconds": seconds, "busy_cores": cores}
    (directory / "result.json").write_text(json.dumps(whole, indent=2) + "\n")
    (directory / "report.html").write_text(page(result, machine.describe()))
    say(table(result))
    say(
        f"cores busy: {cores['machine']:.2f} on the machine, {cores['bench']:.2f} of them with "
        "this bench"
    )
    say(f"{seconds:.0f} s; raw runs, protocol and report.html: {directory}")
    return result


def begin_in_huge_pages() -> None:
    """Begin this process anew with its memory in huge pages (glibc's `malloc.hugetlb`), and all
    that it starts. In small ones two engines alike differ by up to 6 % for as long as they live, by
    where their weights came to lie; in huge ones by 1 to 2 %. A process that has been told how to
    allocate is left as it is."""
    if sys.platform == "linux" and TUNABLES not in os.environ:
        os.environ[TUNABLES] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _hand_on_the_path() -> None:
    """Processes that a bench starts find the benches too, wherever it was called."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
