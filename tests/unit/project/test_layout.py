"""The shape of the code: its imports, what importing costs, its docstrings and dataclasses."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("osd", "serving", "buffers", "trainer", "benchmarks")


@cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]
    return [(name, ast.parse(path.read_text())) for name, path in zip(names, paths, strict=True)]


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere in a file, but for those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        else:
            yield from imports(node)


FORBIDDEN = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "torch.load",
    "yaml.load",
    "eval",
    "exec",
}
"""What makes code of data."""


def is_of_tensors_alone(call: ast.Call) -> bool:
    """Whether it is `torch.load(..., weights_only=True)`, which unpickles nothing but tensors."""
    return ast.unparse(call.func) == "torch.load" and any(
        word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords
    )


def test_nothing_of_ours_makes_code_of_data() -> None:
    found = []
    for name, tree in modules():
        found += [f"{name} imports {i}" for i in imports(tree) if i.split(".")[0] in FORBIDDEN]
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and not is_of_tensors_alone(node)
            if is_call and ast.unparse(node.func) in FORBIDDEN:
                found.append(f"{name}:{node.lineno} calls {ast.unparse(node.func)}")
            is_trust = isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
            if is_trust and ast.unparse(node.value) != "False":
                found.append(f"{name}:{node.value.lineno} sets trust_remote_code")
    assert not found


@pytest.mark.parametrize(
    "module",
    [
        "osd.cli",
        "osd.config.reading",
        "osd.records",
        "osd.control.controller",
        "osd.observe.dashboard",
        "benchmarks.runner",
    ],
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    heavy = ("torch", "vllm", "ray", "transformers")
    code = f"import {module}, sys; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def test_help_answers_at_once() -> None:
    """Within a few times of what the library of the command line takes; torch alone would be tens
    of times."""

    def best_of_three(*arguments: str) -> float:
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True, cwd=ROOT)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    assert best_of_three("-m", "osd", "--help") < 4 * best_of_three("-c", "import typer")


def test_each_of_our_names_is_ours() -> None:
    owners = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        assert set(owners.get(package, [])) <= {"online-speculative-distillation"}, (
            f"{package} has other owners"
        )
        module = __import__(package)
        assert Path(module.__file__ or "").resolve().is_relative_to(ROOT), (
            f"{package} is loaded from {module.__file__}"
        )


def test_every_module_and_public_class_says_what_it_is_for() -> None:
    missing = []
    for name, tree in modules():
        if not ast.get_docstring(tree):
            missing.append(name)
        for node in tree.body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                missing.append(f"{name}.{node.name}")
    assert not missing


def test_annotations_are_made_of_names_and_alternatives() -> None:
    """Python never evaluates them, so nothing else sees what else would stand there."""
    wrong = []
    for name, tree in modules():
        for annotation in annotations(tree):
            if ast.unparse(annotation).startswith("Annotated["):
                continue  # pydantic and typer read it
            for node in ast.walk(annotation):
                is_alternative = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
                if (
                    isinstance(node, ast.expr)
                    and not is_alternative
                    and not isinstance(node, NAMES)
                ):
                    wrong.append(f"{name}:{node.lineno} {ast.unparse(annotation)}")
    assert wrong == []


NAMES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant)


def annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


STATE = {
    "trainer.eagle3.layer.Chain",
    "osd.demo.story.Story",
    "osd.evaluate.drive._Open",
    "osd.evaluate.recorder.Seen",
    "osd.control.drift.FadingAlpha",
    "osd.control.drift.Watched",
    "osd.control.recall.LookTimes",
    "osd.offline.recorded.Recorded",
    "serving.capture.assemble.Schedule",
    "serving.capture.assemble.Step",
    "serving.capture.capture._Live",
    "serving.speculation.net.Window",
    "serving.capture.pick.Landed",
    "serving.capture.pick._FromDevice",
    "serving.speculation.probes.Probe",
    "serving.capture.rows.Rows",
    "serving.capture.running.RunningRequest",
    "serving.speculation.step_seen.Scheduled",
    "serving.speculation.step_seen.StepSeen",
    "serving.speculation.requests._Request",
    "serving.speculation.step_times._Cell",
    "serving.swap.swap.Staging",
    "serving.capture.windows.WindowCounter",
    "buffers.memory._Domain",
    "buffers.redis_writer._Tally",
    "trainer.loop._Progress",
    "osd.control.canary._Trial",
    "osd.control.payback._Engine",
    "osd.control.round_effects.Attempts",
    "osd.control.round_effects.Fading",
    "osd.control.round_effects.Gain",
    "osd.control.round_effects.Pace",
    "osd.control.round_effects.Progress",
    "osd.control.replica_watch._Known",
    "osd.control.rollback._Judged",
    "osd.service.fleet.engines.Started",
    "osd.service.fleet.fleet._Replica",
}
"""Dataclasses that change, or are made so often that freezing them would be felt; all others are
values."""


def test_values_do_not_change_and_have_no_other_fields() -> None:
    found = {
        f"{name}.{cls.name}": options
        for name, tree in modules()
        for cls, options in dataclasses_of(tree)
    }
    product = {
        name: options for name, options in found.items() if not name.startswith("benchmarks")
    }
    assert {name for name, options in product.items() if "slots" not in options} == set()
    assert {name for name, options in product.items() if "frozen" not in options} == STATE


def dataclasses_of(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """Each with those of its options that are true."""
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else []:
            call = decorator if isinstance(decorator, ast.Call) else None
            if ast.unparse(call.func if call else decorator) == "dataclass":
                keywords = call.keywords if call else []
                yield node, {str(k.arg) for k in keywords if ast.unparse(k.value) == "True"}


UNEVEN = {
    "buffers.redis_writer": 1,
    "osd.observe.series": 2,
    "osd.observe.status": 1,
    "serving.speculation.acceptance_breakdown": 1,
    "serving.speculation.step_times": 1,
}
"""Where what is gone through together may be of different lengths, and how often."""


def test_what_is_gone_through_together_is_of_one_length() -> None:
    """Else values would be lost without a word."""
    calls = [
        (name, n) for name, tree in modules() for n in ast.walk(tree) if isinstance(n, ast.Call)
    ]
    zips = [(name, ast.unparse(call)) for name, call in calls if ast.unparse(call.func) == "zip"]
    uneven = Counter(name for name, text in zips if not text.endswith("strict=True)"))
    assert {
        name: num for name, num in uneven.items() if not name.startswith("benchmarks")
    } == UNEVEN


def test_no_file_speaks_of_machines_or_registries() -> None:
    command = ["git", "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    kinds = {".py", ".md", ".yaml", ".toml", ".sh", ".txt", ""}
    machine = re.compile(r"(^|[\s\"'=(])/(work|root|home)/\w|(extra-)?index-url\s*=")
    wrong = []
    for name in listed.stdout.split():
        path = ROOT / name
        if path == Path(__file__):
            continue  # it holds the pattern itself
        if path.suffix not in kinds or not path.exists():
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if machine.search(line):
                wrong.append(f"{name}:{number}")
    assert not wrong
