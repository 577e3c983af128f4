"""Captured rows against transformers, and tokens at temperature 1 against the target's
distribution, in float32."""

from __future__ import annotations

import numpy as np

from benchmarks.engines import vllm_engine
from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts
from benchmarks.gpu.fit import compare, fit, logprobs_by_transformers
from benchmarks.gpu.pairs import SMALL, pair

MAX_USUAL, MAX_DIFFERENCE = 0.05, 0.5
"""Of log-probabilities, p99 and largest: float16 in traces, and attention's reduced precision on a
GPU. A row of another position is off by far more."""
MIN_SHIFTED = 0.5
MIN_P = 1e-4
MIN_FREEDOM = 40


def measure(run: Run) -> None:
    """Rows at temperatures 0 and 1, then many short samples."""
    small = pair(run.models, SMALL)
    engine = GpuEngine(run, small, batch=run.pick(256, 64), dtype="float32", k=4)
    engine.start_hooks()
    logprobs_of = logprobs_by_transformers(str(small.target), run.device, "float32")
    prompts = random_prompts(small, run.pick(48, 8))
    engine.burst(prompts, 48)
    vllm_engine.sample(engine.llm, prompts, num_samples=1, num_tokens=48, temperature=1.0)
    traces = engine.traces()
    report = engine.report()
    rows = compare(traces, logprobs_of)
    found = run.findings
    found.fact("hook errors", report["skipped"].get("hook_error", 0), equals=0)
    found.fact("steps or traces lost", sum(report["skipped"].values()), equals=0)
    found.fact("rows compared", rows.num, at_least=48 * len(prompts), is_key=True)
    found.fact("output tokens without exactly one row", rows.num_missing, equals=0)
    found.fact("rows of a wrong kind", rows.num_wrong_kinds, equals=0)
    usual = float(np.quantile(rows.differences, 0.99))
    found.fact("difference of a log-probability, p99", usual, at_most=MAX_USUAL, is_key=True)
    found.fact("the largest", max(rows.differences), at_most=MAX_DIFFERENCE)
    shifted = float(np.median(rows.shifted))
    found.fact("the same, one position off (median)", shifted, at_least=MIN_SHIFTED)
    some = prompts[: run.pick(10, 8)]
    samples = vllm_engine.sample(
        engine.llm, some, num_samples=run.pick(600, 400), num_tokens=3, temperature=1.0
    )
    fitted = fit(some, samples, logprobs_of)
    found.fact("degrees of freedom", fitted.freedom, at_least=MIN_FREEDOM)
    found.fact("p of the drafted tokens", fitted.p_value, at_least=MIN_P, is_key=True)
    found.detail(f"{fitted.num_tokens} drafted tokens in the test of fit; graphs {engine.graphs()}")
