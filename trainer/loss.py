"""Distillation losses: pure functions of the draft's logits and the target's truncated
distribution.

Both distributions are coarsened to the K listed tokens and one bucket for all others ("the rest").
Every loss is exact for the coarsened pair. A coarsened divergence is at most the full one
(data processing inequality), and equal to it when K = V. The draft still learns the mass of the
rest; renormalising the K tokens instead would make it over-confident (arXiv 2503.16870).

    forward_kl                Σ p log(p / q)           mass-covering; OSD's loss (arXiv 2310.07177)
    reverse_kl                Σ q log(q / p)           mode-seeking
    jensen_shannon            ½ KL(p‖m) + ½ KL(q‖m)    m = (p + q) / 2, bounded by log 2
    total_variation           ½ Σ |p − q| = 1 − α      α = Σ min(p, q), a sampled draft's acceptance
    negative_log_acceptance   −log α                   total variation's gradient, scaled by 1 / α
    lk_hybrid                 λ KL(p‖q) + (1 − λ) TV   λ = exp(−3 α), no gradient through α
                                                       (arXiv 2602.23881)

Legend: N rows, K top-k, V vocabulary, C = K + 1 buckets (the last one is the rest). p is the
target's distribution, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST_LOGPROB = -30.0
"""Lower bound on the target's log-probabilities: reverse KL is infinite where p = 0."""
LK_RATE = 3.0
"""Rate at which `lk_hybrid` turns from KL to total variation as α rises (the value of the paper's
released code)."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """p and q over the same C buckets. Where `is_in_NC` is false the bucket does not exist in this
    row, and all values are 0."""

    logp_NC: Tensor
    """float32, at least `LOWEST_LOGPROB`"""
    logq_NC: Tensor
    """float32, with gradient"""
    p_NC: Tensor
    """float32, rows sum to 1; 0 where the target gave the bucket no mass"""
    is_in_NC: Tensor
    """bool"""

    @property
    def q_NC(self) -> Tensor:
        return torch.where(self.is_in_NC, self.logq_NC.exp(), 0.0)


Loss = Callable[[Coarse], Tensor]
"""float32 [N], one value per row."""


def coarsen(
    logits_NV: Tensor, target_ids_NK: Tensor, target_logprobs_NK: Tensor, tail_logprob_N: Tensor
) -> Coarse:
    """Both distributions over the K listed tokens and the rest.

    A listed token of probability zero (log-probability -inf, also the padding of shorter rows)
    counts as part of the rest. All gradients are finite: the rest of q is a log-sum-exp over the
    unlisted logits, not 1 minus a sum.
    """
    logits_NV = logits_NV.float()
    log_z_N = logits_NV.logsumexp(1)
    is_listed_NK = target_logprobs_NK > -torch.inf
    logq_NK = logits_NV.gather(1, target_ids_NK) - log_z_N[:, None]
    logq_rest_N, has_rest_N = _log_rest(logits_NV, log_z_N, target_ids_NK, is_listed_NK)
    is_in_NC = torch.cat([is_listed_NK, has_rest_N[:, None]], dim=1)
    logp_NC = torch.cat([target_logprobs_NK, tail_logprob_N[:, None]], dim=1)
    return Coarse(
        logp_NC=torch.where(is_in_NC, logp_NC.clamp(min=LOWEST_LOGPROB), 0.0),
        logq_NC=torch.where(is_in_NC, torch.cat([logq_NK, logq_rest_N[:, None]], dim=1), 0.0),
        p_NC=torch.where(is_in_NC, logp_NC.exp(), 0.0),
        is_in_NC=is_in_NC,
    )


def forward_kl(both: Coarse) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q)."""
    return (both.p_NC * (both.logp_NC - both.logq_NC)).sum(1)


def reverse_kl(both: Coarse) -> Tensor:
    """KL(q‖p) = Σ q (log q − log p)."""
    return (both.q_NC * (both.logq_NC - both.logp_NC)).sum(1)


def jensen_shannon(both: Coarse) -> Tensor:
    """½ KL(p‖m) + ½ KL(q‖m) with m = (p + q) / 2."""
    logm_NC = torch.logaddexp(both.logp_NC, both.logq_NC) - torch.log(torch.tensor(2.0))
    of_p_N = (both.p_NC * (both.logp_NC - logm_NC)).sum(1)
    of_q_N = (both.q_NC * (both.logq_NC - logm_NC)).sum(1)
    return 0.5 * (of_p_N + of_q_N)


