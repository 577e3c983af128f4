"""Which faults `make mutants` puts into the code, and in which files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.drawing import MODULES, MissingModules, check, draw, mutants_of, shares
from tests.support.paths import ROOT


def test_shares_are_by_size_and_nothing_is_lost_by_rounding() -> None:
    assert shares({"a": 10, "b": 10, "c": 10}, 4) == {"a": 2, "b": 1, "c": 1}
    assert shares({"small": 1, "large": 299}, 300) == {"small": 1, "large": 299}


def test_a_place_is_drawn_once_however_many_mutants_it_has(tmp_path: Path) -> None:
    file = tmp_path / "sum.py"
    file.write_text("def f(a, b):\n    return a + b if a else 7\n")
    every = mutants_of([str(file)], tmp_path / "session.sqlite")
    assert len(every) > 10, "the sum alone has so many"
    for seed in range(5):
        drawn = draw(every, {str(file): 2}, 100, seed)
        kinds = {mutant.operator_name.partition("_")[0] for mutant in drawn}
        assert kinds == {"core/ReplaceBinaryOperator", "core/NumberReplacer", "core/AddNot"}
        assert len(drawn) == 3
        assert drawn == draw(every, {str(file): 2}, 100, seed)


def test_every_file_of_the_list_is_there() -> None:
    check(MODULES, ROOT)


def test_missing_files_are_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "kept.py").touch()
    with pytest.raises(MissingModules) as error:
        check(["kept.py", "gone.py", "inner/gone.py"], tmp_path)
    assert str(error.value) == (
        "not in the checkout: gone.py, inner/gone.py; "
        "MODULES in tests/mutants/drawing.py lists the files"
    )
