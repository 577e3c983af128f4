"""Figures, their goals, and what is left of them on a CPU or after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.findings import Figure, Findings, read, show


def findings(tmp_path: Path, *, has_gpu: bool = True) -> Findings:
    return Findings(tmp_path / "f.jsonl", has_gpu=has_gpu)


@pytest.mark.parametrize(
    ("how", "goal", "is_met"),
    [
        ({}, "", None),
        ({"equals": 3}, "= 3", True),
        ({"equals": 4}, "= 4", False),
        ({"at_least": 3}, ">= 3", True),
        ({"at_least": 3.5}, ">= 3.5", False),
        ({"at_least": 1, "at_most": 2}, ">= 1 and <= 2", False),
        ({"at_least": 1, "at_most": 3}, ">= 1 and <= 3", True),
    ],
)
def test_a_figure_is_held_to_its_goal(
    tmp_path: Path, how: dict[str, float], goal: str, is_met: bool | None
) -> None:
    found = findings(tmp_path)
    found.fact("rows", 3, **how)
    found.of_gpu("rows", 3, **how)
    for figure in read(tmp_path / "f.jsonl").figures:
        assert (figure.goal, figure.is_met) == (goal, is_met)


def test_words_and_truths_are_figures_too(tmp_path: Path) -> None:
    found = findings(tmp_path)
    found.fact("graphs", "FULL 3")
    found.fact("mode", "V1 sync", equals="V2 sync")
    found.fact("is on", True, equals=True)
    figures = read(tmp_path / "f.jsonl").figures
    assert [f.is_met for f in figures] == [None, False, True]
    assert [f.goal for f in figures] == ["", "= V2 sync", "= yes"]
    assert [show(f) for f in figures] == ["FULL 3", "V1 sync", "yes"]


def test_without_a_gpu_its_figures_are_dropped_before_they_are_written(tmp_path: Path) -> None:
    found = findings(tmp_path, has_gpu=False)
    found.of_gpu("pause", 123.456, "ms", at_most=1)
    found.fact("swaps", 4, equals=4)
    assert "123" not in (tmp_path / "f.jsonl").read_text()
    pause, swaps = read(tmp_path / "f.jsonl").figures
    assert (pause.value, pause.is_met, pause.goal) == (None, None, "<= 1")
    assert show(pause) == "not measured: no GPU"
    assert show(swaps) == "4"


def test_a_line_that_was_cut_off_loses_itself_alone(tmp_path: Path) -> None:
    found = findings(tmp_path)
    found.fact("one", 1)
    found.detail("two")
    with (tmp_path / "f.jsonl").open("a") as file:
        file.write('{"figure": {"name": "thr')
    whole = read(tmp_path / "f.jsonl")
    assert [f.name for f in whole.figures] == ["one"]
    assert whole.details == ("two",)
    assert not whole.is_done


def test_a_process_that_wrote_nothing_found_nothing(tmp_path: Path) -> None:
    nothing = read(tmp_path / "none.jsonl")
    assert (nothing.figures, nothing.error, nothing.is_done) == ((), "", False)


def test_numbers_are_short() -> None:
    assert show(Figure(name="a", value=0.123456, unit="ms")) == "0.1235 ms"
    assert show(Figure(name="a", value=12, unit="")) == "12"
    assert show(Figure(name="a", value=None)) == "not measured"
