"""As `names.py`, for a memory in the workers' processes, with both model runners."""

from __future__ import annotations

from serving.vllm.name import Name

TP_GROUP = "vllm.distributed.parallel_state:get_tp_group"

MEMORY_OF_RANKS: tuple[Name, ...] = (
    Name(TP_GROUP),
    Name(
        "vllm.distributed.parallel_state:GroupCoordinator.broadcast",
        takes=("self", "input_", "src"),
    ),
    Name("vllm.v1.worker.gpu_worker:Worker.execute_model", takes=("self", "scheduler_output")),
    Name("vllm.v1.worker.gpu_worker:Worker.sample_tokens", takes=("self", "grammar_output")),
    Name("vllm.v1.core.sched.output:NewRequestData", has=("prompt_token_ids", "prefill_token_ids")),
    Name("vllm.v1.core.sched.output:CachedRequestData", has=("resumed_req_ids", "all_token_ids")),
    Name(
        "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.__init__",
        says=("self._model_runner_output =",),
    ),
    Name(
        "vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__",
        says=("self.model_runner_output =",),
    ),
)
