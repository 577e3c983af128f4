"""`python -m tests.mutants`: tries the mutants that are drawn.

The exit status is 1 when more survive than may, or when a file is missing."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Value
from pathlib import Path

from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkResult

from tests.mutants.drawing import MODULES, MissingModules, check, draw, mutants_of
from tests.mutants.which_tests import WhichTests

ROOT = Path(__file__).parents[2]
MOST_SURVIVING = 0.08
SECONDS_FOR_A_TEST, SECONDS_FOR_A_MUTANT = 60, 600.0
"""Longer than they take. A mutant that hangs counts as noticed."""
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--no-cov", f"--timeout={SECONDS_FOR_A_TEST}"]

_number = Value("i", 0)


def main() -> int:
    description = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=description)
    parser.add_argument(
        "modules", nargs="*", default=MODULES, help="files to try (default: the fixed list)"
    )
    parser.add_argument("--num", type=int, default=300, help="how many mutants (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="how many at a time (default: a core each)"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkouts = [_checkout(Path(folder) / str(i)) for i in range(given.jobs)]
        os.chdir(checkouts[0])
        try:
            check(given.modules, checkouts[0])
        except MissingModules as error:
            sys.exit(f"python -m tests.mutants: {error}")
        sizes = {module: len(Path(module).read_text().splitlines()) for module in given.modules}
        drawn = draw(
            mutants_of(given.modules, Path(folder) / "session.sqlite"), sizes, given.num, given.seed
        )
        which = WhichTests(checkouts[0], given.modules, given.jobs)
        jobs = [(mutant, which.of(str(mutant.module_path), *_lines(mutant))) for mutant in drawn]
        with ProcessPoolExecutor(given.jobs, initializer=_work_in, initargs=(checkouts,)) as pool:
            results = []
            for (mutant, _), result in zip(jobs, pool.map(_try, jobs), strict=True):
                results.append((mutant, result))
                what = "noticed" if _is_noticed(result) else "SURVIVED"
                place = f"{mutant.module_path}:{mutant.start_pos[0]}"
                print(f"{len(results)}/{len(jobs)} {place} {what}", file=sys.stderr, flush=True)
    return _report(results)


def _checkout(folder: Path) -> Path:
    """A clone of what is committed. Mutants are written into its files."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


def _work_in(checkouts: list[Path]) -> None:
    with _number.get_lock():
        os.chdir(checkouts[_number.value])
        _number.value += 1


def _lines(mutant: MutationSpec) -> tuple[int, int]:
    return mutant.start_pos[0], mutant.end_pos[0]


def _try(job: tuple[MutationSpec, list[str]]) -> WorkResult:
    mutant, tests = job
    chosen = Path("chosen-tests.txt")
    chosen.write_text("\n".join([*OPTIONS, *tests]))
    command = f"{shlex.quote(sys.executable)} -m pytest @{chosen}" if tests else "true"
    return mutate_and_test([mutant], command, SECONDS_FOR_A_MUTANT)


def _is_noticed(result: WorkResult) -> bool:
    """Whether a test failed. A mutant that could not be tried counts as not noticed."""
    return result.test_outcome is TestOutcome.KILLED


def _report(results: list[tuple[MutationSpec, WorkResult]]) -> int:
    tried = Counter(str(mutant.module_path) for mutant, _ in results)
    survivors = [(mutant, result) for mutant, result in results if not _is_noticed(result)]
    survived = Counter(str(mutant.module_path) for mutant, _ in survivors)
    print("| module | tried | survived |\n|---|---|---|")
    for module, num in tried.items():
        print(f"| `{module}` | {num} | {survived[module]} |")
    share = len(survivors) / len(results)
    print(f"| all | {len(results)} | {len(survivors)} ({100 * share:.1f} %) |")
    for number, (mutant, result) in enumerate(survivors, 1):
        changed = [line for line in (result.diff or "").splitlines()[3:] if line[:1] in "+-"]
        print(f"\n{number}. {mutant.module_path}:{mutant.start_pos[0]}", *changed, sep="\n    ")
    return int(share > MOST_SURVIVING)


if __name__ == "__main__":
    sys.exit(main())
