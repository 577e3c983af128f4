"""`osd bench net` on rows by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.control import net
from benchmarks.record import Options
from benchmarks.result import table
from benchmarks.stats import Estimate
from serving.speculation import net as net_windows

PLAN = net.protocol(Options(directory=Path("unused"), quick=True))


def rows(gain: float, reported: dict[str, Any]) -> list[dict[str, Any]]:
    """Of one way of scheduling, on a machine that slows down."""
    found = []
    for repeat, pace in enumerate((1.0, 0.8, 0.5, 0.4)):
        for arm, rate in ((net.NONE, 100.0), (net.SPECULATING, 100.0 * gain)):
            found.append({"arm": arm, "seconds": 1 / pace, "num_tokens": rate, "repeat": repeat})
        found.append({"arm": net.WINDOWS, "seconds": 1.0, "num_tokens": 1, **reported})
    return [{"group": "synchronous", **row} for row in found]


@pytest.mark.parametrize("low, high, is_met", [(1.3, 1.5, True), (1.6, 1.9, False)])
def test_what_is_reported_is_held_against_what_engines_side_by_side_show(
    low: float, high: float, is_met: bool
) -> None:
    middle = (low * high) ** 0.5
    both = [
        {**row, "group": group}
        for group in PLAN.sizes["scheduling"]
        for row in rows(1.4, {"ratio": middle, "low": low, "high": high, "windows": 9})
    ]
    result = net.summarise(PLAN, both)
    figures = {(figure.group, figure.name): figure for figure in result.figures}
    assert figures["synchronous", net.PAIRED].value == pytest.approx(1.4), "by pairs"
    off = figures["synchronous", net.OFF]
    assert off.value == pytest.approx(middle / 1.4)
    assert all(is_right for _, _, is_right in result.verdicts()) == is_met
    line = next(line for line in table(result).splitlines() if net.OFF in line)
    assert f"lower bound <= 1: {'met' if is_met else 'MISSED'}; upper bound >= 1: met" in line


def test_a_service_that_reports_nothing_has_not_met_the_goal() -> None:
    few = {"ratio": 1.4, "low": None, "high": None, "windows": net_windows.MIN_FOR_INTERVAL - 1}
    told = {"ratio": 1.4, "low": 1.3, "high": 1.5, "windows": 9}
    found = rows(1.4, told) + [{**row, "group": "asynchronous"} for row in rows(1.4, few)]
    verdicts = {(f.group, f.name): is_met for _, f, is_met in net.summarise(PLAN, found).verdicts()}
    assert ("asynchronous", net.OFF) not in verdicts, "too few windows for an interval"
    assert verdicts["synchronous", net.COUNTED] and not verdicts["asynchronous", net.COUNTED]


def test_the_interval_of_a_ratio_is_wider_than_those_of_its_parts() -> None:
    one = Estimate(value=2.0, low=1.0, high=4.0, n=5)
    assert net.over(one, Estimate(value=1.0, low=1.0, high=1.0, n=9)) == one
    both = net.over(one, one)
    assert (both.value, both.n) == (1.0, 5)
    assert both.low == pytest.approx(1 / both.high) == pytest.approx(0.375, abs=0.001)
