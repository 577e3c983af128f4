"""Figures of `osd bench success` from made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.record import Options, Row
from benchmarks.trees import success
from benchmarks.trees.trees import GREEDY, KS, MULTI_STEP, NAIVE


def rows_of(greedy: list[float], drawn: list[float]) -> list[Row]:
    """Two requests that differ by as much at each k; other temperatures and rules beside them."""

    def row(rule: str, temperature: float, k: int, mean: float) -> Row:
        found = [mean - 0.1, mean + 0.1]
        return {
            "family": "tiny", "domain": "sql", "rule": rule, "temperature": temperature, "k": k,
            "success": found,
        }  # fmt: skip

    return [
        one
        for k, likeliest, by_draws in zip(KS, greedy, drawn, strict=True)
        for one in (
            row(GREEDY, 0.0, k, likeliest),
            row(MULTI_STEP, 1.0, k, by_draws),
            row(MULTI_STEP, 0.7, k, 0.2),
            row(NAIVE, 1.0, k, 0.3),
        )
    ]


def found(tmp_path: Path, greedy: list[float], drawn: list[float]) -> success.Result:
    plan = success.protocol(Options(directory=tmp_path))
    return success.summarise(plan, rows_of(greedy, drawn))


def test_greedy_that_flattens_and_stochastic_that_crosses_it_meet_the_goals(tmp_path: Path) -> None:
    greedy, drawn = [0.5, 0.6, 0.65, 0.68, 0.69], [0.4, 0.6, 0.7, 0.75, 0.8]
    result = found(tmp_path, greedy, drawn)
    values = {f.name: f.value for f in result.figures if f.group == "tiny, sql"}
    assert values[success.FLATTENS] == pytest.approx(0.01)
    assert values[success.BEGINS_BELOW] == pytest.approx(-0.1)
    assert values[success.CROSSES] == pytest.approx(0.11)
    assert [is_met for *_, is_met in result.verdicts()] == [True] * 3
    by_group = {(f.group, f.name): f.value for f in result.figures}
    assert by_group["tiny, sql, T = 0", f"{GREEDY}, k = 2"] == pytest.approx(0.6)
    assert by_group["tiny, sql, T = 0.7", f"{MULTI_STEP}, k = 5"] == pytest.approx(0.2)
    assert by_group["published, CP (LLaMA-7B, draft of 68 M)", "stochastic, k = 2"] == 0.82


def test_what_rises_on_begins_above_and_stays_below_misses_them(tmp_path: Path) -> None:
    result = found(tmp_path, [0.3, 0.5, 0.6, 0.65, 0.7], [0.4, 0.5, 0.55, 0.6, 0.65])
    assert [is_met for *_, is_met in result.verdicts()] == [False] * 3


def test_the_published_table_keeps_its_own_shape() -> None:
    for greedy, drawn in success.PUBLISHED.values():
        assert greedy[0] > drawn[0] and greedy[4] < drawn[4]
        assert greedy[4] - greedy[3] <= 3
