"""The sleeping draft on vLLM's V2 model runner, which makes as many passes of the draft as k says.

vLLM's speculator for draft models always makes as many passes as the engine's largest k. Here it
makes k of them, and none at k = 0. Since vLLM 0.33 k is 0 also in steps after which nobody can use
drafts, as within a long prompt: the draft then reads the prompt at its last part.

The runner keeps positions and tokens on the device. What the host has is where a request stands if
all draft tokens in flight are accepted. At most a step is in flight, so that the draft

* begins at most k_max positions too early, at positions it has seen: reading them again changes
  nothing
* ends at most k_max positions too late, at positions that the draft writes before it reads them.

So the host never waits for the device. Tokens are in `req_states.all_token_ids`. Which cache blocks
a request has is told to the device alone: what the runner appends to its block tables is noted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from serving.speculation.sleep.lazy import READS_HIDDEN_STATES, Flat, LazyDraft
from serving.speculation.sleep.missed import Missed, Span, parts
from serving.vllm import names_v2
from serving.vllm.heads import HEAD_METHOD
from serving.vllm.hooks import to_device
from serving.vllm.name import resolve


def why_not(runner: Any) -> str:
    """Why this V2 runner's draft cannot be left out of a step; "" when it can."""
    config, parallel = runner.speculative_config, runner.vllm_config.parallel_config
    speculator = getattr(runner, "speculator", None)  # on the last rank of a pipeline alone
    if getattr(config, "method", "") == HEAD_METHOD:
        return READS_HIDDEN_STATES
    if config is None or not config.uses_draft_model() or speculator is None:
        return "it has no KV cache of its own"
    if parallel.data_parallel_size > 1:
        return "ranks under data parallelism must run together"
    if parallel.pipeline_parallel_size > 1 or runner.block_tables.cp_size > 1:
        return "its cache is spread over pipeline stages or context ranks"
    if getattr(runner, "pcp_manager", None) is not None:
        return "prompts are spread over context ranks"
    if speculator.draft_model_config.uses_mrope:
        return "it uses M-RoPE"
    if len(_groups(speculator)) != 1:
        return "its layers have KV caches of different kinds"
    return ""


def _groups(speculator: Any) -> list[int]:
    """Indices of the KV cache groups with layers of the draft."""
    own = speculator.draft_attn_layer_names
    groups = speculator.kv_cache_config.kv_cache_groups
    return [i for i, group in enumerate(groups) if own & set(group.layer_names)]


class LazyDraftV2(LazyDraft):
    """Wraps `speculator.propose` and `block_tables.append_block_ids` of one model runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.vllm_config.parallel_config.tensor_parallel_size)
        self._runner, self._speculator = runner, runner.speculator
        self._propose = runner.speculator.propose
        self._append_block_ids = runner.block_tables.append_block_ids
        (self._group,) = _groups(runner.speculator)
        self._k_max = int(runner.speculator.num_speculative_steps)
        self._block_size = int(runner.block_tables.block_sizes[self._group])
        self._missed = Missed(self._block_size, slack=self._k_max)
        self._block_ids: dict[int, list[int]] = {}
        """the runner's index of a request -> its cache blocks"""
        self._anew: set[int] = set()
        """indices given to requests since the draft was last asked"""
        runner.speculator.propose = self.propose
        runner.block_tables.append_block_ids = self.append_block_ids

    def append_block_ids(self, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        """As vLLM's. `overwrite`: a request begins, or begins again after preemption."""
        self._append_block_ids(req_index, new_block_ids, overwrite=overwrite)
        if overwrite:
            self._block_ids[req_index] = []
            self._anew.add(req_index)
        self._block_ids.setdefault(req_index, []).extend(new_block_ids[self._group])

    def propose(self, input_batch: Any, *given: Any, **named: Any) -> torch.Tensor:
        """As vLLM's, in k passes. Returns [num_reqs, k_max], of which k columns count."""
        k = named.get("num_speculative_tokens")
        if k is None or named.get("dummy_run") or self.is_left:
            return self._propose(input_batch, *given, **named)
        if not self._guarded(lambda: self._before(k, input_batch)):
            self._speculator.num_speculative_steps = max(1, k)
            try:
                self._propose(input_batch, *given, **named)
            finally:
                self._speculator.num_speculative_steps = self._k_max
        return self._speculator.draft_tokens[: input_batch.num_reqs]

    def _before(self, k: int, batch: Any) -> bool:
        """Called before the draft would run. Returns whether it sleeps; when it is to run, it has
        caught up."""
        req_ids, start_B = batch.req_ids, batch.num_computed_tokens_np
        end_B = start_B + batch.num_scheduled_tokens
        indices = batch.idx_mapping_np.tolist()
        anew = {req_id for req_id, i in zip(req_ids, indices, strict=True) if i in self._anew}
        self._anew.difference_update(indices)
        if self._missed.num_requests > 2 * len(req_ids) + 64:
            self._missed.forget_all_but(self._runner.req_states.req_id_to_index)

        def blocks(b: int) -> np.ndarray:
            return np.asarray(self._block_ids.get(indices[b], ()), np.int64)

        self._missed.meet(req_ids, start_B, blocks, anew)
        if k == 0:
            self._missed.sleep(req_ids, start_B, end_B, blocks)
            self.num_forwards_saved += 1
            return True
        self._catch_up(batch, self._missed.wake(req_ids, start_B, end_B, blocks))
        return False

    # -- catching up ------------------------------------------------------------------------------

    def _catch_up(self, batch: Any, spans: list[Span]) -> None:
        for part in parts(spans, int(self._speculator.max_num_tokens)):
            self._forward(batch, Flat(part))

    @torch.inference_mode()
    def _forward(self, batch: Any, flat: Flat) -> None:
        """Run the draft once over spans of some requests, to fill its KV cache."""
        build_attn_metadata = resolve(names_v2.ATTENTION_METADATA)
        slot_mappings_by_layer = resolve(names_v2.SLOT_MAPPINGS)
        speculator, device = self._speculator, self._speculator.device
        position_T, row_T = to_device(flat.positions_T, device), to_device(flat.rows_T, device)
        row_B = to_device(flat.rows_B, device)
        all_tables = self._runner.block_tables.input_block_tables
        tables = [table[row_B] for table in all_tables]
        own = all_tables[self._group]
        size = self._block_size
        slots_T = own[row_T, position_T // size].long() * size + position_T % size
        slots = slots_T.expand(len(all_tables), -1)
        metadata = build_attn_metadata(
            attn_groups=speculator.attn_groups,
            num_reqs=len(flat.rows_B),
            num_tokens=flat.num_tokens,
            query_start_loc_gpu=to_device(flat.starts, device),
            query_start_loc_cpu=torch.from_numpy(flat.starts),
            max_query_len=int(flat.lengths_B.max()),
            seq_lens=to_device(flat.ends_B, device),
            max_seq_len=int(flat.ends_B.max()),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=speculator.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.from_numpy(flat.ends_B),
            positions=position_T,
            is_prefilling=torch.zeros(len(flat.rows_B), dtype=torch.bool),
        )
        index_T = batch.idx_mapping[row_T].long()
        tokens_T = self._runner.req_states.all_token_ids.gpu[index_T, position_T]
        speculator._run_model(
            tokens_T,
            position_T,
            metadata,
            slot_mappings_by_layer(slots, speculator.kv_cache_config),
            None,
        )
        self.num_tokens_caught_up += flat.num_tokens
