"""Which tests run a line: the others cannot notice what is wrong with it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

FOLDERS = ("tests/unit", "tests/contracts")


class WhichTests:
    """What one run of the unit and contract tests ran, test by test. Raises `CalledProcessError` unless all pass."""

    def __init__(self, checkout: Path, modules: Iterable[str], num_jobs: int) -> None:
        packages = sorted({module.partition("/")[0] for module in modules})
        command = [sys.executable, "-m", "pytest", "-q", *FOLDERS, "-n", str(num_jobs), "--dist", "worksteal"]
        command += ["--cov-context=test", "--cov-report=", *(f"--cov={package}" for package in packages)]
        subprocess.run(command, cwd=checkout, check=True)
        data = CoverageData(str(checkout / ".coverage"))
        data.read()
        self._tests: dict[str, dict[int, set[str]]] = {}
        self._run_by_calls = {module: _lines_of_functions(checkout / module) for module in modules}
        for module in modules:
            tests: dict[int, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(str(checkout / module)).items():
                tests[line] = {context.rpartition("|")[0] for context in contexts} - {""}
            self._tests[module] = tests

    def of(self, module: str, first: int, last: int) -> list[str]:
        """Ids of the tests that ran one of these lines; of what runs at import, those that ran anything of the file."""
        tests = self._tests[module]
        lines = range(first, last + 1) if first in self._run_by_calls[module] else list(tests)
        found: set[str] = set().union(*(tests[line] for line in lines))
        own = Path(module).stem
        return sorted(found, key=lambda name: (own not in name.partition("::")[0], name))


def _lines_of_functions(path: Path) -> set[int]:
    """All lines of the bodies of functions: the others run when the file is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)]
    return {line for node in found for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
