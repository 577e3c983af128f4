"""No wait between host and device in the engine's steps.

`VLLM_GPU_SYNC_CHECK`, read when vLLM is imported, makes vLLM watch `execute_model` and
`sample_tokens` of its worker from the end of the warm-up on, where capture, the sleeping draft and
its catching up run too (`vllm/utils/gpu_sync_debug.py`). With `error` a wait raises: in our hooks
it becomes a hook error, anywhere else it ends the engine. With `warn` each wait is counted here, by
whose code waited.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines import vllm_engine
from benchmarks.gpu.child import Run
from benchmarks.gpu.engines import GpuEngine, random_prompts
from benchmarks.gpu.pairs import SMALL, pair

OURS = ("osd", "serving", "buffers", "trainer")
ROOT = Path(__file__).resolve().parents[3]
CHECK = "gpu_sync_debug.py"
"""Where vLLM's check itself is."""
PLANS = (4, 2, None, 0, 0, 4, 1)
"""Draft tokens per step, in turn: with each, off and back, so that the draft sleeps and catches
up."""


class WaitsByPlace:
    """Counts the warnings of vLLM's check by the place that waited."""

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.vllms: Counter[str] = Counter()

    def listen(self) -> None:
        """To be called before vLLM's check begins, which hands on what it does not raise."""
        own = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
            if is_about_a_wait(str(message)):
                self.add([(f.filename, f.lineno or 0) for f in traceback.extract_stack()[:-1]])
            else:
                own(message, category, filename, lineno, *more)

        warnings.showwarning = show  # type: ignore[assignment]

    def add(self, stack: list[tuple[str, int]]) -> None:
        """A wait with these (file, line) frames, outermost first."""
        for filename, line in reversed(stack):
            path = Path(filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
                self.ours[f"{path.relative_to(ROOT)}:{line}"] += 1
                return
            # Our hooks wrap vLLM's functions, so the inner of the two is the one that waited.
            if "site-packages/vllm/" in filename and path.name != CHECK:
                break
        self.vllms[f"{filename.rpartition('site-packages/')[2]}:{line}"] += 1


def is_about_a_wait(text: str) -> bool:
    """Whether a warning is of vLLM's check."""
    return "called a synchronizing CUDA operation" in text or "GPU<->CPU" in text


def measure(run: Run) -> None:
    """Traffic of all kinds while the check is on."""
    waits = WaitsByPlace()
    waits.listen()
    small = pair(run.models, SMALL)
    dtype = "bfloat16" if run.has_gpu else "float32"
    engine = GpuEngine(run, small, is_controlled=True, dtype=dtype, batch=8)
    engine.start_hooks()
    mode, is_on = state_of_check()
    run.findings.of_gpu("vLLM's check is on", is_on, equals=True, is_key=True)
    if mode == "error":
        run.findings.of_gpu("a planted wait is noticed", planted_wait_is_noticed(), equals=True)
    num_answers = drive(engine, run.pick(4, 1))
    report = engine.report()
    skipped = report["skipped"]
    found = run.findings
    found.fact("answers that are whole", num_answers, equals=24 * run.pick(4, 1))
    found.fact("hook errors", skipped.get("hook_error", 0), equals=0, is_key=True)
    found.fact("rows captured", sum(report["rows"].values()), at_least=100)
    found.fact("problem of the control", control_problem(engine), equals="none")
    found.of_gpu("steps watched", len(engine.steps), at_least=20)
    found.of_gpu("waits in OSD's code", sum(waits.ours.values()), equals=0, is_key=True)
    found.of_gpu("waits in vLLM's own code", sum(waits.vllms.values()), is_key=True)
    for who, places in (("OSD", waits.ours), ("vLLM", waits.vllms)):
        for place, num in places.most_common(8):
            found.detail(f"wait in {who}: {place}, {num} times")
    found.detail(f"graphs {engine.graphs()}")


def drive(engine: GpuEngine, num_rounds: int) -> int:
    """Answers at temperatures 0 and 1 under changing plans, with a swap between two steps. Returns
    how many were as long as asked."""
    from benchmarks.costs.swap import swap_under_load

    num_whole = 0
    for turn in range(num_rounds):
        change = _changing(engine.force)
        outputs = engine.burst(random_prompts(engine.pair, 16, seed=turn), 24, change).outputs
        num_whole += sum(len(tokens) == 24 for tokens in outputs.values())
        engine.force(4)
        some = random_prompts(engine.pair, 8, seed=100 + turn)
        samples = vllm_engine.sample(
            engine.llm, some, num_samples=1, num_tokens=24, temperature=1.0
        )
        num_whole += sum(len(tokens) == 24 for (tokens,) in samples)
    swap_under_load(engine, "ours", engine.release(engine.pair.stranger, 2))
    return num_whole


def _changing(force: Callable[[int | None], None]) -> Callable[[], bool]:
    """Asked after each step: another plan every second one, and it is never over."""
    turn = 0

    def is_over() -> bool:
        nonlocal turn
        if turn % 2 == 0:
            force(PLANS[turn // 2 % len(PLANS)])
        turn += 1
        return False

    return is_over


def control_problem(engine: GpuEngine) -> str:
    """What ended the control of speculation; `none`."""
    import json

    return json.loads(engine.core.scheduler.osd_command("report", "null"))["problem"] or "none"


def state_of_check() -> tuple[str | None, bool]:
    """(mode of vLLM's check, whether it watches)"""
    from vllm.utils import gpu_sync_debug

    return gpu_sync_debug._SYNC_CHECK_MODE, gpu_sync_debug._sync_check_enabled


def planted_wait_is_noticed() -> bool:
    """Whether vLLM's check raises at a wait under its own decorator."""
    import torch
    from vllm.utils.gpu_sync_debug import with_gpu_sync_check

    value = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        with_gpu_sync_check(value.item)()
    except RuntimeError:
        return True
    return False
