"""Swaps while streams run and graphs are replayed: proof, acceptance before and after, pause."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.costs.swap import swap_under_load
from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts
from benchmarks.gpu.pairs import COSTLY, Pair, pair
from benchmarks.stats import quantile
from osd.config.schema import CaptureConfig

MIN_REPLAYED = 0.8
LIKE_BEFORE = 0.1
"""The same draft is accepted as often again, within this."""


def measure(run: Run) -> None:
    """Draft, stranger, draft: acceptance under each, then many swaps in turn."""
    both, found = pair(run.models, COSTLY), run.findings
    dtype = "bfloat16" if run.has_gpu else "float32"
    engine = GpuEngine(run, both, dtype=dtype, max_model_len=1024 if run.has_gpu else 512)
    engine.start_hooks(CaptureConfig())
    checksum = engine.rpc("osd_target_checksum")
    num_swaps = run.pick(30, 4)
    alphas, rows = [_alpha(engine)], list[dict[str, Any]]()
    for version in range(2, 2 + num_swaps):
        draft = both.draft if version % 2 else both.stranger
        rows.append(swap_under_load(engine, "ours", engine.release(draft, version)))
        if version < 4:
            alphas.append(_alpha(engine))
    first, stranger, again = alphas
    engine.rpc("osd_time_proofs", 1)  # raises where the live draft is not the one committed last
    found.fact("swaps, none of which failed", len(rows), equals=num_swaps)
    found.fact("why they cannot be proved", proof_problem(engine), equals="they are")
    found.fact("α of the draft", first, at_least=least_alpha(run, both), is_key=True)
    found.fact("α of a stranger, after the swap", stranger, at_most=first / 3, is_key=True)
    found.fact(
        "α of the draft again", again, at_least=first - LIKE_BEFORE, at_most=first + LIKE_BEFORE
    )
    unchanged = engine.rpc("osd_target_checksum") == checksum
    found.fact("target's weights unchanged", unchanged, equals=True)
    found.fact("hook errors", engine.report()["skipped"].get("hook_error", 0), equals=0)
    found.of_gpu(
        "steps that replayed a graph", engine.replayed_share(), at_least=MIN_REPLAYED, is_key=True
    )
    _pauses(run, rows)
    found.detail(f"parameters {both.num_parameters}; graphs {engine.graphs()}")


def least_alpha(run: Run, both: Pair) -> float:
    """A pair given by its user is asked for text that its draft never learnt."""
    return 0.3 if both.target.is_relative_to(run.models) else 0.1


def proof_problem(engine: GpuEngine) -> str:
    """Why a commit is not proved in this engine; `they are` where each is."""
    return engine.worker.osd_swapper.prove() or "they are"


def _alpha(engine: GpuEngine) -> float:
    """Acceptance in a burst of its own."""
    engine.report()
    engine.burst(random_prompts(engine.pair, 8, seed=3), 48)
    return engine.alpha()


def _pauses(run: Run, rows: list[dict[str, Any]]) -> None:
    blocked = [1e3 * row["blocked_s"] for row in rows]
    late = [1e3 * (max(row["gaps_s"]) - row["quiet_s"]) for row in rows]
    found = run.findings
    for name, values in (("pause", blocked), ("latest token of a swap late by", late)):
        for p, q in (("p50", 0.5), ("p99", 0.99)):
            found.of_gpu(f"{name}, {p}", quantile(values, q), "ms", is_key=name == "pause")
    found.of_gpu("a step in quiet", 1e3 * median(row["quiet_s"] for row in rows), "ms")
    found.of_gpu("a swap as a whole", 1e3 * median(row["swap_s"] for row in rows), "ms")
