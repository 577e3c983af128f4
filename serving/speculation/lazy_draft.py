"""The draft model sleeps in steps without speculation, and catches up when it is needed again.

vLLM runs the draft once in every step, even at k = 0, so that its KV cache keeps up. Here the draft
is left out at k = 0, and the positions it misses are noted per request. The first step that wants
drafts again runs the draft once over them. Its proposals are the same as if it had never slept. A
step without draft tokens is sampled as in an engine without speculation, which gives the same
result as vLLM's rejection sampler in less time.

    k = 0   stale[request] = first position the draft has not seen; mark the blocks of this step
    k > 0   one forward pass over [stale, computed) of each such request, then vLLM's own `propose`

Blocks are marked because the prefix cache may hand them to another request, whose draft would read
cache entries that were never written.

Only draft models with a KV cache of their own can sleep. EAGLE heads read hidden states of the
target that are gone by then. Under asynchronous scheduling the host does not know how far a request
has come. The V2 model runner drafts in another way. In these cases vLLM's way is kept.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import torch

from serving.vllm import names
from serving.vllm.hooks import is_v2

logger = logging.getLogger(__name__)


def can_sleep(runner: Any) -> bool:
    """Whether the drafter of this model runner can be left out of a step."""
    config = runner.speculative_config
    return (
        config is not None
        and not is_v2(runner)
        and config.uses_draft_model()
        and not runner.use_async_scheduling
        and runner.vllm_config.parallel_config.data_parallel_size == 1
        and not getattr(runner.drafter, "uses_mrope", False)
        and not getattr(runner.drafter, "use_heterogeneous_vocab", False)
    )


def lazy_draft(runner: Any) -> LazyDraft | None:
    """Let the draft of this model runner sleep at k = 0; None where it cannot, and vLLM's way is
    kept."""
    try:
        if not can_sleep(runner):
            return None
        if problem := names.missing(names.DRAFTER_NAMES):
            logger.warning("the draft runs at k = 0 too: %s", problem)
            return None
        return LazyDraft(runner)
    except Exception:
        logger.exception("the draft runs at k = 0 too; serving is not affected")
        return None


class LazyDraft:
    """Wraps `drafter.propose`, `propose_draft_token_ids` and the rejection sampler of one model
    runner."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._drafter = runner, runner.drafter
        self._propose, self._propose_step = runner.drafter.propose, runner.propose_draft_token_ids
        self._verify = runner.rejection_sampler.forward
        self._metadata_at = (
            list(inspect.signature(self._propose_step).parameters).index("common_attn_metadata") - 1
        )
        self._stale: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        """request -> tokens computed before its last step; fewer of them now = it starts again"""
        self._is_stale_block: np.ndarray | None = None
        self._is_off = False
        self.num_forwards_saved = 0
        self.num_tokens_caught_up = 0
        self.num_steps_without_drafts = 0
        """Steps sampled without the rejection sampler."""
        runner.drafter.propose = self.propose
        runner.propose_draft_token_ids = self.propose_step
        runner.rejection_sampler.forward = self.verify

    def propose_step(self, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        """As vLLM's. At k = 0 it skips what vLLM prepares for the draft."""
        if scheduler_output.num_spec_tokens_to_schedule == 0 and len(given) > self._metadata_at:
            self._runner._draft_probs = self._runner._draft_prob_req_ids = None
            if (nothing := self._guarded(0, given[self._metadata_at])) is not None:
                return nothing
        return self._propose_step(scheduler_output, *given, **named)

    def propose(self, **given: Any) -> torch.Tensor:
        """As vLLM's."""
        nothing = self._guarded(given["num_speculative_tokens"], given["common_attn_metadata"])
        return self._propose(**given) if nothing is None else nothing

    def verify(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling: Any) -> Any:
        """As vLLM's. Without drafts each request has one row of logits. The rows are copied, since
        the sampler may change them and capture reads them afterwards."""
        wants_logprobs = sampling.max_num_logprobs is not None or getattr(
            sampling, "logprob_token_ids", None
        )
        if metadata.max_spec_len or wants_logprobs or self._is_off:
            return self._verify(metadata, draft_probs, logits, sampling)
        self.num_steps_without_drafts += 1
        return self._runner.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=sampling,
            predict_bonus_token=True,
        )

    def _guarded(self, k: int, metadata: Any) -> torch.Tensor | None:
        if self._is_off:
            return None
        try:
            return self._before(k, metadata)
        except Exception:
            self._is_off = True
            logger.exception("the draft no longer sleeps at k = 0; serving is not affected")
            return None

    def _before(self, k: int, metadata: Any) -> torch.Tensor | None:
        """Called before the draft would run. Returns empty drafts at k = 0; None when the draft is
        to run, after it has caught up."""
        batch = self._runner.input_batch
        num_reqs, req_ids = batch.num_reqs, batch.req_ids
        start_B = batch.num_computed_tokens_cpu[:num_reqs]
        ends = metadata.query_start_loc_cpu.numpy()[: num_reqs + 1]
        end_B = start_B + np.diff(ends)
        self._forget_finished(req_ids)
        self._meet(req_ids, start_B)
        if k == 0:
            for req_id, start in zip(req_ids, start_B.tolist(), strict=False):
                self._stale.setdefault(req_id, start)
            self._mark(start_B, end_B, is_stale=True)
            self._drafter.num_speculative_tokens = 0
            self._drafter._last_draft_probs = None
            self.num_forwards_saved += 1
            return torch.empty(num_reqs, 0, dtype=torch.int64, device=self._drafter.device)
        if self._stale:
            self._catch_up(metadata, req_ids, start_B)
        self._mark(start_B, end_B, is_stale=False)
        return None

    # -- who is stale -----------------------------------------------------------------------------

    def _meet(self, req_ids: list[str], start_B: np.ndarray) -> None:
        """Note where new requests, and those that start again after preemption, begin with blocks
        the draft never wrote."""
        for b, (req_id, start) in enumerate(zip(req_ids, start_B.tolist(), strict=False)):
            if (last := self._computed.get(req_id)) is None or start < last:
                self._stale.pop(req_id, None)
                if start and self._is_stale_block is not None:
                    blocks = self._blocks(b)[: -(-start // self._block_size)]
                    stale = np.nonzero(self._is_stale_block[blocks])[0]
                    if len(stale):
                        self._stale[req_id] = int(stale[0]) * self._block_size
            self._computed[req_id] = start

    def _forget_finished(self, req_ids: list[str]) -> None:
        if len(self._computed) > 2 * len(req_ids) + 64:
            # Requests that wait while others run are forgotten too, and met anew by their blocks.
            running = set(self._runner.requests)
            self._computed = {r: n for r, n in self._computed.items() if r in running}
            self._stale = {r: n for r, n in self._stale.items() if r in running}

    def _mark(self, start_B: np.ndarray, end_B: np.ndarray, *, is_stale: bool) -> None:
        if self._is_stale_block is None:
            if not is_stale:
                return
            self._is_stale_block = np.zeros(1024, bool)
        size = self._block_size
        for b, (start, end) in enumerate(zip(start_B.tolist(), end_B.tolist(), strict=True)):
            blocks = self._blocks(b)[start // size : -(-end // size)]
            if len(blocks) and (newest := int(blocks.max())) >= len(self._is_stale_block):
                grown = np.zeros(2 * newest + 1, bool)
                grown[: len(self._is_stale_block)] = self._is_stale_block
                self._is_stale_block = grown
            self._is_stale_block[blocks] = is_stale

    def _blocks(self, b: int) -> np.ndarray:
        table = self._runner.input_batch.block_table[self._drafter.kv_cache_gid]
        return table.block_table.np[b, : table.num_blocks_per_row[b]]

    @property
    def _block_size(self) -> int:
        return int(self._drafter.block_size)

    # -- catching up ------------------------------------------------------------------------------

    def _catch_up(self, metadata: Any, req_ids: list[str], start_B: np.ndarray) -> None:
        todo: list[tuple[int, int, int]] = []
        for b, (req_id, start) in enumerate(zip(req_ids, start_B.tolist(), strict=False)):
            first = self._stale.pop(req_id, start)
            if first < start:
                todo.append((b, first, start))
        room = int(self._drafter.max_num_tokens)
        part: list[tuple[int, int, int]] = []
        for b, first, end in todo:
            while first < end:
                free = room - sum(stop - begin for _, begin, stop in part)
                if free <= 0:
                    self._forward(metadata, part)
                    part, free = [], room
                part.append((b, first, min(end, first + free)))
                first = part[-1][2]
        if part:
            self._forward(metadata, part)
        if todo and self._is_stale_block is not None:
            first_B = np.array([first for _, first, _ in todo])
            for (b, first, end), _ in zip(todo, first_B, strict=True):
                blocks = self._blocks(b)[first // self._block_size : -(-end // self._block_size)]
                self._is_stale_block[blocks] = False

    def _forward(self, metadata: Any, part: list[tuple[int, int, int]]) -> None:
        """Run the draft once over positions [first, end) of some requests, to fill its KV cache."""
        from vllm.forward_context import set_forward_context

        drafter, device = self._drafter, self._drafter.device
        lengths = np.array([end - first for _, first, end in part], np.int32)
        num_tokens = int(lengths.sum())
        positions = np.concatenate([np.arange(first, end) for _, first, end in part])
        row = np.repeat([b for b, _, _ in part], lengths)
        tokens = self._runner.input_batch.token_ids_cpu[row, positions]
        table = metadata.block_table_tensor
        position_T = torch.from_numpy(positions).to(device)
        row_T = torch.from_numpy(row).to(device)
        slots = table[row_T, position_T // self._block_size].long() * self._block_size
        slots += position_T % self._block_size
        starts = torch.zeros(len(part) + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(np.cumsum(lengths))
        ends = torch.tensor([end for _, _, end in part], dtype=torch.int32)
        context = type(metadata)(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(part),
            num_actual_tokens=num_tokens,
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table[torch.tensor([b for b, _, _ in part], device=device)],
            slot_mapping=slots,
            causal=True,
        )
        _, layers = drafter.build_per_group_and_layer_attn_metadata(context)
        mode, padded, _ = drafter._determine_batch_execution_and_padding(num_tokens)
        drafter.input_ids[:num_tokens] = torch.from_numpy(tokens).to(device)
        drafter._set_positions(num_tokens, position_T)
        inputs, size = drafter.build_model_inputs_first_pass(num_tokens, padded, None)
        with set_forward_context(
            layers,
            drafter.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=None,
            cudagraph_runtime_mode=mode,
            slot_mapping=drafter._get_slot_mapping(size, slots),
        ):
            drafter.model(**inputs)
        self.num_tokens_caught_up += num_tokens
