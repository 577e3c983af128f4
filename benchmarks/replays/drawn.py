"""Replays of drafts whose tokens are drawn from the draft's distribution q, as vLLM's
`draft_sample_method` "probabilistic" does.

A drafted token y is accepted with probability min(1, p(y) / q(y)), where p is the target's
distribution at the request's temperature. So where x was served, a draft was accepted there with
probability min(1, q(x) / p(x)), and independently of what was accepted elsewhere in the text. A
replay draws that, with the same random numbers for every draft.

Legend: T output tokens, N = T - 1 places from the second output token on, K top-k.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from benchmarks.replays.recording import Recorded
from trainer.batch import collate_outputs
from trainer.draft import Draft
from trainer.loss import at_sampling


def drawn_matches(model: Draft, request: Recorded, max_length: int) -> np.ndarray:
    """bool [1, T - 1]: where a token that the draft draws is accepted, if it comes to be tested."""
    chance_N = chances(model, request, max_length)
    random = np.random.default_rng(crc32(request.prompt_ids.tobytes()))
    return (random.random(len(chance_N)) < chance_N)[None]


@torch.no_grad()
def chances(model: Draft, request: Recorded, max_length: int) -> np.ndarray:
    """float [T - 1]: min(1, q / p) of the served tokens, at the request's temperature. Raises
    `ValueError` for a head, whose distribution differs from depth to depth."""
    trace = request.bare_trace("")
    length = min(max_length, model.max_length)
    batch = collate_outputs([trace], length, model.vocab_size, packed=model.can_pack)
    logits_NV = model(*model.prepared(batch).inputs)
    if not isinstance(logits_NV, Tensor):
        raise ValueError("sampled drafts are replayed of draft models alone")
    q_NV = (logits_NV / request.temperature).log_softmax(-1)
    q_N = q_NV.gather(1, batch.label_ids_N[:, None])[:, 0]
    p_N = _served_logprobs(request, model.vocab_size)[-len(q_N) :]  # a long one loses its start
    return (q_N - p_N).exp().clamp(max=1.0).numpy()


def _served_logprobs(request: Recorded, num_tokens: int) -> Tensor:
    """[T - 1]: log p of the served tokens. Tokens beyond the K listed ones are taken for alike."""
    logprobs_NK = torch.from_numpy(request.target_logprobs[1:]).float()
    tail_N = torch.from_numpy(request.tail_logprob[1:]).float()
    num = len(tail_N)
    every = (
        torch.full((num,), request.temperature),
        torch.ones(num),
        torch.zeros(num, dtype=torch.int64),
    )
    logprobs_NK, tail_N = at_sampling(logprobs_NK, tail_N, num_tokens, *every)
    served_N1 = torch.from_numpy(request.output_ids[1:, None])
    is_served_NK = torch.from_numpy(request.target_ids[1:]) == served_N1
    listed_N = logprobs_NK.masked_fill(~is_served_NK, -torch.inf).amax(1)
    rest_N = tail_N - float(np.log(max(num_tokens - logprobs_NK.shape[1], 1)))
    return torch.where(is_served_NK.any(1), listed_N, rest_N)
