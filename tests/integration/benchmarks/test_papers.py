"""The benches of published shapes on the tiny models, recorded and running."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.papers.methods_runs import gaps
from benchmarks.papers.open_loop import AUTO, MAX_SEQS, MIN_REQUESTS, simulate
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

LIVE = """
import json
from benchmarks.engines import engine
engine.prepare()
from benchmarks.papers.rates_engine import measure
sizes = {"drafts": ["good"], "fixed": (0, 4), "loads": (0.5,), "draws": 1, "requests": 6,
         "output_tokens": 24, "full_tokens": 128}
print(json.dumps(list(measure(sizes, lambda text: None))))
"""


def test_a_simulated_sweep_over_a_recording() -> None:
    sizes = {"num_recorded": 96, "loads": (0.02,), "seconds": 0.1, "fixed": (0, 4)}
    rows = simulate(0.0, "good", 0, sizes)
    found = {row["arm"]: row for row in rows}
    assert set(found) == {0, 4, AUTO}
    latency = {arm: row["latency_s"] for arm, row in found.items()}
    assert latency[4] < 0.6 * latency[0]
    assert latency[AUTO] < 1.05 * latency[4]
    assert (found[0]["k"], found[4]["k"]) == (0, 4)
    assert 0 < found[0]["in_flight"] < min(MAX_SEQS, MIN_REQUESTS)


def test_exact_lengths_are_faster_than_a_fixed_one_at_every_batch() -> None:
    rows = gaps("good", 0.0, {"num_recorded": 16, "k": 3, "gap_batches": (1, 64)})
    for row in rows:
        per_request = zip(row["oracle_s"], row["fixed_s"], row["plain_s"], strict=True)
        assert all(oracle < min(fixed, plain) for oracle, fixed, plain in per_request)
    one, many = rows
    assert sum(one["plain_s"]) / sum(one["fixed_s"]) > sum(many["plain_s"]) / sum(many["fixed_s"])


@pytest.mark.timeout(400)
def test_a_live_sweep_on_engines_side_by_side() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIVE], check=True, cwd=ROOT, timeout=380, stdout=subprocess.PIPE
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    latency = {row["arm"]: row["latency_s"] for row in rows}
    assert set(latency) == {0, 4, AUTO}
    assert latency[4] < 0.9 * latency[0]  # of CPU time: a good draft saves it
    (auto,) = (row for row in rows if row["arm"] == AUTO)
    assert auto["k"] > 1 and sum(auto["plans"].values()) > 10
