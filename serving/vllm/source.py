"""vLLM's source as it lies on disk: where a name is defined, without importing vLLM."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path


class SourceTree:
    """The package `vllm` in a directory. Calling it with a name gives its definition."""

    def __init__(self, package: Path) -> None:
        if not (package / "__init__.py").is_file():
            raise LookupError(f"{package} is no package of vLLM: it has no __init__.py")
        self._package = package
        self._parse = cache(lambda path: ast.parse(path.read_text()))

    def __call__(self, path: str) -> Defined:
        """Raises `LookupError` when the name is gone."""
        module, _, attribute = path.partition(":")
        first, *others = attribute.split(".")
        if found := self.in_module(module, first):
            module, node = found
            for part in others:
                node = node and self._in_body(node, part)
            if node is not None:
                return Defined(self, module, node)
        raise LookupError(f"there is no {path} any more")

    def places_of(self, name: str) -> list[str]:
        """Modules with a function or class of this name."""
        found = re.compile(rf"^\s*(async )?(def|class) {re.escape(name)}\b", re.MULTILINE)
        files = sorted(
            file for file in self._package.rglob("*.py") if found.search(file.read_text())
        )
        return [
            ".".join(("vllm", *file.relative_to(self._package).with_suffix("").parts))
            for file in files
        ]

    def in_module(self, module: str, name: str) -> tuple[str, ast.stmt | None] | None:
        """The module with the definition, and the definition, through the imports of modules that
        pass it on."""
        if (file := self._file(module)) is None:
            return None
        found = self._in_body(self._parse(file), name)
        if not isinstance(found, ast.ImportFrom):
            return module, found
        own = next(a.name for a in found.names if (a.asname or a.name) == name)
        origin = self._absolute(module, file, found)
        return self.in_module(origin, own) if origin.split(".")[0] == "vllm" else (module, found)

    @staticmethod
    def _in_body(node: ast.AST, name: str) -> ast.stmt | None:
        return next((each for each in _statements(node) if name in _names_of(each)), None)

    def _file(self, module: str) -> Path | None:
        below = self._package.joinpath(*module.split(".")[1:])
        return next(
            (f for f in (below.with_suffix(".py"), below / "__init__.py") if f.is_file()), None
        )

    @staticmethod
    def _absolute(module: str, file: Path, found: ast.ImportFrom) -> str:
        if not found.level:
            return found.module or ""
        parts = module.split(".")
        up = found.level - (file.name == "__init__.py")
        return ".".join([*parts[: len(parts) - up], *([found.module] if found.module else [])])


class Defined:
    """A definition in a `SourceTree`."""

    def __init__(self, tree: SourceTree, module: str, node: ast.stmt) -> None:
        self._tree, self._module, self.node = tree, module, node

    def parameters(self) -> Sequence[str]:
        """Names of a function's parameters in order, `cls` of a class method left out."""
        if not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return ()
        given = self.node.args
        found = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return found[1:] if found[:1] == ["cls"] else found

    def fields(self) -> set[str]:
        """Annotated names in the body of a class and of its bases in the same module."""
        if not isinstance(self.node, ast.ClassDef):
            return set()
        found = {
            each.target.id
            for each in _statements(self.node)
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        for base in self.node.bases:
            if isinstance(base, ast.Name) and base.id != self.node.name:
                module, node = self._tree.in_module(self._module, base.id) or ("", None)
                found |= Defined(self._tree, module, node).fields() if node else set()
        return found

    def source(self) -> str:
        """Its code, without comments and in one layout, so that two releases can be compared."""
        return ast.unparse(self.node)


def installed() -> SourceTree:
    """The installed vLLM. Raises `LookupError` without one."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        raise LookupError("vllm is not installed")
    return SourceTree(Path(spec.origin).parent)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Those of a body, and those below `if`, `else`, `try` and `except` in it."""
    for block in ("body", "orelse", "handlers", "finalbody"):
        for each in getattr(node, block, []):
            if isinstance(each, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(each)
            else:
                yield each


def _names_of(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign():
            return {node.target.id} if isinstance(node.target, ast.Name) else set()
    return set()
