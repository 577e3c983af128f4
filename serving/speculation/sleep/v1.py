"""The sleeping draft on vLLM's V1 model runner.

Under asynchronous scheduling a step is scheduled before the one ahead of it has ended, as if all
draft tokens in flight were accepted. vLLM's runner corrects the host's positions after it has
launched the target (`correct_spec_decode_token_counts`), so they are exact whenever the draft would
run. Tokens stay on the device (`unseen_tokens.py`).
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from serving.speculation.sleep.lazy import READS_HIDDEN_STATES, Flat, LazyDraft
from serving.speculation.sleep.missed import Missed, parts
from serving.speculation.sleep.unseen_tokens import UnseenTokens
from serving.vllm import names
from serving.vllm.heads import HEAD_METHOD
from serving.vllm.hooks import to_device
from serving.vllm.name import resolve


def why_not(runner: Any) -> str:
    """Why this V1 runner's draft cannot be left out of a step; "" when it can."""
    config, parallel = runner.speculative_config, runner.vllm_config.parallel_config
    drafter = getattr(runner, "drafter", None)  # on the last rank of a pipeline alone
    if getattr(config, "method", "") == HEAD_METHOD:
        return READS_HIDDEN_STATES
    if config is None or not config.uses_draft_model() or drafter is None:
        return "it has no KV cache of its own"
    if parallel.data_parallel_size > 1:
        return "ranks under data parallelism must run together"
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "its cache is spread over pipeline stages or context ranks"
    if getattr(drafter, "uses_mrope", False):
        return "it uses M-RoPE"
    if getattr(drafter, "use_heterogeneous_vocab", False):
        return "its vocabulary is not the target's"
    return ""


