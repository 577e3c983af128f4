"""Losses against numbers worked out by hand, and against losses over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from osd.config.schema import TrainerConfig
from trainer.loss import LOSSES, coarsen, forward_kl, total_variation, weighted_mean

INF = math.inf
EACH = list(LOSSES)
SMOOTH = ["forward_kl", "reverse_kl", "jensen_shannon"]
"""Those with a gradient where p = q; the others have an edge there."""


def rows(
    name: str, logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor, tail_N: Tensor
) -> Tensor:
    return LOSSES[name](coarsen(logits_NV, ids_NK, logprobs_NK, tail_N))


def value_and_gradient(
    name: str, logits: list[float], ids: list[int], logprobs: list[float], tail: float
) -> tuple[float, list[float]]:
    logits_NV = torch.tensor([logits], requires_grad=True)
    loss_N = rows(
        name, logits_NV, torch.tensor([ids]), torch.tensor([logprobs]), torch.tensor([tail])
    )
    loss_N.sum().backward()
    assert logits_NV.grad is not None
    return float(loss_N.detach()), logits_NV.grad[0].tolist()


def test_every_configured_loss_is_there() -> None:
    assert set(LOSSES) == set(get_args(TrainerConfig.model_fields["loss"].annotation))


def test_one_listed_token_and_the_rest_by_hand() -> None:
    # q = softmax(0, 0, log 2) = (1/4, 1/4, 1/2); p says 0.8 to token 2, 0.2 to the rest.
    # KL = 0.8 ln(0.8/0.5) + 0.2 ln(0.2/0.5). dKL/dz_j = q_j - p_b q_j/q_b, b the bucket of j:
    # token 2: 0.5 - 0.8 = -0.3; tokens 0 and 1: 0.25 - 0.2 * 0.25 / 0.5 = 0.15.
    loss, gradient = value_and_gradient(
        "forward_kl", [0.0, 0.0, math.log(2)], [2], [math.log(0.8)], math.log(0.2)
    )
    assert loss == pytest.approx(0.3760029 - 0.1832581, abs=1e-6)
    assert gradient == pytest.approx([0.15, 0.15, -0.3], abs=1e-6)


# q = (0.1, 0.2, 0.3, 0.4). p lists token 3 with 0.5 and token 0 with 0.3; 0.2 for tokens 1 and 2
# together (q 0.5). As (p, q): token 3 (0.5, 0.4), token 0 (0.3, 0.1), rest (0.2, 0.5). With g_b =
# dL/dq_b, softmax gives dL/dz_j = q_j (g_b − Σ g q), b the bucket of j.
BY_HAND: dict[str, tuple[float, list[float]]] = {
    # 0.5 ln(5/4) + 0.3 ln 3 + 0.2 ln(2/5) = 0.1115718 + 0.3295837 − 0.1832581; dL/dz_j = q_j − p_b
    # q_j / q_b: 0.1 − 0.3; 0.2 − 0.2 * 0.2/0.5; 0.3 − 0.2 * 0.3/0.5; 0.4 − 0.5.
    "forward_kl": (0.2578974, [-0.2, 0.12, 0.18, -0.1]),
    # 0.4 ln 0.8 + 0.1 ln(1/3) + 0.5 ln 2.5 = −0.0892574 − 0.1098612 + 0.4581454; g_b − Σ g q =
    # ln(q_b/p_b) − L: 0.1 (−1.0986123 − L); 0.2 (0.9162907 − L); 0.3 (0.9162907 − L); 0.4
    # (−0.2231436 − L).
    "reverse_kl": (0.2590267, [-0.1357639, 0.1314528, 0.1971792, -0.1928681]),
    # m = (0.45, 0.2, 0.35). Half of KL(p‖m) = (0.0526803 + 0.1216395 − 0.1119232) / 2 = 0.0311983;
    # g = ½ ln(q/m) = (−0.0588915, −0.3465736, 0.1783375), Σ g q = half of KL(q‖m) = 0.0309548:
    # 0.1 (−0.3775284); 0.2 * 0.1473827; 0.3 * 0.1473827; 0.4 (−0.0898463).
    "jensen_shannon": (0.0621531, [-0.0377528, 0.0294765, 0.0442148, -0.0359385]),
    # ½ (0.1 + 0.2 + 0.3); g = (−½, −½, ½), Σ g q = −0.2 − 0.05 + 0.25 = 0.
    "total_variation": (0.3, [-0.05, 0.1, 0.15, -0.2]),
    # α = 0.4 + 0.1 + 0.2 = 0.7; the gradient of total variation over 0.7.
    "negative_log_acceptance": (0.3566749, [-0.0714286, 0.1428571, 0.2142857, -0.2857143]),
    # λ = exp(−3 * 0.7) = 0.1224564: λ 0.2578974 + (1 − λ) 0.3, and the same of the gradients.
    "lk_hybrid": (0.2948443, [-0.0683685, 0.1024491, 0.1536737, -0.1877543]),
}


@pytest.mark.parametrize("name", EACH)
def test_two_listed_tokens_and_the_rest_by_hand(name: str) -> None:
    logits = [math.log(q) for q in (0.1, 0.2, 0.3, 0.4)]
    loss, gradient = value_and_gradient(
        name, logits, [3, 0], [math.log(0.5), math.log(0.3)], math.log(0.2)
    )
    expected, expected_gradient = BY_HAND[name]
    assert loss == pytest.approx(expected, abs=1e-6)
    assert gradient == pytest.approx(expected_gradient, abs=1e-6)


# q = (0.5, 0.3, 0.2); p gives everything to token 0, so tokens 1 and 2 together are (p, q) = (0,
# 0.5).
WITHOUT_TAIL: dict[str, tuple[float, list[float]]] = {
    # ln(1/0.5); q − p, shared out within the rest as q is.
    "forward_kl": (0.6931472, [-0.5, 0.3, 0.2]),
    # ln p of the rest counts as −30: 0.5 ln 0.5 + 0.5 (ln 0.5 + 30); 0.5 (−0.6931472 − L); 0.3
    # (29.3068528 − L); …
    "reverse_kl": (14.3068528, [-7.5, 4.5, 3.0]),
    # m = (0.75, 0.25): ½ ln(4/3) + ½ (½ ln(2/3) + ½ ln 2); g = ½ ln(q/m) = (−0.2027326, 0.3465736),
    # Σ g q = 0.0719205.
    "jensen_shannon": (0.2157616, [-0.1373265, 0.0823959, 0.0549306]),
    # ½ (0.5 + 0.5); g = (−½, ½).
    "total_variation": (0.5, [-0.25, 0.15, 0.1]),
    # α = 0.5.
    "negative_log_acceptance": (0.6931472, [-0.5, 0.3, 0.2]),
    # λ = exp(−1.5) = 0.2231302.
    "lk_hybrid": (0.5430969, [-0.3057826, 0.1834695, 0.1223130]),
}


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("listed", [[0.0], [0.0, -INF]], ids=["not listed", "listed with nothing"])
def test_where_the_target_gave_nothing_by_hand(name: str, listed: list[float]) -> None:
    logits = [math.log(q) for q in (0.5, 0.3, 0.2)]
    loss, gradient = value_and_gradient(name, logits, [0, 1][: len(listed)], listed, -INF)
    expected, expected_gradient = WITHOUT_TAIL[name]
    assert loss == pytest.approx(expected, abs=1e-5)
    assert gradient == pytest.approx(expected_gradient, abs=1e-5)


def test_a_bucket_that_does_not_exist_is_0_everywhere() -> None:
    # One row lists both tokens there are, so has no rest; the other lists one of them, and is
    # padded.
    logits_NV = torch.tensor([[0.3, 0.7], [0.4, 0.6]]).log()
    logprobs_NK = torch.tensor([[0.1, 0.9], [0.8, 0.0]]).log()
    both = coarsen(
        logits_NV, torch.tensor([[0, 1], [1, 0]]), logprobs_NK, torch.tensor([-INF, math.log(0.2)])
    )
    assert both.is_in_NC.tolist() == [[True, True, False], [True, False, True]]
    for values_NC in (both.logp_NC, both.logq_NC, both.p_NC, both.q_NC):
        assert values_NC[~both.is_in_NC].tolist() == [0, 0]
    torch.testing.assert_close(both.q_NC, torch.tensor([[0.3, 0.7, 0], [0.6, 0, 0.4]]))
    torch.testing.assert_close(both.p_NC, torch.tensor([[0.1, 0.9, 0], [0.8, 0, 0.2]]))


def test_less_than_can_be_told_from_nothing_counts_as_so_much_but_keeps_its_mass() -> None:
    both = coarsen(
        torch.zeros(1, 3),
        torch.tensor([[0, 1]]),
        torch.tensor([[0.0, -40.0]]),
        torch.tensor([-29.0]),
    )
    assert both.logp_NC.tolist() == [[0, -30, -29]]
    assert both.p_NC[0].tolist() == pytest.approx([1, math.exp(-40), math.exp(-29)], rel=1e-5)


def test_total_variation_is_what_acceptance_lacks() -> None:
    # α = Σ min(p, q) = 0.4 + 0.1 + 0.2.
    logits_NV = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    both = coarsen(
        logits_NV,
        torch.tensor([[3, 0]]),
        torch.tensor([[0.5, 0.3]]).log(),
        torch.tensor([0.2]).log(),
    )
    assert float(torch.minimum(both.p_NC, both.q_NC).sum()) == pytest.approx(0.7)
    assert float(total_variation(both)) == pytest.approx(1 - 0.7)


def random_rows(
    num_rows: int, vocab_size: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draft logits, target log-probabilities over everything, and the target truncated to top-k."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    logp_NV = (3 * torch.randn(num_rows, vocab_size, generator=generator)).log_softmax(-1)
    top = logp_NV.topk(top_k, -1)
    tail_N = logp_NV.scatter(1, top.indices, -INF).logsumexp(-1)
    return logits_NV, logp_NV, top.indices, top.values, tail_N


def kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    return (p_NV * (p_NV / q_NV).log()).sum(-1)


def overlap(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    return torch.minimum(p_NV, q_NV).sum(-1)


def hybrid(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    lambda_N = (-3 * overlap(p_NV, q_NV).detach()).exp()
    return lambda_N * kl(p_NV, q_NV) + (1 - lambda_N) * (1 - overlap(p_NV, q_NV))


FULL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jensen_shannon": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
    "negative_log_acceptance": lambda p, q: -overlap(p, q).log(),
    "lk_hybrid": hybrid,
}
"""The definitions over the whole vocabulary."""


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("tail_is_rounding", [False, True])
def test_is_the_full_loss_when_every_token_is_listed(name: str, tail_is_rounding: bool) -> None:
    logits_NV, logp_NV, ids_NK, logprobs_NK, tail_N = random_rows(32, 7, 7)
    assert (tail_N == -INF).all()
    if tail_is_rounding:
        tail_N = torch.full((32,), math.log(1e-7))
    reference_NV = logits_NV.double().requires_grad_()
    full_N = FULL[name](logp_NV.double().exp(), reference_NV.softmax(-1))
    full_N.sum().backward()
    logits_NV.requires_grad_()
    loss_N = rows(name, logits_NV, ids_NK, logprobs_NK, tail_N)
    torch.testing.assert_close(loss_N, full_N.float(), rtol=1e-4, atol=1e-5)
    loss_N.sum().backward()
    assert logits_NV.grad is not None and reference_NV.grad is not None
    torch.testing.assert_close(logits_NV.grad, reference_NV.grad.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in EACH if name != "lk_hybrid"])
def test_is_a_lower_bound_of_the_full_loss_and_never_negative(name: str) -> None:
    logits_NV, logp_NV, ids_NK, logprobs_NK, tail_N = random_rows(64, 32, 4)
    full_N = FULL[name](logp_NV.exp(), logits_NV.softmax(-1))
    loss_N = rows(name, logits_NV, ids_NK, logprobs_NK, tail_N)
    assert (loss_N <= full_N + 1e-5).all()
    assert (loss_N >= -1e-6).all()
    assert (loss_N < full_N - 0.01).any()


def test_jensen_shannon_is_bounded_and_survives_disjoint_supports() -> None:
    loss, _ = value_and_gradient("jensen_shannon", [0.0, 200.0], [0], [0.0], -INF)
    assert loss == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_is_zero_where_the_draft_agrees_whatever_is_inside_the_rest(name: str) -> None:
    # A renormalised top-k would ask token 0 for everything; how 0.4 is shared out among the rest is
    # nobody's business.
    logits = [math.log(q) for q in (0.6, 0.25, 0.1, 0.05)]
    loss, gradient = value_and_gradient(name, logits, [0], [math.log(0.6)], math.log(0.4))
    assert loss == pytest.approx(0, abs=1e-6)
    if name in SMOOTH:
        assert max(map(abs, gradient)) < 1e-6


@pytest.mark.parametrize("name", EACH)
def test_going_downhill_leads_to_the_target(name: str) -> None:
    logits_NV, logp_NV, ids_NK, logprobs_NK, tail_N = random_rows(8, 12, 4)
    logits_NV.requires_grad_()
    optimizer = torch.optim.Adam([logits_NV], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 400)
    for _ in range(400):
        optimizer.zero_grad()
        rows(name, logits_NV, ids_NK, logprobs_NK, tail_N).sum().backward()
        optimizer.step()
        schedule.step()
    both = coarsen(logits_NV.detach(), ids_NK, logprobs_NK, tail_N)
    assert (total_variation(both) < 0.02).all()


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(
    "logits, tail",
    [
        ([500.0, -500.0, -500.0], 0.5),  # q_rest underflows to 0
        ([-500.0, 500.0, 500.0], 0.5),  # q of the listed token underflows to 0
        ([500.0, -500.0, -500.0], 0.0),  # no tail at all
        ([-500.0, 500.0, 500.0], 0.0),  # all mass of q where p has none
        ([1e4, 1e4, -1e4], 1e-6),
    ],
)
def test_gradients_stay_finite_at_the_extremes(name: str, logits: list[float], tail: float) -> None:
    loss, gradient = value_and_gradient(
        name, logits, [0], [math.log(1 - tail)], math.log(tail) if tail else -INF
    )
    assert math.isfinite(loss) and loss >= -1e-5
    # Reverse KL weighs log(q / p), which ends at LOWEST_LOGPROB.
    assert all(
        math.isfinite(g) and abs(g) <= (31 if name == "reverse_kl" else 1.001) for g in gradient
    )


@pytest.mark.parametrize(
    "name, least", [("forward_kl", 0.9), ("negative_log_acceptance", 0.3), ("lk_hybrid", 0.9)]
)
def test_a_draft_that_is_wrong_throughout_is_still_pulled_back(name: str, least: float) -> None:
    # q = (e^-10, 1) and p = (0.9999, 0.0001): total variation's gradient is q_0 = 0.00005, nearly
    # nothing. forward KL: q_0 - p_0; -log α: q_0 / α = 0.0000454 / 0.0001454 = 0.312.
    where = [-10.0, 0.0], [0], [math.log(0.9999)], math.log(0.0001)
    assert abs(value_and_gradient("total_variation", *where)[1][0]) < 1e-4
    assert value_and_gradient(name, *where)[1][0] < -least


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("ids", [[0, 2], [2, 1]])
def test_padding_of_short_rows_changes_nothing(name: str, ids: list[int]) -> None:
    # Padded entries have id 0 and probability 0, also when id 0 is listed itself.
    logits = [0.3, -1.0, 0.8, 0.1]
    listed = [math.log(0.5), math.log(0.3)]
    plain = value_and_gradient(name, logits, ids, listed, math.log(0.2))
    padded = value_and_gradient(name, logits, [*ids, 0, 0], [*listed, -INF, -INF], math.log(0.2))
    assert padded[0] == pytest.approx(plain[0], abs=1e-6)
    assert padded[1] == pytest.approx(plain[1], abs=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_low_precision_logits_are_computed_in_float32(name: str) -> None:
    logits_NV, _, ids_NK, logprobs_NK, tail_N = random_rows(8, 16, 4)
    loss_N = rows(name, logits_NV.bfloat16(), ids_NK, logprobs_NK, tail_N)
    assert loss_N.dtype == torch.float32
    torch.testing.assert_close(
        loss_N, rows(name, logits_NV.bfloat16().float(), ids_NK, logprobs_NK, tail_N)
    )


def test_rows_do_not_mix() -> None:
    logits_NV, _, ids_NK, logprobs_NK, tail_N = random_rows(6, 16, 4)
    together_N = forward_kl(coarsen(logits_NV, ids_NK, logprobs_NK, tail_N))
    for i in range(6):
        one = slice(i, i + 1)
        alone_N = forward_kl(coarsen(logits_NV[one], ids_NK[one], logprobs_NK[one], tail_N[one]))
        assert float(alone_N) == pytest.approx(float(together_N[i]), rel=1e-6)


def test_weights_decide_which_row_counts() -> None:
    assert float(weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([0.25, 0.75]))) == 2.5
