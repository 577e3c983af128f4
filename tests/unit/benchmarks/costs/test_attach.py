"""What attaching costs, from rows whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costs import attach as bench
from benchmarks.record import Options, Row

CPU_S = {bench.STOCK: 1.0, bench.OFF: 0.9, bench.OBSERVED: 0.99, bench.CAPTURED: 1.08}
"""An engine that was built to be attached is a tenth cheaper by itself."""


def rows() -> list[Row]:
    """Of a machine that slows down."""
    return [
        {"group": "4 streams", "arm": arm, "pair": pair, "cpu_seconds": cpu * (1 + pair),
         "num_tokens": 100, "seconds": 1.0}
        for pair in range(4)
        for arm, cpu in CPU_S.items()
    ]  # fmt: skip


def test_what_a_switch_takes_is_also_held_against_an_engine_built_alike() -> None:
    plan = bench.protocol(Options(directory=Path("unused"), quick=True))
    figures = {f.name: f.value for f in bench.summarise(plan, rows()).figures}
    assert figures[f"{bench.OBSERVED}: {bench.CPU}"] == pytest.approx(0.99)
    assert figures[f"{bench.OBSERVED}: {bench.OVER_OFF}"] == pytest.approx(1.1)
    assert figures[f"{bench.CAPTURED}: {bench.OVER_OFF}"] == pytest.approx(1.2)
    assert f"{bench.OFF}: {bench.OVER_OFF}" not in figures
