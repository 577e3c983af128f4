"""A name of vLLM that is gone or changed switches off the part that needs it, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osd.doctor import engine_parts
from osd.errors import SwapError
from serving.vllm import names, parts, source
from serving.vllm.names import NAMES, Name, Part
from tests.support.fake_vllm import write_vllm

USED_ON_V1 = [part for part in NAMES if not part.endswith("_v2")]


def own_name(part: Part) -> str:
    """A name that no other part needs."""
    others = {name.path for other in NAMES if other != part for name in NAMES[other]}
    classes = {path.rpartition(".")[0] for path in others if "." in path.partition(":")[2]}
    own = [n.path for n in NAMES[part] if n.path not in others and n.path not in classes]
    return own[-1]


@pytest.mark.parametrize("part", NAMES)
def test_a_name_that_is_gone_is_missed_by_its_part_alone(tmp_path: Path, part: Part) -> None:
    gone = own_name(part)
    look = source.SourceTree(write_vllm(tmp_path, without=gone))
    problems = {p: problem for p in NAMES if (problem := parts.problem_with(p, look))}
    assert problems == {part: f"there is no {gone} any more"}


@pytest.mark.parametrize("part", USED_ON_V1)
def test_the_doctor_says_which_part_is_off_and_what_that_means(tmp_path: Path, part: Part) -> None:
    gone = own_name(part)
    look = source.SourceTree(write_vllm(tmp_path, without=gone))
    num_ranks = 2 if part == "memory_ranks" else 1
    checks = list(engine_parts.check_parts("vllm-cpu", {}, look, num_ranks=num_ranks))
    assert [(check.name, check.ok) for check in checks] == [(part, False)]
    assert checks[0].text == f"off: there is no {gone} any more; {parts.CONSEQUENCES[part]}"


def test_the_doctor_finds_a_whole_vllm_whole(tmp_path: Path) -> None:
    look = source.SourceTree(write_vllm(tmp_path))
    (check,) = engine_parts.check_parts("vllm-cpu", {}, look)
    assert check.ok is True and check.text.startswith("server, capture, swap, heads, control, ")


def test_the_doctor_asks_for_what_will_run(tmp_path: Path) -> None:
    """The names of V2 where the environment asks for V2, and on a GPU none of the CPU's repairs."""
    look = source.SourceTree(write_vllm(tmp_path, without=own_name("capture_v2")))
    on_v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert [c.name for c in engine_parts.check_parts("vllm", on_v2, look)] == ["capture_v2"]
    assert [c.name for c in engine_parts.check_parts("vllm-cpu", on_v2, look)] == ["parts"]
    look = source.SourceTree(write_vllm(tmp_path, without=own_name("memory_ranks")))
    assert [c.name for c in engine_parts.check_parts("vllm", {}, look)] == ["parts"]
    (tmp_path / "gpu").mkdir()
    look = source.SourceTree(write_vllm(tmp_path / "gpu", without=own_name("repairs")))
    assert [c.name for c in engine_parts.check_parts("vllm", {}, look)] == ["parts"]


class Definition:
    """`def f(self, a)` in a class with one field."""

    def parameters(self) -> list[str]:
        return ["self", "a"]

    def fields(self) -> set[str]:
        return {"k"}

    def source(self) -> str:
        return "def f(self, a): return self.x"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (Name("m:f", takes=("self", "a"), has=("k",), says=("self.x",)), ""),
        (Name("m:f", takes=("self", "b")), "m:f no longer takes (self, b)"),
        (Name("m:f", has=("k", "n")), "m:f no longer has n"),
        (Name("m:f", says=("self.y",)), "the source of m:f no longer says `self.y`"),
    ],
)
def test_what_changed_is_named(name: Name, problem: str) -> None:
    assert parts.missing([name], lambda path: Definition()) == problem


def test_an_import_that_fails_in_any_way_is_a_problem() -> None:
    def look(path: str) -> Any:
        raise OSError("libtorch.so: cannot open shared object file")

    found = parts.missing([Name("m:f")], look)
    assert found == "OSError: libtorch.so: cannot open shared object file"


def test_names_are_imported_where_nothing_else_is_said() -> None:
    assert parts.missing([Name("osd.errors:SwapError"), Name("osd.common.clock:X")]) == (
        "AttributeError: module 'osd.common.clock' has no attribute 'X'"
    )
    here = "serving.vllm.parts:Imported"
    assert parts.missing([Name(f"{here}.__init__", takes=("self", "path"), says=("path",))]) == ""
    assert parts.missing([Name(f"{here}.run")]) == f"there is no {here}.run any more"
    assert parts.missing([Name("serving.vllm.name:Name", has=("path", "takes"))]) == ""
    assert "no longer has kind" in parts.missing([Name("serving.vllm.name:Name", has=("kind",))])


def test_a_part_that_fails_to_start_is_off_and_our_own_errors_are_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parts, "problem_with", lambda part: "gone" if part == "sleep_v2" else "")
    off: dict[str, str] = {}
    assert parts.start(off, "swap", lambda: 3) == 3 and off == {}

    def fails() -> None:
        raise KeyError("x")

    assert parts.start(off, "swap", fails) is None
    assert parts.start(off, "sleep", lambda: 3, check="sleep_v2") is None
    assert off == {
        "swap": f"KeyError: 'x'; {parts.CONSEQUENCES['swap']}",
        "sleep": f"gone; {parts.CONSEQUENCES['sleep_v2']}",
    }
    assert f"sleep is off, serving is not affected: {off['sleep']}" in caplog.text

    def refuses() -> None:
        raise SwapError("a head")

    with pytest.raises(SwapError, match="a head"):
        parts.start(off, "swap", refuses)


def test_definitions_are_found_below_conditions_and_through_imports(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "a").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "a" / "__init__.py").write_text(
        "from .b import f as g\nfrom vllm.a.b import C, gone\nfrom torch import nn\n"
    )
    (package / "a" / "b.py").write_text(
        "try:\n    import x\nexcept ImportError:\n    def f(one, *, two): ...\n"
        "class Base:\n    first: int\n"
        "class C(Base):\n    second: int = 2\n"
        "    if True:\n        @classmethod\n        def make(cls, three): ...\n"
        "LIMIT = 3\n"
    )
    tree = source.SourceTree(package)
    assert tree("vllm.a:g").parameters() == ["one", "two"]
    assert tree("vllm.a:C").fields() == {"first", "second"}
    assert tree("vllm.a:C.make").parameters() == ["three"]
    assert tree("vllm.a.b:LIMIT").source() == "LIMIT = 3" and tree("vllm.a:nn").fields() == set()
    for gone in ("vllm.a:gone", "vllm.a:C.run", "vllm.c:f"):
        with pytest.raises(LookupError, match=f"there is no {gone} any more"):
            tree(gone)
    with pytest.raises(LookupError, match="no package of vLLM"):
        source.SourceTree(tmp_path)


def test_each_part_says_what_its_loss_means() -> None:
    assert set(parts.CONSEQUENCES) == set(NAMES) and names.TESTED_VERSIONS
