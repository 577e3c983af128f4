"""What the memory costs, from rows whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costs import memory_cost as bench
from benchmarks.record import Options, Row
from benchmarks.result import Result


def rows(batch: int, extra_us: float) -> list[Row]:
    """Ten pairs on a machine that slows down. The control takes 5 µs a token, with the memory so
    much more; a step is 32 ms in all."""
    found = []
    for pair in range(10):
        pace = 1 + pair / 10
        for arm, us in ((bench.OFF, 5.0), (bench.ON, 5.0 + extra_us)):
            step_s = 0.032 + 1e-6 * batch * (us - 5)
            found.append(
                {
                    "batch": batch,
                    "arm": arm,
                    "pair": pair,
                    "cpu_seconds": pace * 100 * step_s,
                    "control_cpu_seconds": 1e-6 * us * 100 * batch,
                    "num_tokens": 100 * batch,
                    "num_verified": 0 if arm == bench.OFF else batch,
                    "most_frequent": 0.01 if arm == bench.OFF else 0.01 * pair,
                }
            )
    return found


def figure(result: Result, batch: int, name: str) -> float:
    (found,) = (f for f in result.figures if (f.group, f.name) == (f"batch {batch}", name))
    return found.value


def test_what_it_takes_is_said_by_itself_and_as_a_share(tmp_path: Path) -> None:
    plan = bench.protocol(Options(directory=tmp_path))
    result = bench.summarise(plan, [*rows(1, 40.0), *rows(64, 10.0)])
    assert figure(result, 1, bench.CPU) == pytest.approx(1 + 0.00004 / 0.032)
    assert figure(result, 64, bench.CPU) == pytest.approx(1 + 0.00064 / 0.032)
    assert figure(result, 64, bench.MEMORY_US) == pytest.approx(10)
    assert figure(result, 64, f"{bench.CONTROL_US}, {bench.ON}") == pytest.approx(15)
    shares = "CPU of the memory in a step over a step of {} ms"
    assert figure(result, 64, shares.format(20)) == pytest.approx(0.032)
    assert figure(result, 1, shares.format(40)) == pytest.approx(0.001)
    assert figure(result, 64, bench.VERIFIED) == pytest.approx(0.01)
    assert figure(result, 64, bench.MOST_FREQUENT) == pytest.approx(0.09)
    assert [is_met for goal, _, is_met in result.verdicts() if goal.figure == bench.CPU] == [
        True,
        True,
    ]
    dear = bench.summarise(plan, rows(64, 20.0))
    assert [is_met for goal, _, is_met in dear.verdicts() if goal.figure == bench.CPU] == [False]
