"""As `names.py`, for the V2 model runner: its parts in place of those of the V1 model runner."""

from __future__ import annotations

from serving.vllm.name import Name

ATTENTION_METADATA = "vllm.v1.worker.gpu.attn_utils:build_attn_metadata"
SLOT_MAPPINGS = "vllm.v1.worker.gpu.attn_utils:build_slot_mappings_by_layer"
TOP_SCORES = "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores"
SCHEDULED = "vllm.v1.core.sched.output:SchedulerOutput"
LOGPROBS = "vllm.v1.outputs:LogprobsTensors"

_V2 = "vllm.v1.worker.gpu"
_REJECTION = f"{_V2}.spec_decode.rejection_sampler:RejectionSampler"

UNDRAFTED: tuple[Name, ...] = (
    Name("vllm.v1.core.sched.scheduler:Scheduler.schedule", takes=("self",)),
    Name("vllm.v1.core.sched.scheduler:Scheduler.add_request", takes=("self", "request")),
    Name(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        says=("self.use_v2_model_runner =", "self.running", "self.requests"),
    ),
    Name(
        "vllm.v1.request:Request.__init__",
        says=("self.request_id =", "self.sampling_params =", "self.spec_token_ids"),
    ),
    Name("vllm.v1.request:Request.num_output_tokens"),
    Name(
        "vllm.sampling_params:SamplingParams",
        has=("logit_bias", "min_p", "logprob_token_ids", "thinking_token_budget", "min_tokens"),
    ),
    Name("vllm.sampling_params:SamplingParams.all_stop_token_ids"),
    Name("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", takes=("self", "method")),
    Name(LOGPROBS, has=("logprob_token_ids", "logprobs")),
)
"""What serving requests without drafts needs with any model runner."""

