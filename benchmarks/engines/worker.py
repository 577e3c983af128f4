"""The worker extension of measured engines: the product's own, with a metered hook. Its traces are
encoded and thrown away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from buffers.codec import encode_trace
from osd.records import Trace
from serving.swap.swap import DraftSwapper
from serving.vllm.hooks import Listener, NewRequest, Proposed, Verification, VerificationHook
from serving.worker import WorkerExtension

CAPTURE_THREAD = "osd-capture"


class MeteredHook(VerificationHook):
    """The hook, with the CPU time it takes in the engine's thread."""

    def __init__(self, model_runner: Any, listener: Listener) -> None:
        self.cpu_s = 0.0
        super().__init__(model_runner, _MeteredListener(listener, self))

    def _after_verification(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        started = time.thread_time()
        super()._after_verification(module, args, output)
        self.cpu_s += time.thread_time() - started


class _MeteredListener:
    """Adds what `on_proposed` and `on_schedule` take; `on_verify` is within what the hook meters
    itself."""

    def __init__(self, listener: Listener, hook: MeteredHook) -> None:
        self._listener, self._hook = listener, hook
        self.on_verify: Callable[[Verification], None] = listener.on_verify
        self.on_failure: Callable[[Exception], None] = listener.on_failure

    def on_proposed(self, proposed: Proposed) -> None:
        started = time.thread_time()
        self._listener.on_proposed(proposed)
        self._hook.cpu_s += time.thread_time() - started

    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None:
        started = time.thread_time()
        self._listener.on_schedule(new, finished)
        self._hook.cpu_s += time.thread_time() - started


class BenchWorker(WorkerExtension):
    """`osd_start` as in the product; `osd_attach` and `osd_detach` switch between a hooked and a
    bare engine."""

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        self.osd_sent = {"traces": 0, "rows": 0, "bytes": 0, "token_bytes": 0}

        def put(traces: Sequence[Trace]) -> int:
            for trace in traces:
                self.osd_sent["traces"] += 1
                self.osd_sent["rows"] += trace.num_rows
                self.osd_sent["bytes"] += len(encode_trace(trace))
                self.osd_sent["token_bytes"] += trace.prompt_ids.nbytes + trace.output_ids.nbytes
            return len(traces)

        return put, dict

    def osd_attach(self) -> None:
        """Hook the engine, with meters."""
        self.osd_hook = MeteredHook(self.model_runner, self.osd_capture)  # type: ignore[attr-defined]

    def osd_detach(self) -> None:
        """Leave the engine as vLLM made it."""
        assert self.osd_hook is not None
        self.osd_hook.remove()

    def osd_time_proofs(self, num: int) -> list[float]:
        """Seconds of each of so many proofs that the live draft is the one that was committed
        last."""
        swapper, seconds = self.osd_swapper, []
        assert isinstance(swapper, DraftSwapper), "this engine swaps no drafts"
        for _ in range(num):
            started = time.perf_counter()
            problem = swapper.prove()
            seconds.append(time.perf_counter() - started)
            assert not problem, problem
        return seconds

    def osd_costs(self) -> str:
        """Totals so far: {"hook_cpu_s" since the last attach, "thread_cpu_s", "sent",
        "skipped"}."""
        hook_cpu_s = self.osd_hook.cpu_s if isinstance(self.osd_hook, MeteredHook) else 0.0
        return json.dumps(
            {
                "hook_cpu_s": hook_cpu_s,
                "thread_cpu_s": _thread_cpu_s(CAPTURE_THREAD),
                "sent": self.osd_sent,
                "skipped": dict(self.osd_capture.assembler.skipped),
            }
        )


def _thread_cpu_s(name: str) -> float:
    """CPU seconds of the threads of this name, since they began."""
    idents = [t.ident for t in threading.enumerate() if t.name == name and t.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)