class LazyDraftV1(LazyDraft):
    """Wraps `drafter.propose`, `propose_draft_token_ids`, `_copy_draft_token_ids_to_cpu` and the
    rejection sampler of one model runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.vllm_config.parallel_config.tensor_parallel_size)
        self._runner, self._drafter = runner, runner.drafter
        self._propose, self._propose_step = runner.drafter.propose, runner.propose_draft_token_ids
        self._copy_to_host = runner._copy_draft_token_ids_to_cpu
        self._verify = runner.rejection_sampler.forward
        self._metadata_at = (
            list(inspect.signature(self._propose_step).parameters).index("common_attn_metadata") - 1
        )
        self._missed = Missed(int(runner.drafter.block_size))
        self._unseen: UnseenTokens | None = None
        if runner.use_async_scheduling:
            self._unseen = UnseenTokens(runner.max_model_len, runner.drafter.device)
        runner.drafter.propose = self.propose
        runner.propose_draft_token_ids = self.propose_step
        runner._copy_draft_token_ids_to_cpu = self.copy_to_host
        runner.rejection_sampler.forward = self.verify

    def propose_step(self, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        """As vLLM's. At k = 0 it skips what vLLM prepares for the draft.

        Under asynchronous scheduling the next step needs some of that where drafts were verified
        in this one: how many were accepted.
        """
        if scheduler_output.num_spec_tokens_to_schedule == 0 and len(given) > self._metadata_at:
            is_single = isinstance(given[0], torch.Tensor) and given[0].shape[-1] == 1
            if self._unseen is None or is_single:
                self._runner._draft_probs = self._runner._draft_prob_req_ids = None
                metadata = given[self._metadata_at]
                if (nothing := self._guarded(lambda: self._before(0, metadata))) is not None:
                    return nothing
        return self._propose_step(scheduler_output, *given, **named)

    def propose(self, **given: Any) -> torch.Tensor:
        """As vLLM's."""
        k, metadata = given["num_speculative_tokens"], given["common_attn_metadata"]
        nothing = self._guarded(lambda: self._before(k, metadata))
        return self._propose(**given) if nothing is None else nothing

    def copy_to_host(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        """As vLLM's. Where one request is about to reach the end of the draft's context, vLLM hands
        out zeros and leaves the draft out for all of the step, which then miss it as at k = 0."""
        if zeros_only:
            self._guarded(lambda: self._miss(self._runner.query_start_loc.np))
        self._copy_to_host(scheduler_output, zeros_only)

    def verify(
        self,
        metadata: Any,
        draft_probs: Any,
        logits: torch.Tensor,
        sampling: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's. Without drafts each request has one row of logits. The rows are copied, since
        the sampler may change them and capture reads them afterwards."""
        wants_logprobs = sampling.max_num_logprobs is not None or getattr(
            sampling, "logprob_token_ids", None
        )
        if metadata.max_spec_len or wants_logprobs or self.is_off:
            return self._verify(metadata, draft_probs, logits, sampling, *args, **kwargs)
        self.num_steps_without_drafts += 1
        return self._runner.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=sampling,
            predict_bonus_token=True,
        )

    def _before(self, k: int, metadata: Any) -> torch.Tensor | None:
        """Called before the draft would run. Returns empty drafts at k = 0; None when the draft is
        to run, after it has caught up."""
        ends = metadata.query_start_loc_cpu.numpy()
        if k == 0:
            self._miss(ends)
            self._drafter.num_speculative_tokens = 0
            self._drafter._last_draft_probs = None
            self.num_forwards_saved += 1
            num_reqs = self._runner.input_batch.num_reqs
            return torch.empty(num_reqs, 0, dtype=torch.int64, device=self._drafter.device)
        req_ids, start_B, end_B = self._meet(ends)
        spans = self._missed.wake(req_ids, start_B, end_B, self._blocks)
        self._catch_up(metadata, spans)
        if self._unseen is not None:
            self._unseen.end(req_ids)
        return None

    def _miss(self, ends: np.ndarray) -> None:
        """The draft is left out of this step."""
        req_ids, start_B, end_B = self._meet(ends)
        self._missed.sleep(req_ids, start_B, end_B, self._blocks)
        if self._unseen is not None:
            self._keep_tokens(self._unseen, req_ids, start_B, ends)

    def _meet(self, ends: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The requests of this step, and which positions of each it computes. `ends`: where each
        request's tokens begin in the step, and the last ones end."""
        batch = self._runner.input_batch
        req_ids = batch.req_ids[: batch.num_reqs]
        start_B = batch.num_computed_tokens_cpu[: batch.num_reqs].copy()
        self._forget_finished(batch.num_reqs)
        met = self._missed.meet(req_ids, start_B, self._blocks)
        if self._unseen is not None:
            self._unseen.end(met)
        return req_ids, start_B, start_B + np.diff(ends[: batch.num_reqs + 1])

    def _keep_tokens(
        self, unseen: UnseenTokens, req_ids: list[str], start_B: np.ndarray, ends: np.ndarray
    ) -> None:
        for b, req_id in enumerate(req_ids):
            if req_id not in unseen:
                unseen.begin(req_id, max(self._num_known(b, req_id), int(start_B[b])))
        unseen.write(req_ids, start_B, ends, self._runner.input_ids.gpu)

    def _num_known(self, b: int, req_id: str) -> int:
        """How many of the request's first tokens the host knows: its prompt, and after preemption
        what it had written by then. `output_token_ids` may know more: where a request has
        penalties, vLLM fills it in afterwards."""
        request = self._runner.requests[req_id]
        prompt = int(request.num_prompt_tokens)
        end = prompt + len(request.output_token_ids)
        unknown = np.flatnonzero(self._runner.input_batch.token_ids_cpu[b, prompt:end] == -1)
        return prompt + int(unknown[0]) if unknown.size else end

    def _forget_finished(self, num_reqs: int) -> None:
        if self._missed.num_requests > 2 * num_reqs + 64:
            running = set(self._runner.requests)
            self._missed.forget_all_but(running)
            if self._unseen is not None:
                self._unseen.end_all_but(running)

    def _blocks(self, b: int) -> np.ndarray:
        table = self._runner.input_batch.block_table[self._drafter.kv_cache_gid]
        return table.block_table.np[b, : table.num_blocks_per_row[b]]

    # -- catching up ------------------------------------------------------------------------------

    def _catch_up(self, metadata: Any, spans: list[tuple[int, int, int]]) -> None:
        for part in parts(spans, int(self._drafter.max_num_tokens)):
            self._forward(metadata, Flat(part))

    def _tokens(self, flat: Flat) -> torch.Tensor:
        """[T] on the device."""
        batch = self._runner.input_batch
        known_T = batch.token_ids_cpu[flat.rows_T, flat.positions_T].astype(np.int64).clip(0)
        if self._unseen is None:
            return to_device(known_T, self._drafter.device)
        req_ids = [batch.req_ids[b] for b in flat.rows_T]
        return self._unseen.read(req_ids, flat.positions_T, known_T)

    def _forward(self, metadata: Any, flat: Flat) -> None:
        """Run the draft once over spans of some requests, to fill its KV cache."""
        set_forward_context = resolve(names.FORWARD_CONTEXT)
        drafter, device = self._drafter, self._drafter.device
        table, size = metadata.block_table_tensor, int(drafter.block_size)
        position_T, row_T = to_device(flat.positions_T, device), to_device(flat.rows_T, device)
        slots = table[row_T, position_T // size].long() * size + position_T % size
        context = type(metadata)(
            query_start_loc=to_device(flat.starts, device),
            query_start_loc_cpu=torch.from_numpy(flat.starts),
            seq_lens=to_device(flat.ends_B, device),
            seq_lens_cpu_upper_bound=torch.from_numpy(flat.ends_B),
            num_reqs=len(flat.rows_B),
            num_actual_tokens=flat.num_tokens,
            max_query_len=int(flat.lengths_B.max()),
            max_seq_len=int(flat.ends_B.max()),
            block_table_tensor=table[to_device(flat.rows_B, device)],
            slot_mapping=slots,
            causal=True,
        )
        _, layers = drafter.build_per_group_and_layer_attn_metadata(context)
        mode, padded, _ = drafter._determine_batch_execution_and_padding(flat.num_tokens)
        drafter.input_ids[: flat.num_tokens] = self._tokens(flat)
        drafter._set_positions(flat.num_tokens, position_T)
        inputs, num_slots = drafter.build_model_inputs_first_pass(flat.num_tokens, padded, None)
        with set_forward_context(
            layers,
            drafter.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=None,
            cudagraph_runtime_mode=mode,
            slot_mapping=drafter._get_slot_mapping(num_slots, slots),
        ):
            drafter.model(**inputs)
        self.num_tokens_caught_up += flat.num_tokens
