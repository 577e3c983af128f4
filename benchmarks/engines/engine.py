"""Real vLLM in this process, stepped by hand, so that two arms can take turns on the same
engine."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osd.records import DraftRelease

WORKER = "benchmarks.engines.worker.BenchWorker"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""One process, and one thread for the model, so that what runs beside it has a core of its own."""


def prepare() -> None:
    """Set the environment of the engine. To be called before torch is imported."""
    os.environ.update(ENVIRONMENT)
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # torch's, about names that vLLM looks up
    from serving.vllm.server import prepare_environment

    prepare_environment()


@dataclass(kw_only=True, slots=True)
class Burst:
    """Some requests, from the first step to the last token."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the engine's thread."""
    num_tokens: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """request id -> tokens"""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(time of the later token, seconds since the one before) per request, for steps that brought
    any."""


class Engine:
    """`num_speculative_tokens` k, float32, no CUDA graphs, no prefix cache (the same prompts are
    sent again)."""

    def __init__(
        self,
        target: Path,
        release: DraftRelease,
        *,
        k: int,
        batch: int,
        speculative: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`speculative`: more of vLLM's `speculative_config`; `options`: of its arguments."""
        from benchmarks.engines import vllm_engine
        from serving.vllm.heads import method_for

        self._vllm = vllm_engine
        settings = {
            "kv_cache_memory_bytes": 256 << 20,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": batch,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
            "use_tqdm_on_load": False,
            "worker_extension_cls": WORKER,
            "speculative_config": {
                "method": method_for(Path(release.path)),
                "model": release.path,
                "num_speculative_tokens": k,
                **(speculative or {}),
            },
        }
        self.llm = vllm_engine.engine_in_process(str(target), settings | options)

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the worker, its extension included."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)[0]

    def burst(
        self,
        prompts: Sequence[list[int]],
        num_tokens: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Burst:
        """All prompts in flight together until each has its tokens, or `is_over`, asked after each
        step, says so."""
        for i, prompt in enumerate(prompts):
            self._vllm.add(self.llm, str(i), prompt, num_tokens)
        found = Burst(outputs={str(i): [] for i in range(len(prompts))})
        last: dict[str, float] = {}
        started, cpu_started = time.perf_counter(), time.thread_time()
        while self._vllm.has_unfinished(self.llm):
            tokens = self._vllm.step(self.llm)
            now = time.perf_counter()
            for req_id, ids in tokens.items():
                if ids:
                    found.outputs[req_id] += ids
                    found.gaps += [(now, now - last[req_id])] if req_id in last else []
                    last[req_id] = now
            if is_over():
                self._vllm.abort(self.llm, list(found.outputs))
                break
        found.seconds, found.cpu_s = time.perf_counter() - started, time.thread_time() - cpu_started
        found.num_tokens = sum(map(len, found.outputs.values()))
        self._vllm.step(self.llm)  # tells the worker that they have finished
        return found
