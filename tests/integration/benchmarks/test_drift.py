"""The drift benchmark against vLLM's own n-gram proposer, and over a real recording."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replays.lookup import prompt_lookup
from osd.tiny.models import ensure
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

Case = tuple[np.ndarray, int, int]
"""Tokens so far, shortest and longest n-gram."""


def vllms_proposals(cases: list[Case]) -> list[list[int]]:
    """What vLLM's proposer proposes."""
    theirs = import_module(
        "vllm.v1.spec_decode.ngram_proposer"
    )._find_longest_matched_ngram_and_propose_tokens
    return [
        theirs(tokens, shortest, longest, 10_000, 4).tolist() for tokens, shortest, longest in cases
    ]


def test_it_is_vllms_own_algorithm() -> None:
    rng = np.random.default_rng(3)
    sizes = [((5, 5), (2, 4), (1, 3), (3, 7))[number % 4] for number in range(400)]
    cases = [
        (rng.integers(0, 4, int(rng.integers(1, 40))).astype(np.int32), *size) for size in sizes
    ]
    # In a process of its own: where numba was imported, vLLM's CPU platform starts no further
    # engine.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        expected = pool.submit(vllms_proposals, cases).result()
    for (tokens, shortest, longest), theirs in zip(cases, expected, strict=True):
        assert prompt_lookup(tokens, 4, shortest, longest) == theirs, (tokens, shortest, longest)
    assert 100 < sum(map(bool, expected)) < 390


@pytest.mark.timeout(900)
def test_the_quick_run_tells_learners_from_a_frozen_draft(tmp_path: Path) -> None:
    ensure()  # here, since what `subprocess` kills leaves a build behind
    command = [sys.executable, "-m", "osd", "bench", "drift", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=580)
    result = json.loads((tmp_path / "result.json").read_text())
    values = {(f["group"], f["name"]): f["value"] for f in result["figures"]}
    last = "sharp: α of the steps, whoever proposed, last 96 of sql"
    assert values[last, "frozen draft"] < 0.1
    assert values[last, "ours"] > 0.8 * values[last, "ceiling"] > 0.6
    assert values["sharp: training, ours", "published"] >= 3
    assert (
        values["sharp: α of the steps, whoever proposed, all requests: ours minus", "ceiling"] < 0
    )
    assert 'class="report-chart"' in (tmp_path / "report.html").read_text()
