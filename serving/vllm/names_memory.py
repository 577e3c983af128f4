"""As `names.py`, for the memory: in the workers' processes, with both model runners; and beside
sampled drafts."""

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

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

BESIDE_SAMPLED: tuple[Name, ...] = (
    Name("vllm.v1.worker.gpu_worker:Worker.execute_model", takes=("self", "scheduler_output")),
    Name(f"{_RUNNER}._sample", says=("self._get_spec_decode_draft_probs(",)),
    Name(
        f"{_RUNNER}._get_spec_decode_draft_probs",
        takes=("self", "spec_decode_metadata"),
        says=("spec_decode_metadata.num_draft_tokens", "self.input_batch.req_ids"),
    ),
    Name(
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
        has=("draft_token_ids", "num_draft_tokens"),
    ),
)
"""On the V1 model runner."""
