"""Benches as a user runs them, in their quick form: they measure something and keep promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def bench(name: str, out: Path) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """`osd bench NAME --quick`: its result, and its figures by group and name."""
    command = [sys.executable, "-m", "osd", "bench", name, "--quick", "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=540)
    # Beside the lock that keeps a second run out.
    assert {file.name for file in out.iterdir()} - {".lock"} == {
        "protocol.json",
        "raw.jsonl",
        "result.json",
        "report.html",
    }
    result = json.loads((out / "result.json").read_text())
    return result, {(f["group"], f["name"]): f for f in result["figures"]}


def test_capture(tmp_path: Path) -> None:
    result, figures = bench("capture", tmp_path)
    group = "512 tokens, batch 8"
    assert 0.3 < figures[group, "tokens/s, on / off"]["value"] < 1.3
    assert 3 < figures[group, "CPU in the hot path per output token"]["value"] < 1000
    assert figures[group, "CPU of the capture thread per output token"]["value"] > 5
    assert 0.2 < figures[group, "rows stored per output token"]["value"] < 1.1
    assert 300 < figures[group, "bytes per stored row"]["value"] < 1000
    assert len(result["goals"]) == 1


def test_swap(tmp_path: Path) -> None:
    _, figures = bench("swap", tmp_path)
    assert figures["tiny", "target unchanged (1 = yes)"]["value"] == 1
    for who in ("ours", "vLLM's"):
        blocked, late = (
            figures["tiny", f"blocked p50, {who}"],
            figures["tiny", f"inter-token excess p50, {who}"],
        )
        assert 0.5 < blocked["value"] < 500
        assert late["value"] > 0.5 * blocked["value"]  # who is blocked is late


def test_buffer(tmp_path: Path) -> None:
    _, figures = bench("buffer", tmp_path)
    title = "medium traces (256 + 256 tokens)"
    assert figures[title, "out"]["value"] > 1
    encoded, stored = (
        figures[title, f"bytes per trace, {where}"]["value"]
        for where in ("encoded", "in the server")
    )
    assert encoded < stored < 1.2 * encoded


def test_fleet(tmp_path: Path) -> None:
    result, figures = bench("fleet", tmp_path)
    for group, num in (("8 replicas", 8), ("16 replicas", 16)):
        found = {name: f["value"] for (of, name), f in figures.items() if of == group}
        assert 0.0005 < found["Redis without traces"] < 0.5
        assert 0.001 < found["controller"] < 0.5
        assert 0.001 < found["controller, with history"] < 0.5
        assert 1 < found["polls a second and replica"] <= 4.5
        assert 0.3 < found["heartbeats a second and replica"] <= 1.5
        assert 0.3 * num < found["records of the feed a second"] <= 1.5 * num
        assert found["fan-out, median replica"] < found["fan-out, last replica of the slowest"] < 5
        assert 33_000 < found["bytes per trace on the wire"] < 45_000
        assert 33_000 < found["bytes per trace in memory"] < 40_000
        assert found["its main thread's CPU per trace"] > 5
    assert {goal["met"] for goal in result["goals"]} <= {True, False}


def test_memory_cost(tmp_path: Path) -> None:
    _, figures = bench("memory_cost", tmp_path)
    for batch in (1, 64):
        found = {name: f["value"] for (of, name), f in figures.items() if of == f"batch {batch}"}
        assert 0.7 < found["CPU seconds per token, memory on / off"] < 1.3
        with_it, without = (
            found[f"CPU of the control per token, memory {state}"] for state in ("on", "off")
        )
        assert with_it > without > 0
        share = found["CPU of the memory in a step over a step of 40 ms"]
        assert share == pytest.approx(batch * (with_it - without) / 40_000, rel=0.5)
        assert found["share of the most frequent token, at most"] < 0.04, "any token came next"


def test_trees(tmp_path: Path) -> None:
    result, figures = bench("trees", tmp_path)
    case = "middling draft, T = 0"
    brought = [
        figures[f"tokens per step: {case}", shape]["value"] for shape in ("⟨1, 1, 1⟩", "⟨5, 1, 1⟩")
    ]
    assert 1.5 < brought[0] < brought[1] < 4
    assert figures[f"success: {case}", "greedy, k = 5"]["value"] > 0.7
    gains = [goal["met"] for goal in result["goals"] if goal["figure"].startswith("multi-step")]
    assert gains and all(gains)
