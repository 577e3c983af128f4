"""Engines of the checks: `benchmarks/engines/engine.py` with the product's hooks, on a CPU or on a
GPU as people run it (CUDA graphs, the model runner and the scheduling that the check names)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import engine, models, vllm_engine
from benchmarks.engines.worker import BenchWorker
from benchmarks.gpu.child import Run
from benchmarks.gpu.pairs import Pair
from benchmarks.gpu.registry import V1, Mode
from osd.config.schema import CaptureConfig
from osd.records import DraftRelease, Trace
from serving.vllm.hooks import is_v2
from serving.vllm.server import graphs_for_every_k
from serving.worker import start_settings

KEEP_ALL = CaptureConfig(
    top_k=32, accepted_fraction=1.0, plain_fraction=1.0, max_bytes_per_second=1 << 30
)


class KeepingWorker(BenchWorker):
    """Traces stay in `osd_kept`."""

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        self.osd_kept: list[Trace] = []
        put, count = super().osd_open_sink(settings)

        def keep(traces: Sequence[Trace]) -> int:
            self.osd_kept.extend(traces)
            return put(traces)

        return keep, count


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One engine step that decoded and did nothing else."""

    num_reqs: int
    num_drafted: int
    graph: str
    """CUDA-graph mode of the target's pass; "" where vLLM does not say."""


class GpuEngine(engine.Engine):
    """An engine of one check. `is_plain` = no draft, no hooks. `is_controlled` = the closed loop
    schedules, and `force` tells it what to do."""

    def __init__(
        self,
        run: Run,
        pair: Pair,
        *,
        k: int = 4,
        batch: int = 8,
        is_plain: bool = False,
        is_controlled: bool = False,
        **options: Any,
    ) -> None:
        self.k, self.pair, self.is_controlled = k, pair, is_controlled
        settings = {"max_model_len": 512, "worker_extension_cls": WORKER, **self._device(run)}
        settings |= _without_draft() if is_plain else {}
        settings |= _controlled(k) if is_controlled else {}
        super().__init__(
            pair.target,
            models.release(pair.draft, 1),
            k=k,
            batch=batch,
            speculative=graphs_for_every_k(k) if is_controlled else {},
            **settings | options,
        )
        self.steps: list[Step] = []
        self._listen()
        self._say_what_runs(run)

    @property
    def core(self) -> Any:
        """vLLM's engine core, in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    def start_hooks(self, capture: CaptureConfig = KEEP_ALL) -> None:
        """Install capture and the swap, as a replica does."""
        settings = {"k": self.k, "sink": {}, "target_id": "bench", "seed": 0}
        settings["is_controlled"] = self.is_controlled
        self.rpc(
            "osd_start", start_settings(models.release(self.pair.draft, 1), capture, **settings)
        )

    def force(self, k: int | None) -> None:
        """From now on k draft tokens a step (0 = off); None = the loop decides."""
        plan = None if k is None else ["draft", k] if k else ["off", 0]
        self.core.scheduler.osd_command("force", json.dumps(plan))

    def release(self, draft: Path, version: int) -> DraftRelease:
        """A draft as a release."""
        return models.release(draft, version)

    def traces(self) -> list[Trace]:
        """Traces kept since the last call."""
        self._flush()
        kept: list[Trace] = self.worker.osd_kept
        taken = list(kept)
        kept.clear()
        return taken

    def report(self) -> dict[str, Any]:
        """The hooks' counters (`WorkerReport`)."""
        self._flush()
        return dict(json.loads(self.rpc("osd_report", "gpu", "default")))

    def alpha(self) -> float:
        """Conditional acceptance since the last report; NaN where nothing was tested."""
        windows = self.report()["windows"]
        tested = sum(sum(w["num_tested_per_pos"]) for w in windows)
        accepted = sum(sum(w["num_accepted_tokens_per_pos"]) for w in windows)
        return accepted / tested if tested else float("nan")

    def graphs(self) -> str:
        """CUDA-graph modes of the steps so far, and how often: `FULL 120, PIECEWISE 3`."""
        counts = Counter(step.graph or "unknown" for step in self.steps)
        return ", ".join(f"{mode} {num}" for mode, num in counts.most_common())

    def replayed_share(self) -> float:
        """Share of the steps so far whose target pass replayed a graph."""
        replayed = sum(step.graph in ("FULL", "PIECEWISE") for step in self.steps)
        return replayed / len(self.steps) if self.steps else 0.0

    def _flush(self) -> None:
        """Let every step, and the news of who has finished, reach the capture thread."""
        for _ in range(2):  # with asynchronous scheduling a step returns what the one before did
            vllm_engine.step(self.llm)
        self.rpc("osd_drain")

    def _listen(self) -> None:
        scheduler = self.core.scheduler
        own = scheduler.update_from_output

        def update(scheduled: Any, result: Any) -> Any:
            if (step := step_of(scheduled, result)) is not None:
                self.steps.append(step)
            return own(scheduled, result)

        scheduler.update_from_output = update

    def _say_what_runs(self, run: Run) -> None:
        config = self.llm.llm_engine.vllm_config
        is_async = bool(config.scheduler_config.async_scheduling)
        found = Mode(is_v2=is_v2(self.worker.model_runner), is_async=is_async)
        run.findings.fact("model runner and scheduling", found.name, equals=wanted(run).name)
        graphs = config.compilation_config.cudagraph_mode
        run.findings.detail(
            f"engine: {found.name}, {config.model_config.dtype}, CUDA graphs "
            f"{graphs.name if graphs is not None else 'none'}, draft "
            f"{'none' if config.speculative_config is None else config.speculative_config.method}"
        )

    @staticmethod
    def _device(run: Run) -> dict[str, Any]:
        if not run.has_gpu:
            return {"kv_cache_memory_bytes": 128 << 20}
        return {
            "kv_cache_memory_bytes": 2 << 30,
            "gpu_memory_utilization": 0.1,  # several engines share the GPU
            "enforce_eager": False,
            "cudagraph_metrics": True,
            "async_scheduling": wanted(run).is_async,
        }


