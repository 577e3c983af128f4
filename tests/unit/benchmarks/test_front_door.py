"""`osd bench front_door` on rows by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import front_door as bench
from benchmarks.record import Options

PLAN = bench.protocol(Options(directory=Path("unused"), quick=True))


def rows(slower: float) -> list[dict[str, Any]]:
    """On a machine that slows down; the front door makes everything `slower`."""
    found: list[dict[str, Any]] = []
    for pair, pace in enumerate((1.0, 0.8, 0.5)):
        for arm, factor in ((bench.BARE, 1.0), (bench.DOOR, slower)):
            row = {"group": "8 streams", "arm": arm, "pair": pair, "num_tokens": 100}
            row |= {"seconds": factor / pace, "ttft_s": 0.1 * factor**2 / pace}
            row |= {"engine_cpu_seconds": factor**3 / pace, "door_cpu_seconds": 0.002 * factor}
            found.append(row)
    idle = {"group": "idle", "arm": bench.DOOR, "seconds": 20, "door_cpu_seconds": 0.1}
    return [*found, idle]


def test_both_ports_are_compared_by_pairs() -> None:
    result = bench.summarise(PLAN, rows(1.25))
    found = {(figure.group, figure.name): figure.value for figure in result.figures}
    assert found == {
        ("8 streams", bench.SPEED): pytest.approx(0.8),
        ("8 streams", bench.TTFT): pytest.approx(1.25**2),
        ("8 streams", bench.ENGINE_CPU): pytest.approx(1.25**3),
        ("8 streams", bench.DOOR_CPU): pytest.approx(25.0),
        ("idle", bench.IDLE): pytest.approx(0.5),
    }
    assert [is_met for _, _, is_met in result.verdicts()] == [False, False]
    assert all(is_met for _, _, is_met in bench.summarise(PLAN, rows(1.0)).verdicts())
