"""`scripts/vllm_changes.py` on two small trees."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.fake_vllm import write_vllm
from tests.support.paths import ROOT

FILE = ROOT / "scripts" / "vllm_changes.py"
CORE = "vllm.v1.engine.core:EngineCore.post_step"


@pytest.fixture(scope="module")
def changes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_changes", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_vllm(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_vllm(tmp_path / "new")


def lines(changes: ModuleType, capsys: pytest.CaptureFixture[str], *given: Path) -> list[str]:
    changes.main([str(path) for path in given])
    return capsys.readouterr().out.splitlines()


def edit(package: Path, module: str, before: str, after: str) -> None:
    file = package.joinpath(*module.split(".")[1:]) / "__init__.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_two_releases_that_differ_in_nothing(
    changes: ModuleType, capsys: pytest.CaptureFixture[str], old: Path, new: Path
) -> None:
    edit(new, "vllm.v1.engine.core", "        pass", "        pass  # a comment\n\n")
    assert changes.main([str(new.parent), str(old.parent)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("unchanged ")


def test_what_changed_is_told_name_by_name(
    changes: ModuleType, capsys: pytest.CaptureFixture[str], old: Path, new: Path
) -> None:
    edit(new, "vllm.v1.engine.core", "(self, model_executed)", "(self, model_executed, now=0)")
    edit(new, "vllm.v1.spec_decode.metadata", "logits_indices: int", "logits_rows: int")
    edit(new, "vllm.forward_context", "        pass", "        one = 1\n        return one")
    found = lines(changes, capsys, new.parent, old.parent)
    post_step = [line for line in found if CORE in line]
    assert post_step == [
        f"control    {CORE}: signature changed: (self, model_executed) -> "
        "(self, model_executed, now)",
        f"control    {CORE}: source changed: +1 -1 of 2 lines",
    ]
    context = (
        "sleep      vllm.forward_context:set_forward_context: source changed: +2 -1 of 2 lines"
    )
    assert context in found
    metadata = "vllm.v1.spec_decode.metadata:SpecDecodeMetadata"
    fields = "+bonus_logits_rows +logits_rows -bonus_logits_indices -logits_indices"
    assert f"capture    {metadata}: fields changed: {fields}" in found
    gone = f"{metadata} no longer has bonus_logits_indices"
    assert found[-2:] == [f"capture   : off: {gone}", f"sleep     : off: {gone}"]


def test_a_name_that_moved_is_found_where_it_is_now_and_its_part_would_be_off(
    changes: ModuleType, capsys: pytest.CaptureFixture[str], old: Path, tmp_path: Path
) -> None:
    gone = "vllm.forward_context:set_forward_context"
    new = write_vllm(tmp_path / "new", without=gone)
    (new / "context.py").write_text("def set_forward_context(attn_metadata, vllm_config): ...")
    assert changes.main([str(new), str(old)]) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[0] == f"sleep      {gone}: gone; defined in vllm.context"
    assert found[2:] == [f"sleep     : off: there is no {gone} any more"]


def test_a_wheel_and_a_virtual_environment_are_read_too(
    changes: ModuleType, capsys: pytest.CaptureFixture[str], old: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in old.rglob("*.py"):
            archive.write(file, file.relative_to(old.parent))
    venv = tmp_path / "venv"
    write_vllm(venv / "lib" / "python3.11" / "site-packages")
    (line,) = lines(changes, capsys, wheel, venv)
    assert line.startswith("unchanged ")


def test_a_folder_without_vllm_is_refused(
    changes: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        changes.main([str(tmp_path)])
    assert ended.value.code == 2
    assert f"{tmp_path} has no package vllm" in capsys.readouterr().err
