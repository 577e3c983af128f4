"""Distillation losses: pure functions of logits and the target's truncated distribution.

Legend: N rows, K top-k, V vocabulary. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward_kl(logits_NV: Tensor, target_ids_NK: Tensor, target_logprobs_NK: Tensor, tail_logprob_N: Tensor) -> Tensor:
    """KL(p‖q) per row, float32 [N], of both distributions coarsened to the K listed tokens and one bucket for the rest:

        Σ_k p_k (log p_k − log q_k) + p_rest (log p_rest − log q_rest),   q_rest = 1 − Σ_k q_k

    It is a lower bound of the full KL (data processing inequality), equal to it when K = V, and zero only where the
    draft agrees on every listed token and on the mass of the rest. Renormalising the K instead would teach the draft
    to be over-confident (arXiv 2503.16870).

    A listed token of probability zero (log-probability -inf, also how shorter rows are padded) counts as part of the
    rest. Gradients are finite throughout: q_rest is a log-sum-exp over the unlisted logits, never 1 minus a sum.
    """
    logits_NV = logits_NV.float()
    log_z_N = logits_NV.logsumexp(-1)
    is_listed_NK = target_logprobs_NK > -torch.inf
    p_NK = target_logprobs_NK.exp()
    logq_NK = logits_NV.gather(1, target_ids_NK) - log_z_N[:, None]
    listed_N = (p_NK * (target_logprobs_NK.masked_fill(~is_listed_NK, 0.0) - logq_NK)).sum(-1)

    logq_rest_N, has_rest_N = _log_rest(logits_NV, log_z_N, target_ids_NK, is_listed_NK)
    has_rest_N = has_rest_N & (tail_logprob_N > -torch.inf)
    p_rest_N = tail_logprob_N.exp()
    rest_N = p_rest_N * (tail_logprob_N.masked_fill(~has_rest_N, 0.0) - logq_rest_N)
    return listed_N + torch.where(has_rest_N, rest_N, 0.0)


def _log_rest(logits_NV: Tensor, log_z_N: Tensor, target_ids_NK: Tensor, is_listed_NK: Tensor) -> tuple[Tensor, Tensor]:
    """log q of all unlisted tokens together [N], and where there is any such token [N] (elsewhere the value is 0)."""
    # Padding may repeat an id that is listed: count the listings instead of writing flags over one another.
    num_listed_NV = torch.zeros_like(logits_NV).scatter_add_(1, target_ids_NK, is_listed_NK.to(logits_NV.dtype))
    is_rest_NV = num_listed_NV == 0
    has_rest_N = is_rest_NV.any(-1)
    # A row without unlisted tokens would be a log-sum-exp of nothing, whose gradient is NaN: give it zeros.
    rest_NV = logits_NV.masked_fill(~is_rest_NV & has_rest_N[:, None], -torch.inf)
    return torch.where(has_rest_N, rest_NV.logsumexp(-1) - log_z_N, 0.0), has_rest_N


def weighted_mean(loss_N: Tensor, weight_N: Tensor) -> Tensor:
    """Σ w·loss, a scalar, for weights that sum to 1 (`TrainBatch.weight_N`)."""
    return (loss_N * weight_N).sum()
