"""Real vLLM in this process: an engine with the project's hooks, stepped by hand."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.support import interpreter

if interpreter.is_asked_for():
    interpreter.take()

from osd.config.schema import CaptureConfig
from osd.records import DraftRelease, Trace
from serving.swap.ranks import Ranks
from serving.worker import WorkerExtension, start_settings
from tests.support.ways import SETTLED, V1_SYNC, Way

SINK: list[Trace] = []
"""Where traces of engines in this process go."""


class ListWorker(WorkerExtension):
    """Traces go into `SINK`."""

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        def put(traces: Sequence[Trace]) -> int:
            SINK.extend(traces)
            return len(traces)

        return put, dict


@contextmanager
def settled_as_on_devices(way: Way) -> Iterator[None]:
    """vLLM on a CPU schedules synchronously, whatever it is asked, and compiles with inductor,
    which takes minutes: here it schedules as the way says, and what dynamo traces runs as it is.
    So do processes that are started meanwhile and have `tests.support.ranked_engines` imported."""
    from vllm.platforms.cpu import CpuPlatform

    own = vars(CpuPlatform)["check_and_update_config"]
    names = {"VLLM_CPU_CI_ENV": "1", SETTLED: way.name}
    before = {name: os.environ.get(name) for name in (*names, START_METHOD)}
    os.environ.update(names)
    settle(way)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = own
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's, of its workers' processes."""


def settle(way: Way) -> None:
    """From now on vLLM on a CPU schedules as the way says."""
    from vllm.platforms.cpu import CpuPlatform

    own = vars(CpuPlatform)["check_and_update_config"]

    def settled(cls: type, config: Any) -> None:
        own.__func__(cls, config)
        config.scheduler_config.async_scheduling = way.is_async
        if way.runner == "V2":  # ranks inherit the interpreter of Triton's kernels
            os.environ[START_METHOD] = "fork"

    CpuPlatform.check_and_update_config = classmethod(settled)  # type: ignore[method-assign]


class Engine:
    """vLLM's `LLM` with `num_speculative_tokens` k, or without speculation when `release` is None.

    `control`: settings of the closed loop, which then schedules.
    """

    WORKER = "tests.support.engines.ListWorker"

    def __init__(
        self,
        target: Path,
        release: DraftRelease | None,
        *,
        k: int = 4,
        control: dict[str, Any] | None = None,
        speculative: dict[str, Any] | None = None,
        way: Way = V1_SYNC,
        **options: Any,
    ) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": str(target),
            "skip_tokenizer_init": True,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": 64 << 20,
            "enforce_eager": not way.is_compiled,
            "dtype": way.dtype,
            "max_model_len": 256,
            "max_num_seqs": 64,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        if release is not None:
            settings["worker_extension_cls"] = self.WORKER
            settings["speculative_config"] = {
                "method": "draft_model",
                "model": release.path,
                "num_speculative_tokens": k,
                **(speculative or {}),
            }
        if control is not None:
            settings["scheduler_cls"] = "serving.speculation.scheduler.controlled_scheduler"
            settings["additional_config"] = {"osd": {"k_max": k, **control}}
        self.is_controlled = control is not None
        self.k = k
        with settled_as_on_devices(way) if way != V1_SYNC else nullcontext():
            self.llm = LLM(**settings)
        self.way = way
        self.said: list[str] = []
        """What the scheduler logged when it was made."""
        self.ranks = Ranks(self._call)
        self.release = release
        self._next = 0

    def start_hooks(self, capture: CaptureConfig, target_id: str = "target") -> None:
        assert self.release is not None
        asyncio.run(self.ranks.start(self._settings(capture, target_id)))

    def _settings(self, capture: CaptureConfig, target_id: str) -> str:
        assert self.release is not None
        more = {
            "k": self.k,
            "sink": {},
            "target_id": target_id,
            "seed": 0,
            "is_controlled": self.is_controlled,
        }
        return start_settings(self.release, capture, **more)

    def set_capture(self, **changes: Any) -> None:
        """Change capture settings of the running hooks (fractions, budget)."""
        capture = self.worker.osd_capture
        capture._config = capture._config.model_copy(update=changes)
        capture.assembler._config = capture._config

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def command(self, name: str, argument: Any = None) -> Any:
        """A command to the closed loop."""
        core = self.llm.llm_engine.engine_core.engine_core
        return json.loads(core.osd_speculation(name, json.dumps(argument)))

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    async def _call(self, method: str, *args: Any) -> list[str]:
        return list(self.llm.collective_rpc(method, args=args))

    def swap(self, release: DraftRelease) -> dict[str, Any]:
        """Stages, waits and commits, as a replica does. Returns the answer or the error."""
        return asdict(asyncio.run(self.ranks.swap(release))[1])

    def add(self, prompt_ids: Sequence[int], *, cache_salt: str = "", **sampling: Any) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._next += 1
        req_id = f"r{self._next}"
        defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "detokenize": False}
        # Otherwise the samples of one request come one by one.
        defaults["output_kind"] = RequestOutputKind.FINAL_ONLY
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if cache_salt:
            prompt["cache_salt"] = cache_salt
        self.llm.llm_engine.add_request(
            req_id,
            prompt,
            SamplingParams(**{**defaults, **sampling}),
        )
        return req_id

    def abort(self, req_id: str) -> None:
        self.llm.llm_engine.abort_request([req_id])

    def run(self, between_steps: Callable[[int], None] | None = None) -> dict[str, list[list[int]]]:
        """Steps until nothing is left. Returns request id -> token ids of each of its samples."""
        done: dict[str, list[list[int]]] = {}
        step = 0
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
            step += 1
            if between_steps is not None:
                between_steps(step)
        self.llm.llm_engine.step()  # tells the worker which requests are finished
        return done

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
        """Token ids of one sample per prompt, all prompts in flight together."""
        ids = [self.add(prompt, **sampling) for prompt in prompts]
        done = self.run()
        return [done[i][0] for i in ids]

    def traces(self) -> list[Trace]:
        """Traces since the last call."""
        self.llm.llm_engine.step()
        self.rpc("osd_drain")
        taken = list(SINK)
        SINK.clear()
        return taken
