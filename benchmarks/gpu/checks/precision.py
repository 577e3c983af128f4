"""bfloat16: the same tokens at temperature 0 with and without speculation, alone and together; and
captured rows against transformers in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts
from benchmarks.gpu.fit import compare, logprobs_by_transformers
from benchmarks.gpu.pairs import COSTLY, pair
from benchmarks.gpu.registry import INVARIANT

K_MAX, KS = 5, (0, 2, 5)
MAX_DIFFERENCE = 0.5
"""bfloat16 holds a logit of 16 to 32 to an eighth, and the two engines round at other places."""


def measure(run: Run) -> None:
    """The same prompts every way."""
    both, found = pair(run.models, COSTLY), run.findings
    is_invariant = run.check.environ.get(INVARIANT) == "1"
    prompts = random_prompts(both, run.pick(24, 4), seed=9)
    num_tokens = run.pick(64, 12)
    plain = GpuEngine(run, both, dtype="bfloat16", batch=len(prompts), is_plain=True)
    want = plain.burst(prompts, num_tokens).outputs
    alone = {
        str(i): plain.burst([prompt], num_tokens).outputs["0"] for i, prompt in enumerate(prompts)
    }
    _say(run, "no draft: alone and together", want, alone, is_invariant)
    engine = GpuEngine(run, both, dtype="bfloat16", batch=len(prompts), k=K_MAX, is_controlled=True)
    engine.start_hooks()
    for k in KS:
        engine.force(k)
        got = engine.burst(prompts, num_tokens).outputs
        _say(run, f"k = {k} and no draft", want, got, is_invariant)
    rows = compare(
        engine.traces(), logprobs_by_transformers(str(both.target), run.device, "bfloat16")
    )
    found.fact("rows compared", rows.num, at_least=len(KS) * num_tokens)
    found.fact(
        "difference of a log-probability, p99",
        float(np.quantile(rows.differences, 0.99)),
        at_most=MAX_DIFFERENCE,
    )
    shifted = float(np.median(rows.shifted))
    found.fact("the same, one position off (median)", shifted, at_least=2 * MAX_DIFFERENCE)
    found.detail(f"{INVARIANT}={run.check.environ.get(INVARIANT)}; graphs {engine.graphs()}")


def _say(
    run: Run,
    name: str,
    want: Mapping[str, list[int]],
    got: Mapping[str, list[int]],
    is_invariant: bool,
) -> None:
    share = sum(got[key] == tokens for key, tokens in want.items()) / len(want)
    goal = 1 if is_invariant else None
    run.findings.of_gpu(f"identical answers, {name}", share, equals=goal, is_key=True)
