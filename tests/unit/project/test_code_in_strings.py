"""Tests run pieces of code in processes of their own, as strings: no linter reads their imports."""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

OURS = ("osd", "serving", "buffers", "trainer", "benchmarks", "tests")


def code_in(path: Path) -> Iterator[ast.Module]:
    """Every string of a file that is Python and imports something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and "import " in str(node.value):
            try:
                yield ast.parse(textwrap.dedent(str(node.value)))
            except SyntaxError:
                continue


def names_of_ours(code: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of what it imports from this project; the name is "" for a whole module."""
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return {pair for pair in found if pair[0].split(".")[0] in OURS}


IMPORTS = sorted(
    {
        pair
        for folder in ("tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for code in code_in(path)
        for pair in names_of_ours(code)
    }
)


def test_some_are_found() -> None:
    assert len(IMPORTS) > 20


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_what_they_import_is_there(module: str, name: str) -> None:
    loaded = importlib.import_module(module)
    if name and not hasattr(loaded, name):
        importlib.import_module(f"{module}.{name}")