def total_variation(both: Coarse) -> Tensor:
    """½ Σ |p − q|, which is 1 − Σ min(p, q)."""
    return 0.5 * (both.p_NC - both.q_NC).abs().sum(1)


def negative_log_acceptance(both: Coarse) -> Tensor:
    """−log Σ min(p, q), in log space, so that it is finite where p and q hardly overlap."""
    least_NC = torch.minimum(both.logp_NC, both.logq_NC).masked_fill(~both.is_in_NC, -torch.inf)
    return -least_NC.logsumexp(1)


def lk_hybrid(both: Coarse) -> Tensor:
    """λ KL(p‖q) + (1 − λ) TV with λ = exp(−3 α). KL prevails while p and q hardly overlap, where
    the gradient of TV vanishes."""
    variation_N = total_variation(both)
    lambda_N = torch.exp(-LK_RATE * (1 - variation_N.detach()))
    return lambda_N * forward_kl(both) + (1 - lambda_N) * variation_N


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}
"""By their names in `trainer.loss`."""


def at_sampling(
    logprobs_NK: Tensor,
    tail_logprob_N: Tensor,
    num_tokens: int,
    temperature_N: Tensor,
    top_p_N: Tensor,
    top_k_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """The K listed log-probabilities, most likely first, and the tail's, as the target samples:
    after temperature, then top-k (0 = off), then top-p, normalised.

    num_tokens: in the vocabulary. The tail is taken for tokens that are alike, which is exact at
    temperature 1.
    """
    num_rest_N = (num_tokens - (logprobs_NK > -torch.inf).sum(1)).clamp(min=1).log()
    tail_N = num_rest_N + (tail_logprob_N - num_rest_N) / temperature_N
    scaled_NK = logprobs_NK / temperature_N[:, None]
    top_k_N = torch.where(top_k_N > 0, top_k_N, num_tokens)
    place_K = torch.arange(logprobs_NK.shape[1], device=logprobs_NK.device)
    scaled_NK = scaled_NK.masked_fill(place_K >= top_k_N[:, None], -torch.inf)
    tail_N = tail_N.masked_fill(top_k_N <= logprobs_NK.shape[1], -torch.inf)
    log_mass_N = torch.logaddexp(scaled_NK.logsumexp(1), tail_N)
    before_NC = (scaled_NK - log_mass_N[:, None]).exp().cumsum(1)
    before_NC = torch.nn.functional.pad(before_NC, (1, 0))
    is_beyond_NC = before_NC >= torch.where(top_p_N < 1, top_p_N, torch.inf)[:, None]
    scaled_NK = scaled_NK.masked_fill(is_beyond_NC[:, :-1], -torch.inf)
    tail_N = tail_N.masked_fill(is_beyond_NC[:, -1], -torch.inf)
    log_mass_N = torch.logaddexp(scaled_NK.logsumexp(1), tail_N)
    return scaled_NK - log_mass_N[:, None], tail_N - log_mass_N


def acceptance(both: Coarse, tail_logprob_N: Tensor) -> Tensor:
    """Σ min(p, q): how likely a token that is drawn from q is accepted. `tail_logprob_N`: the mass
    of p outside its listed tokens, to which a head's rest adds what the head cannot propose."""
    least_NC = torch.minimum(both.p_NC, both.q_NC)
    rest_N = torch.minimum(least_NC[:, -1], tail_logprob_N.exp())
    return least_NC[:, :-1].sum(1) + rest_N


def weighted_mean(loss_N: Tensor, weight_N: Tensor) -> Tensor:
    """Σ w·loss, a scalar, for weights that sum to 1 (`TrainBatch.weight_N`)."""
    return (loss_N * weight_N).sum()


def _log_rest(
    logits_NV: Tensor, log_z_N: Tensor, target_ids_NK: Tensor, is_listed_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """log q of all unlisted tokens together [N], 0 where there is none, and whether there is any
    [N]."""
    # Padding may repeat a listed id. Counts add up where flags would overwrite one another.
    num_listed_NV = torch.zeros_like(logits_NV).scatter_add_(
        1, target_ids_NK, is_listed_NK.to(logits_NV.dtype)
    )
    is_rest_NV = num_listed_NV == 0
    has_rest_N = is_rest_NV.any(1)
    # The log-sum-exp of an empty set has a NaN gradient: rows without unlisted tokens keep all
    # their logits here, and get 0 below.
    rest_NV = logits_NV.masked_fill(~is_rest_NV & has_rest_N[:, None], -torch.inf)
    return torch.where(has_rest_N, rest_NV.logsumexp(1) - log_z_N, 0.0), has_rest_N
