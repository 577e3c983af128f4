"""The time of a step at each k and the graphs it ran in; `off` against an engine without a
draft."""

from __future__ import annotations

from statistics import median

from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts, step_gaps
from benchmarks.gpu.pairs import COSTLY, pair
from benchmarks.stats import median_ratio
from osd.config.schema import CaptureConfig

K_MAX, BATCH = 5, 8


def measure(run: Run) -> None:
    """The engines take turns, so that the ratio of neighbours is that of the same moment."""
    both, found = pair(run.models, COSTLY), run.findings
    dtype = "bfloat16" if run.has_gpu else "float32"
    plain = GpuEngine(run, both, dtype=dtype, batch=BATCH, is_plain=True)
    engine = GpuEngine(run, both, dtype=dtype, batch=BATCH, k=K_MAX, is_controlled=True)
    engine.start_hooks(CaptureConfig(enabled=False))
    num_tokens = run.pick(96, 16)
    prompts = random_prompts(both, BATCH)
    for k in (*range(K_MAX + 1), 0):  # warms up
        engine.force(k)
        engine.burst(prompts, 8)
    plain.burst(prompts, 8)
    off, without = list[float](), list[float]()
    for turn in range(run.pick(6, 2)):
        arms = (off, without) if turn % 2 else (without, off)
        for arm in arms:
            arm.append(_step(engine if arm is off else plain, prompts, num_tokens, 0))
    for k in range(K_MAX + 1):
        seconds = _step(engine, prompts, num_tokens, k)
        drafted = [step.num_drafted / step.num_reqs for step in engine.steps]
        found.fact(f"k = {k}: verified per request and step", median(drafted), equals=k)
        found.of_gpu(f"k = {k}: a step", 1e3 * seconds, "ms", is_key=True)
        found.of_gpu(f"k = {k}: graphs", engine.graphs(), is_key=True)
    ratio = median_ratio(off, without)
    found.of_gpu("without a draft: a step", 1e3 * median(without), "ms")
    found.of_gpu("off / without a draft", ratio.value, is_key=True)
    found.of_gpu("off / without a draft, 95 % from", ratio.low)
    found.of_gpu("off / without a draft, 95 % to", ratio.high)
    found.detail(f"without a draft: graphs {plain.graphs()}; parameters {both.num_parameters}")


def _step(engine: GpuEngine, prompts: list[list[int]], num_tokens: int, k: int) -> float:
    """Median seconds of a step at this k. `engine.steps` are those it took."""
    if engine.is_controlled:
        engine.force(k)
        engine.burst(prompts, 4)  # steps still in flight had the plan before
    engine.steps.clear()
    return median(step_gaps(engine.burst(prompts, num_tokens)))