def wanted(run: Run) -> Mode:
    """How the engine is to run; on a CPU there is one way."""
    return run.check.mode if run.has_gpu else V1


def step_of(scheduled: Any, result: Any) -> Step | None:
    """The step in vLLM's `SchedulerOutput` and `ModelRunnerOutput`; None where a prefill was in
    it."""
    drafts = scheduled.scheduled_spec_decode_tokens
    lengths = scheduled.num_scheduled_tokens
    if not lengths or any(n != 1 + len(drafts.get(r, ())) for r, n in lengths.items()):
        return None
    stats = getattr(result, "cudagraph_stats", None)
    return Step(
        num_reqs=len(lengths),
        num_drafted=sum(map(len, drafts.values())),
        graph="" if stats is None else str(stats.runtime_mode).rpartition(".")[2],
    )


def random_prompts(pair: Pair, num: int, length: int = 16, seed: int = 0) -> list[list[int]]:
    """Token ids of `num` prompts."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = rng.integers(2, pair.vocab_size, (num, length)).tolist()
    return prompts


def step_gaps(burst: engine.Burst) -> list[float]:
    """Seconds between steps: all streams wait for the same ones, so one gap of each says it all."""
    return list(dict(burst.gaps).values())


def _without_draft() -> dict[str, Any]:
    return {"speculative_config": None, "worker_extension_cls": ""}


def _controlled(k: int) -> dict[str, Any]:
    from serving.speculation.control import Settings

    settings = asdict(Settings(k_max=k, proposers=("draft",)))
    return {
        "scheduler_cls": "serving.speculation.scheduler.controlled_scheduler",
        "additional_config": {"osd": settings},
    }


WORKER = f"{__name__}.{KeepingWorker.__name__}"
