"""As `names.py`, for the V2 model runner: its parts in place of those of the V1 model runner."""

from __future__ import annotations

from serving.vllm.name import Name

ATTENTION_METADATA = "vllm.v1.worker.gpu.attn_utils:build_attn_metadata"
SLOT_MAPPINGS = "vllm.v1.worker.gpu.attn_utils:build_slot_mappings_by_layer"
TOP_SCORES = "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores"
SCHEDULED = "vllm.v1.core.sched.output:SchedulerOutput"

_V2 = "vllm.v1.worker.gpu"
_REJECTION = f"{_V2}.spec_decode.rejection_sampler:RejectionSampler"

UNDRAFTED: tuple[Name, ...] = (
    Name("vllm.v1.core.sched.scheduler:Scheduler.schedule", takes=("self",)),
    Name("vllm.v1.core.sched.scheduler:Scheduler.add_request", takes=("self", "request")),
    Name(
        "vllm.sampling_params:SamplingParams",
        has=("logit_bias", "min_p", "logprob_token_ids", "thinking_token_budget", "min_tokens"),
    ),
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
    ),
    "undrafted_v2": (
        *UNDRAFTED,
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
