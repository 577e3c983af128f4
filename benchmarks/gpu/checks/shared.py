"""One GPU for engine and trainer: inter-token latency alone and beside training, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts, step_gaps
from benchmarks.gpu.pairs import COSTLY, pair
from benchmarks.stats import quantile
from osd.config.schema import CaptureConfig, TrainerConfig


def measure(run: Run) -> None:
    """Alone, beside a process that trains the draft, alone again."""
    both, found = pair(run.models, COSTLY), run.findings
    dtype = "bfloat16" if run.has_gpu else "float32"
    engine = GpuEngine(run, both, dtype=dtype)
    engine.start_hooks(CaptureConfig())
    before_training = used_gib(run)
    with Training(run) as training:
        alone = _gaps(engine, run)
        training.begin()
        beside = _gaps(engine, run)
        with_training = used_gib(run)
        learnt = training.end()
    after = _gaps(engine, run)
    found.fact("training steps beside the engine", learnt["num_steps"], at_least=1, is_key=True)
    found.fact("loss is finite", learnt["is_finite"], equals=True)
    found.fact("hook errors", engine.report()["skipped"].get("hook_error", 0), equals=0)
    for name, gaps in (("alone", alone), ("beside training", beside), ("alone again", after)):
        found.of_gpu(f"step {name}, p50", 1e3 * median(gaps), "ms")
        found.of_gpu(f"step {name}, p99", 1e3 * quantile(gaps, 0.99), "ms")
    found.of_gpu("step beside / alone, p50", median(beside) / median(alone), is_key=True)
    found.of_gpu("training", learnt["tokens_per_second"], "tokens/s")
    found.of_gpu("memory in use, engine alone", before_training, "GiB")
    found.of_gpu("memory in use, with training", with_training, "GiB", is_key=True)
    found.of_gpu("trainer's peak", learnt["peak_gib"], "GiB", at_most=learnt["allowed_gib"] or None)
    fraction = TrainerConfig().gpu_memory_fraction
    found.detail(
        f"parameters {both.num_parameters}; the trainer may take {fraction:.0%} of the GPU"
    )


def _gaps(engine: GpuEngine, run: Run) -> list[float]:
    gaps = list[float]()
    for turn in range(run.pick(4, 1)):
        burst = engine.burst(random_prompts(engine.pair, 8, seed=turn), run.pick(128, 16))
        assert all(len(tokens) == run.pick(128, 16) for tokens in burst.outputs.values())
        gaps += step_gaps(burst)
    return gaps


def used_gib(run: Run) -> float:
    """Of the whole device, by whomever."""
    if not run.has_gpu:
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class Training:
    """`benchmarks/gpu/training.py` in a process of its own. It trains from `begin` to `end`."""

    def __init__(self, run: Run) -> None:
        draft = pair(run.models, COSTLY).draft
        command = [sys.executable, "-m", "benchmarks.gpu.training", str(draft), run.device]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Training:
        self._hear("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()

    def begin(self) -> None:
        """Returns once a first step was taken."""
        self._tell("begin")
        self._hear("training")

    def end(self) -> dict[str, Any]:
        """What was learnt, and with what."""
        self._tell("end")
        return self._hear("learnt")

    def _tell(self, word: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{word}\n")
        self._child.stdin.flush()

    def _hear(self, key: str) -> Any:
        """The next answer. Other lines are what libraries print."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith('{"osd-training":'):
                answer = json.loads(line)["osd-training"]
                if key in answer:
                    return answer[key]
        raise RuntimeError(f"the training process ended with status {self._child.wait()}")
