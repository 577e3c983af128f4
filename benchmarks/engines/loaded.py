"""The engines of `osd bench control`, all in one process, and the load on them: numbers of streams
and tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import engine, models
from osd.tiny.traffic import HOME, requests

OUTPUT_TOKENS = 48
"""Of each request."""
NUM_PROMPTS = 256
SEED = 77_000
MAX_STREAMS = 16

Phase = tuple[int, int]
"""(streams kept busy, tokens to be delivered before the next phase)"""
LOADS: dict[str, tuple[Phase, ...]] = {
    "1 stream": ((1, 96),),
    "4 streams": ((4, 320),),
    "16 streams": ((16, 1024),),
    "ramp 1-16-1": ((1, 48), (4, 192), (16, 768), (4, 192), (1, 48)),
}
NOISE = {"good": 0.0, "middling": 0.5, "useless": 3.0}
"""Draft -> noise added to the weights of the one that was trained, in units of their own
deviation."""


@dataclass(slots=True)
class Driven:
    """What one loading of an engine brought."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process, all its threads."""
    num_tokens: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """index of the prompt -> tokens"""


class Loaded:
    """An engine, its prompts, and its control if it has one."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        *,
        k: int,
        settings: dict[str, Any] | None,
        speculates: bool,
        is_async: bool = False,
        batch: int = MAX_STREAMS,
    ) -> None:
        from benchmarks.engines import vllm_engine as vllm
        from serving.speculation.sleep.runners import lazy_draft
        from serving.speculation.step_split import StepSplit

        options: dict[str, Any] = {
            "worker_extension_cls": "",
            "kv_cache_memory_bytes": 8 * batch << 20,
        }
        if not speculates:
            options["speculative_config"] = None
        if settings is not None:
            options |= {
                "scheduler_cls": "serving.speculation.scheduler.controlled_scheduler",
                "additional_config": {"osd": settings},
            }
        with vllm.scheduling(is_async):
            self._engine = engine.Engine(
                target, models.release(draft, 1), k=k, batch=batch, **options
            )
        self._running: dict[str, int] = {}
        """Requests in flight, and the tokens that they still want."""
        self._core = self._engine.llm.llm_engine.engine_core.engine_core
        if settings is not None:
            runner = self._core.model_executor.driver_worker.worker.model_runner
            self.lazy = lazy_draft(runner)
            self.split = StepSplit()
            self.split.start()

    def command(self, name: str, argument: Any = None) -> Any:
        """Of the control (`serving/speculation/scheduler.py`)."""
        return json.loads(self._core.scheduler.osd_command(name, json.dumps(argument)))

    def meter(self) -> Callable[[], float]:
        """From now on the CPU seconds that the control takes in the scheduler's thread, so far."""
        scheduler, spent = self._core.scheduler, [0.0]
        own = scheduler._osd_guard

        def guard(act: Callable[[], Any]) -> Any:
            started = time.thread_time()
            try:
                return own(act)
            finally:
                spent[0] += time.thread_time() - started

        scheduler._osd_guard = guard
        return lambda: spent[0]

    def swap(self, directory: Path) -> None:
        """Another draft, told to the control as a replica tells it, without a prediction."""
        from safetensors.torch import load_file

        from serving.swap import weights

        worker = self._core.model_executor.driver_worker.worker
        weights.load_draft_weights(worker, load_file(directory / "model.safetensors"))
        self.command("restart", None)

    def drive(
        self,
        phases: Sequence[Phase],
        prompts: Sequence[list[int]],
        first: int,
        is_over: Callable[[], bool] = lambda: False,
        *,
        goes_on: bool = False,
        temperature: float = 0.0,
    ) -> Driven:
        """Keep the streams of each phase busy with the prompts from `first` on, until its tokens
        are there or, asked before every step, it is over. Requests that are not finished then are
        aborted or, where it goes on, left for the next drive."""
        from benchmarks.engines import vllm_engine as vllm

        llm, found, running, index = self._engine.llm, Driven(), self._running, first
        started, cpu_before = time.perf_counter(), time.process_time()
        for streams, num_tokens in phases:
            goal = found.num_tokens + num_tokens
            while found.num_tokens < goal and not is_over():
                while len(running) < streams:
                    prompt = prompts[index % len(prompts)]
                    vllm.add(llm, str(index), prompt, OUTPUT_TOKENS, temperature)
                    running[str(index)] = OUTPUT_TOKENS
                    index += 1
                for req_id, tokens in vllm.step(llm).items():
                    found.outputs.setdefault(int(req_id), []).extend(tokens)
                    found.num_tokens += len(tokens)
                    running[req_id] -= len(tokens)
                    if running[req_id] <= 0:
                        del running[req_id]
        found.seconds = time.perf_counter() - started
        found.cpu_seconds = time.process_time() - cpu_before
        if not goes_on:
            vllm.abort(llm, list(running))
            vllm.step(llm)
            running.clear()
        return found

    def add(self, req_id: str, prompt: list[int], num_tokens: int) -> None:
        """Queue a request for exactly so many tokens."""
        from benchmarks.engines import vllm_engine as vllm

        vllm.add(self._engine.llm, req_id, prompt, num_tokens)

    def step(self) -> dict[str, list[int]]:
        """One step: request -> tokens it brought."""
        from benchmarks.engines import vllm_engine as vllm

        return vllm.step(self._engine.llm)


def controlled(
    target: Path, draft: Path, k_max: int, is_async: bool = False
) -> tuple[Loaded, Loaded]:
    """Two engines alike, one to be forced and one to decide, so that neither learns from the
    other's steps."""
    fixed, auto = (
        Loaded(target, draft, k=k_max, settings=settings(k_max), speculates=True, is_async=is_async)
        for _ in range(2)
    )
    return fixed, auto


def home_prompts() -> list[list[int]]:
    """Token ids of requests the draft was trained for, in the target's chat format."""
    from transformers import AutoTokenizer

    from osd.tiny.models import ensure

    tokenizer: Any = AutoTokenizer.from_pretrained(ensure().target)
    chats = [[{"role": "user", "content": r.prompt}] for r in requests(HOME, NUM_PROMPTS, SEED)]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


def drafts(directory: Path) -> dict[str, Path]:
    """A good, a middling and a useless draft of one size."""
    from osd.tiny.models import ensure

    source = ensure().draft
    return {
        name: models.copy_with_noise(source, directory / name, noise) if noise else source
        for name, noise in NOISE.items()
    }


def settings(k_max: int, mode: str = "auto") -> dict[str, Any]:
    """Of a control that knows nothing of the draft beforehand."""
    from serving.speculation.control import Settings

    return asdict(Settings(mode=mode, k_max=k_max)) | {"proposers": ["draft", "memory"]}
