"""Losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer.loss import forward_kl, weighted_mean

INF = math.inf


def value_and_gradient(
    logits: list[float], ids: list[int], logprobs: list[float], tail: float
) -> tuple[float, list[float]]:
    logits_NV = torch.tensor([logits], requires_grad=True)
    loss_N = forward_kl(logits_NV, torch.tensor([ids]), torch.tensor([logprobs]), torch.tensor([tail]))
    loss_N.sum().backward()
    assert logits_NV.grad is not None
    return float(loss_N.detach()), logits_NV.grad[0].tolist()


def test_one_listed_token_and_the_rest_by_hand() -> None:
    # q = softmax(0, 0, log 2) = (1/4, 1/4, 1/2); p says 0.8 to token 2, 0.2 to the rest.
    # KL = 0.8 ln(0.8/0.5) + 0.2 ln(0.2/0.5). dKL/dz_j = q_j - p_b q_j/q_b, b the bucket of j:
    # token 2: 0.5 - 0.8 = -0.3; tokens 0 and 1: 0.25 - 0.2 * 0.25 / 0.5 = 0.15.
    loss, gradient = value_and_gradient([0.0, 0.0, math.log(2)], [2], [math.log(0.8)], math.log(0.2))
    assert loss == pytest.approx(0.3760029 - 0.1832581, abs=1e-6)
    assert gradient == pytest.approx([0.15, 0.15, -0.3], abs=1e-6)


def test_two_listed_tokens_and_the_rest_by_hand() -> None:
    # q = (0.1, 0.2, 0.3, 0.4). p lists token 3 with 0.5 and token 0 with 0.3; 0.2 for tokens 1 and 2 together (q 0.5).
    # KL = 0.5 ln(5/4) + 0.3 ln 3 + 0.2 ln(2/5) = 0.1115718 + 0.3295837 - 0.1832581
    # token 0: 0.1 - 0.3; token 1: 0.2 - 0.2 * 0.2/0.5; token 2: 0.3 - 0.2 * 0.3/0.5; token 3: 0.4 - 0.5.
    logits = [math.log(q) for q in (0.1, 0.2, 0.3, 0.4)]
    loss, gradient = value_and_gradient(logits, [3, 0], [math.log(0.5), math.log(0.3)], math.log(0.2))
    assert loss == pytest.approx(0.2578974, abs=1e-6)
    assert gradient == pytest.approx([-0.2, 0.12, 0.18, -0.1], abs=1e-6)


def random_rows(num_rows: int, vocab_size: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draft logits, target log-probabilities over everything, and the target truncated to top-k."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    logp_NV = (3 * torch.randn(num_rows, vocab_size, generator=generator)).log_softmax(-1)
    top = logp_NV.topk(top_k, -1)
    tail_N = logp_NV.scatter(1, top.indices, -INF).logsumexp(-1)
    return logits_NV, logp_NV, top.indices, top.values, tail_N


@pytest.mark.parametrize("tail_is_rounding", [False, True])
def test_is_the_full_kl_when_every_token_is_listed(tail_is_rounding: bool) -> None:
    logits_NV, logp_NV, ids_NK, logprobs_NK, tail_N = random_rows(32, 7, 7)
    assert (tail_N == -INF).all()
    if tail_is_rounding:
        tail_N = torch.full((32,), math.log(1e-7))
    full_N = (logp_NV.exp() * (logp_NV - logits_NV.log_softmax(-1))).sum(-1)
    logits_NV.requires_grad_()
    loss_N = forward_kl(logits_NV, ids_NK, logprobs_NK, tail_N)
    torch.testing.assert_close(loss_N, full_N, rtol=1e-5, atol=1e-5)
    loss_N.sum().backward()
    assert logits_NV.grad is not None
    torch.testing.assert_close(logits_NV.grad, logits_NV.detach().softmax(-1) - logp_NV.exp(), rtol=1e-4, atol=1e-5)


def test_is_a_lower_bound_of_the_full_kl_and_never_negative() -> None:
    logits_NV, logp_NV, ids_NK, logprobs_NK, tail_N = random_rows(64, 32, 4)
    full_N = (logp_NV.exp() * (logp_NV - logits_NV.log_softmax(-1))).sum(-1)
    loss_N = forward_kl(logits_NV, ids_NK, logprobs_NK, tail_N)
    assert (loss_N <= full_N + 1e-5).all()
    assert (loss_N >= -1e-6).all()
    assert (loss_N < full_N - 0.01).any()


def test_rests_at_the_target_where_a_renormalised_top_k_would_not() -> None:
    logits_NV = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log().requires_grad_()
    forward_kl(logits_NV, torch.tensor([[0]]), torch.tensor([[0.6]]).log(), torch.tensor([0.4]).log()).sum().backward()
    assert logits_NV.grad is not None
    assert logits_NV.grad.abs().max() < 1e-6


@pytest.mark.parametrize(
    "logits, tail",
    [
        ([500.0, -500.0, -500.0], 0.5),  # q_rest underflows to 0
        ([-500.0, 500.0, 500.0], 0.5),  # q of the listed token underflows to 0
        ([500.0, -500.0, -500.0], 0.0),  # no tail at all
        ([1e4, 1e4, -1e4], 1e-6),
    ],
)
def test_gradients_stay_finite_at_the_extremes(logits: list[float], tail: float) -> None:
    loss, gradient = value_and_gradient(logits, [0], [math.log(1 - tail)], math.log(tail) if tail else -INF)
    assert math.isfinite(loss)
    assert all(math.isfinite(g) and abs(g) <= 1.001 for g in gradient)


def test_padding_of_short_rows_changes_nothing() -> None:
    # Padded entries have id 0 and probability 0, also when id 0 is listed itself.
    logits = [0.3, -1.0, 0.8, 0.1]
    for ids in ([0, 2], [2, 1]):
        plain = value_and_gradient(logits, ids, [math.log(0.5), math.log(0.3)], math.log(0.2))
        padded = value_and_gradient(logits, [*ids, 0, 0], [math.log(0.5), math.log(0.3), -INF, -INF], math.log(0.2))
        assert padded[0] == pytest.approx(plain[0], abs=1e-6)
        assert padded[1] == pytest.approx(plain[1], abs=1e-6)


def test_low_precision_logits_are_computed_in_float32() -> None:
    logits_NV, _, ids_NK, logprobs_NK, tail_N = random_rows(8, 16, 4)
    loss_N = forward_kl(logits_NV.bfloat16(), ids_NK, logprobs_NK, tail_N)
    assert loss_N.dtype == torch.float32
    torch.testing.assert_close(loss_N, forward_kl(logits_NV.bfloat16().float(), ids_NK, logprobs_NK, tail_N))


def test_weights_decide_which_row_counts() -> None:
    assert float(weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([0.25, 0.75]))) == 2.5
