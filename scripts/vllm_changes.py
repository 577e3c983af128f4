#!/usr/bin/env python3
"""What changed between two releases of vLLM in the names this project uses.

    scripts/vllm_changes.py NEW [OLD]

NEW and OLD: a wheel, a folder with the package `vllm` in it, or a virtual environment; OLD is the
installed vLLM by default. Sources are compared as syntax trees: comments and layout do not count.
Nothing of vLLM is imported. The exit status is 1 where a part would be off.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.vllm import names, parts
from serving.vllm.source import Defined, SourceTree, installed

WIDTH = 10
PLACES_SHOWN = 3


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each name that changed, then the parts that would be off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("new", type=Path, help="a wheel, a folder, or a virtual environment")
    parser.add_argument("old", type=Path, nargs="?", help="the same; default: the installed vLLM")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        try:
            new = SourceTree(package(given.new, stack))
            old = SourceTree(package(given.old, stack)) if given.old else installed()
        except LookupError as error:
            parser.error(str(error.args[0]))
        lines = list(report(old, new))
        print("\n".join(lines))  # noqa: T201
        return any(": off: " in line for line in lines)


def package(given: Path, stack: ExitStack) -> Path:
    """The folder of the package `vllm`. Raises `LookupError` where there is none."""
    if given.suffix == ".whl":
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-")))
        with zipfile.ZipFile(given) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
        given = folder
    places = [given, given / "vllm", *given.glob("lib/python*/site-packages/vllm")]
    for place in places:
        if place.name == "vllm" and (place / "__init__.py").is_file():
            return place
    raise LookupError(f"{given} has no package vllm")


def report(old: SourceTree, new: SourceTree) -> Iterator[str]:
    """A line for each name that changed, a count of the others, and what that means by part."""
    num_same = 0
    groups = {**names.NAMES, "benches": names.BENCH_NAMES}
    for part, group in groups.items():
        for name in group:
            changes = compare(name.path, old, new)
            num_same += not changes
            yield from (f"{part:<{WIDTH}} {name.path}: {change}" for change in changes)
    yield f"{'unchanged':<{WIDTH}} {num_same} names"
    for part, group in groups.items():
        if problem := parts.missing(group, new):
            yield f"{part:<{WIDTH}}: off: {problem}"


def compare(path: str, old: SourceTree, new: SourceTree) -> list[str]:
    """What changed in one name; [] where nothing did."""
    was, found = _look(path, old), _look(path, new)
    if was is None or found is None:
        if was is found:
            return ["in neither release"]
        if found is not None:
            return ["new"]
        places = new.places_of(path.rpartition(":")[2].rpartition(".")[2])
        moved = f"; defined in {', '.join(places[:PLACES_SHOWN])}" if places else ""
        return [f"gone{moved}"]
    changes = []
    before, now = list(was.parameters()), list(found.parameters())
    if before != now:
        changes.append(f"signature changed: ({', '.join(before)}) -> ({', '.join(now)})")
    added, gone = found.fields() - was.fields(), was.fields() - found.fields()
    if added or gone:
        marks = [f"+{field}" for field in sorted(added)] + [f"-{field}" for field in sorted(gone)]
        changes.append(f"fields changed: {' '.join(marks)}")
    if stat := _stat(was.source(), found.source()):
        changes.append(f"source changed: {stat}")
    return changes


def _look(path: str, tree: SourceTree) -> Defined | None:
    try:
        return tree(path)
    except LookupError:
        return None


def _stat(before: str, now: str) -> str:
    diff = list(difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0))[2:]
    added = sum(line.startswith("+") for line in diff)
    removed = sum(line.startswith("-") for line in diff)
    return f"+{added} -{removed} of {len(before.splitlines())} lines" if added or removed else ""


if __name__ == "__main__":
    sys.exit(main())
