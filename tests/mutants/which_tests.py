"""Which tests may notice a fault in a line: those that run the line, and those that read it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

FOLDERS = ("tests/unit", "tests/contracts")
READERS = ["tests/unit/project/test_layout.py"]
"""Tests that read the code: annotations, dataclasses, imports."""


class WhichTests:
    """The lines that each unit and contract test runs, from one run of all of them.

    Raises `CalledProcessError` unless all pass."""

    def __init__(self, checkout: Path, modules: Iterable[str], num_jobs: int) -> None:
        packages = sorted({module.partition("/")[0] for module in modules})
        command = [sys.executable, "-m", "pytest", "-q", *FOLDERS]
        command += ["-n", str(num_jobs), "--dist", "worksteal"]
        command += ["--cov-context=test", "--cov-report="]
        command += [f"--cov={package}" for package in packages]
        subprocess.run(command, cwd=checkout, check=True)
        data = CoverageData(str(checkout / ".coverage"))
        data.read()
        self._importers = {module: _files_that_import(module, checkout) for module in modules}
        self._tests: dict[str, dict[int, set[str]]] = {}
        self._run_by_calls = {module: _lines_of_functions(checkout / module) for module in modules}
        for module in modules:
            tests: dict[int, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(str(checkout / module)).items():
                tests[line] = {context.rpartition("|")[0] for context in contexts} - {""}
            self._tests[module] = tests

    def of(self, module: str, first: int, last: int) -> list[str]:
        """Tests by id or file, the likeliest to notice a fault first.

        They are those that ran one of these lines. For lines that run at import, they are those
        that ran anything of the file or import it."""
        tests = self._tests[module]
        if first in self._run_by_calls[module]:
            found = set().union(*(tests[line] for line in range(first, last + 1)))
            return [*self._ordered(module, found), *READERS]
        files = self._importers[module]
        ran = {
            name
            for names in tests.values()
            for name in names
            if name.partition("::")[0] not in files
        }
        return [*READERS, *self._ordered(module, files | ran)]

    def _ordered(self, module: str, tests: set[str]) -> list[str]:
        own = Path(module).stem
        return sorted(
            tests - set(READERS), key=lambda name: (own not in name.partition("::")[0], name)
        )


def _files_that_import(module: str, checkout: Path) -> set[str]:
    name = module.removesuffix(".py").replace("/", ".")
    package, _, last = name.rpartition(".")
    imports = re.compile(
        rf"^\s*(from {name} import|import {name}\b|from {package} import .*\b{last}\b)",
        re.MULTILINE,
    )
    files = [path for folder in FOLDERS for path in (checkout / folder).rglob("test_*.py")]
    return {str(path.relative_to(checkout)) for path in files if imports.search(path.read_text())}


def _lines_of_functions(path: Path) -> set[int]:
    """All lines of the bodies of functions. The others run when the file is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)]
    return {
        line for node in found for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }
