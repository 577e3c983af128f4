"""Inter-token latency with capture on and off, on one engine, in pairs of neighbouring bursts."""

from __future__ import annotations

from benchmarks.engines.engine import Burst
from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts, step_gaps
from benchmarks.gpu.pairs import COSTLY, pair
from benchmarks.stats import median_ratio, quantile
from osd.config.schema import CaptureConfig

BATCHES = (1, 16, 64)
ON, OFF = "on", "off"


def measure(run: Run) -> None:
    """For each batch, bursts of the same requests with and without the hook."""
    both, found = pair(run.models, COSTLY), run.findings
    dtype = "bfloat16" if run.has_gpu else "float32"
    engine = GpuEngine(run, both, dtype=dtype, batch=max(BATCHES))
    engine.start_hooks(CaptureConfig(max_bytes_per_second=1 << 30))
    engine.rpc("osd_detach")
    num_pairs, num_tokens = run.pick(8, 2), run.pick(64, 8)
    same = list[bool]()
    for batch in BATCHES:
        prompts = random_prompts(both, batch, seed=batch)
        bursts: dict[str, list[Burst]] = {ON: [], OFF: []}
        for turn in range(-1, num_pairs):  # the first warms up
            for arm in (ON, OFF) if turn % 2 else (OFF, ON):
                burst = _burst(engine, arm, prompts, num_tokens)
                bursts[arm] += [burst] if turn >= 0 else []
        same += [on.outputs == off.outputs for on, off in zip(bursts[ON], bursts[OFF], strict=True)]
        _say(run, batch, bursts)
    report = engine.report()
    found.fact(
        "rows stored", sum(report["rows"].values()), at_least=num_pairs * num_tokens, is_key=True
    )
    found.fact("hook errors", report["skipped"].get("hook_error", 0), equals=0)
    found.fact("steps or traces lost", sum(report["skipped"].values()), equals=0)
    found.fact("pairs of bursts with the same answers", f"{sum(same)} of {len(same)}")
    found.detail(
        f"vocabulary {both.vocab_size}, parameters {both.num_parameters}; graphs {engine.graphs()}"
    )


def _burst(engine: GpuEngine, arm: str, prompts: list[list[int]], num_tokens: int) -> Burst:
    if arm == OFF:
        return engine.burst(prompts, num_tokens)
    engine.rpc("osd_attach")
    burst = engine.burst(prompts, num_tokens)
    engine.rpc("osd_drain")
    engine.rpc("osd_detach")
    return burst


def _say(run: Run, batch: int, bursts: dict[str, list[Burst]]) -> None:
    medians = {
        arm: [quantile(step_gaps(burst), 0.5) for burst in some] for arm, some in bursts.items()
    }
    gaps = {
        arm: [gap for burst in some for gap in step_gaps(burst)] for arm, some in bursts.items()
    }
    for arm in (OFF, ON):
        for p, q in (("p50", 0.5), ("p99", 0.99)):
            run.findings.of_gpu(
                f"batch {batch}: step, capture {arm}, {p}", 1e3 * quantile(gaps[arm], q), "ms"
            )
    ratio = median_ratio(medians[ON], medians[OFF])
    run.findings.of_gpu(f"batch {batch}: step, on / off", ratio.value, is_key=True)
    run.findings.of_gpu(f"batch {batch}: step, on / off, 95 % from", ratio.low)
    run.findings.of_gpu(f"batch {batch}: step, on / off, 95 % to", ratio.high)