NAMES_V2: dict[str, tuple[Name, ...]] = {
    "capture_v2": (
        Name(
            f"{_V2}.model_runner:GPUModelRunner.execute_model", takes=("self", "scheduler_output")
        ),
        Name(f"{_V2}.sample.sampler:Sampler.__call__", takes=("self", "logits", "input_batch")),
        Name(
            f"{_V2}.spec_decode.rejection_sampler:RejectionSampler.__call__",
            takes=("self", "logits", "input_batch"),
        ),
        Name(f"{_V2}.sample.output:SamplerOutput", has=("sampled_token_ids", "num_sampled")),
        Name(
            f"{_V2}.input_batch:InputBatch",
            has=(
                "req_ids",
                "num_reqs",
                "num_draft_tokens_per_req",
                "num_computed_tokens_np",
                "num_scheduled_tokens",
                "prefill_len_np",
                "input_ids",
                "positions",
                "logits_indices",
                "cu_num_logits",
            ),
        ),
        Name(SCHEDULED, has=("scheduled_new_reqs", "finished_req_ids")),
    ),
    "sleep_v2": (
        Name(
            f"{_V2}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator.propose",
            takes=("self", "input_batch", "dummy_run", "num_speculative_tokens"),
        ),
        Name(
            f"{_V2}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator._run_model",
            takes=(
                "self",
                "input_ids",
                "positions",
                "attn_metadata",
                "slot_mappings",
                "num_tokens_across_dp",
            ),
        ),
        Name(
            f"{_V2}.block_table:BlockTables.append_block_ids",
            takes=("self", "req_index", "new_block_ids", "overwrite"),
        ),
        Name(
            ATTENTION_METADATA,
            takes=(
                "attn_groups",
                "num_reqs",
                "num_tokens",
                "query_start_loc_gpu",
                "query_start_loc_cpu",
                "max_query_len",
                "seq_lens",
                "max_seq_len",
                "block_tables",
                "slot_mappings",
                "kv_cache_config",
                "seq_lens_cpu_upper_bound",
                "positions",
                "is_prefilling",
            ),
        ),
        Name(SLOT_MAPPINGS, takes=("slot_mappings", "kv_cache_config")),
        Name(
            f"{_V2}.spec_decode.speculator:DraftModelSpeculator.__init__",
            says=(
                "self.device =",
                "self.num_speculative_steps =",
                "self.draft_model_config =",
                "self.max_num_tokens =",
                "self.draft_tokens =",
            ),
        ),
        Name(
            f"{_V2}.spec_decode.speculator:DraftModelSpeculator.set_attn",
            says=("self.kv_cache_config =", "self.attn_groups", "self.draft_attn_layer_names"),
        ),
        Name(
            f"{_V2}.block_table:BlockTables.__init__",
            says=("self.block_sizes =", "self.cp_size =", "self.input_block_tables"),
        ),
        Name(
            f"{_V2}.states:RequestState.__init__",
            says=("self.req_id_to_index", "self.all_token_ids ="),
        ),
        Name(
            f"{_V2}.input_batch:InputBatch",
            has=(
                "req_ids",
                "num_reqs",
                "num_computed_tokens_np",
                "num_scheduled_tokens",
                "idx_mapping",
                "idx_mapping_np",
            ),
        ),
        Name(
            f"{_V2}.model_runner:GPUModelRunner.sample_tokens",
            says=("num_speculative_tokens=num_spec_tokens",),
        ),
    ),
    "memory_v2": (
        Name(
            f"{_V2}.model_runner:GPUModelRunner.postprocess_sampled",
            takes=("self", "idx_mapping", "sampled_tokens", "num_sampled"),
        ),
        Name(
            f"{_V2}.model_runner:GPUModelRunner.sample_tokens",
            says=(
                "self.postprocess_sampled(",
                "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens",
                "self.draft_tokens_handler.set_draft_tokens(",
            ),
        ),
        Name(
            f"{_V2}.spec_decode.utils:DraftTokensHandler.set_draft_tokens",
            takes=("self", "input_batch", "draft_tokens"),
        ),
        Name(f"{_V2}.input_batch:InputBatch", has=("req_ids", "idx_mapping_np")),
        Name("vllm.v1.request:Request.__init__", says=("self.spec_token_ids",)),
        Name("vllm.v1.request:Request.__init__", says=("self.is_prefill_chunk =",)),
    ),
    "sampled_v2": (
        Name(f"{_V2}.model_runner:GPUModelRunner.sample", says=("self.speculator.draft_logits",)),
        Name(
            f"{_REJECTION}._verify_in_chunks",
            takes=("self", "logits", "input_batch", "draft_logits", "draft_sampled"),
        ),
        Name(f"{_REJECTION}.__init__", says=("self.enable_adaptive_verification =",)),
        Name(f"{_V2}.spec_decode.speculator:DraftModelSpeculator.draft_logits_spec"),
        Name(
            f"{_V2}.input_batch:InputBatch",
            has=("req_ids", "num_draft_tokens_per_req", "idx_mapping_np"),
        ),
    ),
    "undrafted_v2": (
        *UNDRAFTED,
        Name(LOGPROBS, has=("selected_token_ranks",)),
        Name(
            f"{_REJECTION}.__init__",
            says=("self.sampler =", "self.enable_adaptive_verification ="),
        ),
        Name(
            f"{_V2}.sample.sampler:Sampler.__init__",
            says=("self.logprobs_mode =", "self.logprob_token_ids_state ="),
        ),
        Name(
            f"{_V2}.sample.logprob:LogprobTokenIdsState.max_num_token_ids",
            takes=("self", "idx_mapping_np"),
        ),
        Name(f"{_V2}.input_batch:InputBatch", has=("idx_mapping_np", "expanded_idx_mapping")),
        Name(f"{_V2}.model_runner:GPUModelRunner.__init__", says=("self.batch_sharder",)),
        Name(f"{_REJECTION}._verify_in_chunks", takes=("self", "logits", "input_batch")),
        Name(
            f"{_REJECTION}._get_logprobs_tensors",
            takes=(
                "self",
                "sampled",
                "num_sampled",
                "logits",
                "cu_num_logits",
                "cu_num_logits_np",
                "max_num_logprobs",
            ),
        ),
        Name(f"{_V2}.sample.sampler:Sampler.apply_sampling_params", takes=("self", "logits")),
        Name(
            TOP_SCORES,
            takes=(
                "logits",
                "num_logprobs",
                "sampled_token_ids",
                "cu_num_logits",
                "logprob_token_ids_state",
                "expanded_idx_mapping",
                "max_per_req_token_ids",
                "logits_mode",
            ),
        ),
    ),
}
