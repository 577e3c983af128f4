"""The figures of the project's structure. `python -m tests.figures` prints them."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.support.paths import ROOT

PACKAGES = ("osd", "serving", "trainer", "buffers")
"""The product."""
LABORATORY = "benchmarks"

Arrow = tuple[str, str]
"""(room that imports, room that is imported)."""


# Rooms and what they import


def room_of(module: str) -> str:
    """`osd.X` for what is in osd, else the package. `osd` itself only holds rooms."""
    package, *inner = module.split(".")
    is_inside = package == "osd" and inner not in ([], ["__main__"])
    return f"osd.{inner[0]}" if is_inside else package


def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def rooms(graph: grimp.ImportGraph) -> set[str]:
    return {room_of(module) for module in graph.modules} - {"osd"}


def arrows(graph: grimp.ImportGraph) -> set[Arrow]:
    """Pairs of different rooms of which the first imports something of the second."""
    pairs = {
        (room_of(module), room_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return {(room, other) for room, other in pairs if room != other and "osd" not in (room, other)}


def circles(arrows: Iterable[Arrow]) -> list[set[str]]:
    """Groups of rooms that all import each other, over whatever other rooms."""
    below = _below(arrows)
    found: list[set[str]] = []
    for room in sorted(below):
        circle = {other for other in below[room] if room in below.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def _below(arrows: Iterable[Arrow]) -> dict[str, set[str]]:
    """Room -> all rooms that it imports, directly or over others."""
    below: dict[str, set[str]] = {}
    for room, other in arrows:
        below.setdefault(room, set()).add(other)
    is_growing = True
    while is_growing:
        is_growing = False
        for reached in below.values():
            further = set().union(*(below.get(room, set()) for room in reached))
            is_growing |= not further <= reached
            reached |= further
    return below


def layers(rooms: Iterable[str], arrows: Iterable[Arrow]) -> list[set[str]]:
    """Rooms by the longest chain of imports below them, the lowest first.

    Raises `graphlib.CycleError` where there is a circle."""
    imported: dict[str, set[str]] = {room: set() for room in rooms}
    for room, other in arrows:
        imported[room].add(other)
    height: dict[str, int] = {}
    for room in TopologicalSorter(imported).static_order():
        height[room] = 1 + max((height[other] for other in imported[room]), default=-1)
    num = 1 + max(height.values(), default=-1)
    return [{room for room in height if height[room] == i} for i in range(num)]


# Files and functions


@dataclass(frozen=True)
class Function:
    """A function or method. `num_lines`: from its `def` to its last line."""

    place: str
    num_lines: int


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def folders() -> dict[str, list[Path]]:
    """Folder of product and laboratory -> its own modules. `__init__.py` stands for the folder."""
    found: dict[str, list[Path]] = {}
    for package in (*PACKAGES, LABORATORY):
        for file in files(package):
            modules = found.setdefault(str(file.parent.relative_to(ROOT)), [])
            if file.name != "__init__.py":
                modules.append(file)
    return found


def functions() -> list[Function]:
    """All functions and methods of the product."""
    return [
        Function(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", _length(node))
        for package in PACKAGES
        for file in files(package)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


# As text


def main() -> None:
    _print_rooms()
    _print_folders()
    _print_functions()


def _print_rooms() -> None:
    graph = import_graph()
    found, drawn = rooms(graph), arrows(graph)
    print(f"{len(found)} rooms: {', '.join(sorted(found))}")
    print(f"{len(drawn)} arrows between them, {len(circles(drawn))} circles")
    for circle in circles(drawn):
        print(f"  circle: {', '.join(sorted(circle))}")
    if not circles(drawn):
        _print_layers(layers(found, drawn))


def _print_layers(found: list[set[str]]) -> None:
    print(f"{len(found)} layers of imports, the highest first:")
    for layer in reversed(found):
        print(f"  {', '.join(sorted(layer))}")


def _print_folders() -> None:
    print(f"\n{'folder':30} {'modules':>7}  longest")
    for folder, modules in sorted(folders().items()):
        longest = max(modules, key=num_lines, default=None)
        name = f"{longest.name} {num_lines(longest)}" if longest else ""
        print(f"{folder:30} {len(modules):7}  {name}")


def _print_functions() -> None:
    total = {package: sum(map(num_lines, files(package))) for package in PACKAGES}
    parts = ", ".join(f"{package} {num:,}" for package, num in total.items())
    print(f"\n{sum(total.values()):,} lines of Python: {parts}")
    found = functions()
    lengths = sorted(function.num_lines for function in found)
    longest = max(found, key=lambda function: function.num_lines)
    print(f"{len(found):,} functions, in lines: median {statistics.median(lengths):g}", end=", ")
    print(f"90th percentile {statistics.quantiles(lengths, n=10)[-1]:g}", end=", ")
    print(f"longest {longest.num_lines} ({longest.place})")


if __name__ == "__main__":
    main()
