"""Requests that are not drafted for, in the worker: the samplers get what vLLM leaves out beside a
draft (`undrafted.py` says which requests, and why).

`logit_bias`, `min_p`   V1: the processors that vLLM does not build; V2 applies both to every row
`logprob_token_ids`     V1, V2: the rejection sampler returns them, also beside `logprobs`
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from serving.vllm import names_v2, parts
from serving.vllm.hooks import is_v2, to_device
from serving.vllm.name import resolve

logger = logging.getLogger(__name__)


def sample_undrafted(runner: Any) -> str:
    """Let the samplers of this model runner serve such requests. Returns why they cannot; "" when
    they can. No request may be running."""
    try:
        if problem := parts.problem_with("undrafted_v2" if is_v2(runner) else "undrafted"):
            return problem
        if getattr(runner, "rejection_sampler", None) is None:
            return ""  # a rank that does not sample
        if is_v2(runner):
            return _sample_undrafted_v2(runner)
        _add_left_out_processors(runner)
        _ChosenLogprobs(runner.rejection_sampler)
        return ""
    except Exception as error:
        logger.exception("requests that are not drafted for cannot be sampled")
        return f"{type(error).__name__}: {error}"


def _add_left_out_processors(runner: Any) -> None:
    """vLLM builds the processors of `logit_bias` and `min_p` only in engines without
    speculation."""
    from vllm.utils.torch_utils import PIN_MEMORY
    from vllm.v1.sample import logits_processor

    batch = runner.input_batch
    if batch.num_reqs:
        raise RuntimeError("requests are running already")
    built = {type(each): each for each in batch.logitsprocs.all}
    for kind in logits_processor.BUILTIN_LOGITS_PROCESSORS:
        if kind not in built:
            built[kind] = kind(runner.vllm_config, runner.device, PIN_MEMORY)
    order = [*logits_processor.BUILTIN_LOGITS_PROCESSORS, *built]  # biases come after min_tokens
    batch.logitsprocs = logits_processor.LogitsProcessors(
        built.pop(kind) for kind in order if kind in built
    )
    batch.sampling_metadata = batch._make_sampling_metadata()


class _ChosenLogprobs:
    """Wraps V1's rejection sampler, so that it returns the log-probabilities of
    `logprob_token_ids`, and those of other requests beside them.

    As it comes, it returns none of them, and raises beside a request for `logprobs`.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._forward, self._gather = sampler.forward, sampler._get_logprobs_tensors
        self._chosen: dict[int, list[int]] = {}
        """Row of the batch -> its chosen tokens, during a call of `forward`."""
        sampler.forward, sampler._get_logprobs_tensors = self.forward, self.gather

    def forward(
        self,
        metadata: Any,
        draft_probs: Any,
        logits: torch.Tensor,
        sampling: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As vLLM's."""
        if sampling.logprob_token_ids is None:
            return self._forward(metadata, draft_probs, logits, sampling, *args, **kwargs)
        self._chosen = {row: ids for row, ids in sampling.logprob_token_ids.items() if ids}
        most = sampling.max_num_logprobs
        if self._chosen and most is None:
            most = 0
        sampling = replace(sampling, logprob_token_ids=None, max_num_logprobs=most)
        try:
            return self._forward(metadata, draft_probs, logits, sampling, *args, **kwargs)
        finally:
            self._chosen = {}

    def gather(
        self,
        max_num_logprobs: int,
        metadata: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
        *args: Any,
    ) -> Any:
        """As vLLM's `_get_logprobs_tensors`."""
        found = self._gather(
            max_num_logprobs,
            metadata,
            logits,
            target_logits,
            bonus_logits,
            sampled_token_ids,
            *args,
        )
        if not self._chosen:
            return found
        scores_BV = bonus_logits.float()
        if not self._sampler.is_logits_logprobs_mode:
            scores_BV = self._sampler.sampler.compute_logprobs(scores_BV)
        return with_chosen(found, self._chosen, scores_BV, sampled_token_ids.shape[1])


def with_chosen(
    found: Any, chosen: dict[int, list[int]], scores_BV: torch.Tensor, slots: int
) -> Any:
    """vLLM's `LogprobsTensors` with the scores of chosen tokens behind the sampled one's.

    `found` has `slots` rows for each request of the batch; one without draft tokens uses the first.
    `chosen`: index in the batch -> token ids.
    """
    device, num_requests = scores_BV.device, len(chosen)
    most = max(len(ids) for ids in chosen.values())
    ids_NC = torch.zeros(num_requests, most, dtype=torch.int64)
    is_chosen_NC = torch.zeros(num_requests, most, dtype=torch.bool)
    for n, ids in enumerate(chosen.values()):
        ids_NC[n, : len(ids)] = torch.tensor(ids)
        is_chosen_NC[n, : len(ids)] = True
    index_N = to_device(np.fromiter(chosen, np.int64), device)
    ids_NC = to_device(ids_NC.numpy(), device)
    is_chosen_NC = to_device(is_chosen_NC.numpy(), device)
    scores_NC = scores_BV[index_N].gather(-1, ids_NC).masked_fill(~is_chosen_NC, -torch.inf)
    missing = max(0, 1 + most - found.logprobs.shape[1])
    token_ids = torch.nn.functional.pad(found.logprob_token_ids, (0, missing))
    logprobs = torch.nn.functional.pad(found.logprobs, (0, missing), value=-torch.inf)
    token_ids[index_N * slots, 1 : 1 + most] = ids_NC.to(token_ids.dtype)
    logprobs[index_N * slots, 1 : 1 + most] = scores_NC
    return found._replace(logprob_token_ids=token_ids, logprobs=logprobs)


def _sample_undrafted_v2(runner: Any) -> str:
    """V2 keeps `logit_bias` and `min_p` as states of the requests and applies them to every row."""
    if runner.batch_sharder is not None:
        return "the V2 model runner gathers samples from several ranks"
    if runner.rejection_sampler.enable_adaptive_verification:
        return "the V2 model runner shortens drafts on the device"
    _ChosenLogprobsV2(runner.rejection_sampler)
    return ""


class _ChosenLogprobsV2:
    """Wraps V2's rejection sampler as `_ChosenLogprobs` does V1's."""

    def __init__(self, rejection_sampler: Any) -> None:
        self._sampler = rejection_sampler.sampler
        self._verify = rejection_sampler._verify_in_chunks
        self._gather = rejection_sampler._get_logprobs_tensors
        self._most_chosen = 0
        self._state_of_row: torch.Tensor | None = None
        """[rows of logits that were not gathered yet] -> index of the request's state"""
        rejection_sampler._verify_in_chunks = self.verify
        rejection_sampler._get_logprobs_tensors = self.gather

    def verify(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's `_verify_in_chunks`."""
        state = self._sampler.logprob_token_ids_state
        self._most_chosen = state.max_num_token_ids(input_batch.idx_mapping_np)
        self._state_of_row = input_batch.expanded_idx_mapping
        return self._verify(logits, input_batch, *args, **kwargs)

    def gather(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
        *args: Any,
    ) -> Any:
        """As vLLM's `_get_logprobs_tensors`, which it calls for one chunk of requests after the
        other."""
        most = max(0, max_num_logprobs) if self._most_chosen else max_num_logprobs
        found = self._gather(
            sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, most, *args
        )
        if not self._most_chosen:
            return found
        assert self._state_of_row is not None
        rows = logits.shape[0]
        state_of_row, self._state_of_row = self._state_of_row[:rows], self._state_of_row[rows:]
        own = resolve(names_v2.TOP_SCORES)(
            logits,
            most,
            found.logprob_token_ids[:, 0].contiguous(),
            None,
            logprob_token_ids_state=self._sampler.logprob_token_ids_state,
            expanded_idx_mapping=state_of_row,
            max_per_req_token_ids=self._most_chosen,
            logits_mode=self._sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
        return found._replace(
            logprob_token_ids=own.logprob_token_ids,
            logprobs=own.logprobs,
            selected_token_ranks=own.selected_token_ranks,
        )
