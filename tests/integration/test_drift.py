"""The drift benchmark against what it stands for: vLLM's own n-gram proposer, and runs over a real recording."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from osd.bench.lookup import prompt_lookup

ROOT = Path(__file__).parents[2]


def test_it_is_vllms_own_algorithm() -> None:
    theirs = import_module("vllm.v1.spec_decode.ngram_proposer")._find_longest_matched_ngram_and_propose_tokens
    rng = np.random.default_rng(3)
    num_found = 0
    for case in range(400):
        tokens = rng.integers(0, 4, int(rng.integers(1, 40))).astype(np.int32)
        shortest, longest = ((5, 5), (2, 4), (1, 3), (3, 7))[case % 4]
        expected = theirs(tokens, shortest, longest, 10_000, 4).tolist()
        assert prompt_lookup(tokens, 4, shortest, longest) == expected, (tokens, shortest, longest)
        num_found += bool(expected)
    assert 100 < num_found < 390


@pytest.mark.timeout(600)
def test_the_quick_run_tells_learners_from_a_frozen_draft(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "osd", "bench", "drift", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=580)
    result = json.loads((tmp_path / "result.json").read_text())
    values = {(f["group"], f["name"]): f["value"] for f in result["figures"]}
    last = "sharp: α of the steps, last 96 of sql"
    assert values[last, "frozen draft"] < 0.1
    assert values[last, "ours"] > 0.8 * values[last, "ceiling"] > 0.6
    assert values["sharp: training, ours", "published"] >= 3
    assert values["sharp: α of the steps, all requests: ours minus", "ceiling"] < 0
    assert "polyline" in (tmp_path / "report.html").read_text()
