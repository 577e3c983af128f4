"""The reference sampler follows the target's distribution exactly, whatever the draft proposes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from osd.records import ACCEPTED, PLAIN, REJECTED
from tests.support.speculative_reference import (
    Sampling,
    SpeculativeSampler,
    acceptance,
    one_hot,
    residual,
    target_logprobs,
)
from tests.support.tiny_drafts import VOCAB_SIZE, tiny_llama

Drafting = Literal["greedy", "probabilistic"]
NUM_TOKENS = 8
PROMPT = [3, 1]


class TableModel:
    """A model whose next token depends on the last two, by a table: a forward pass costs
    nothing."""

    def __init__(self, seed: int, scale: float = 1.5) -> None:
        rng = np.random.default_rng(seed)
        self.table = torch.tensor(scale * rng.normal(size=(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS)))

    def __call__(self, ids_BS: Tensor) -> Any:
        before_BS = torch.cat([ids_BS[:, :1], ids_BS[:, :-1]], dim=1)
        return SimpleNamespace(logits=self.table[before_BS, ids_BS])

    def law(self, num_output: int, sampling: Sampling) -> np.ndarray:
        """Probability of every output, [NUM_TOKENS] * num_output, by enumeration with the target
        alone."""
        law = np.ones(())
        for at in range(num_output):
            longer = np.zeros((*law.shape, NUM_TOKENS))
            for output in np.ndindex(law.shape):
                last_two = [*PROMPT, *output][-2:]
                longer[output] = (
                    law[output] * sampling.probs(self.table[last_two[0], last_two[1]]).numpy()
                )
            law = longer
            assert law.ndim == at + 1
        return law


def assert_follows(observed: np.ndarray, law: np.ndarray) -> None:
    """Chi-square at one in 10 000, rare outcomes taken together."""
    expected, observed = law.ravel() * observed.sum(), observed.ravel()
    assert observed[expected == 0].sum() == 0
    is_common = expected >= 8
    counts = [*observed[is_common], observed[~is_common].sum()]
    wanted = [*expected[is_common], expected[~is_common].sum()]
    if wanted[-1] < 1e-9:
        counts, wanted = counts[:-1], wanted[:-1]
    assert chisquare(counts, wanted).pvalue > 1e-4


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.5),
        Sampling(temperature=1.0),
        Sampling(temperature=1.5, top_p=0.8, top_k=5),
    ],
    ids=["0.5", "1.0", "truncated"],
)
def test_output_follows_the_target(drafting: Drafting, sampling: Sampling) -> None:
    target, draft = TableModel(seed=1), TableModel(seed=2)
    generator = torch.Generator().manual_seed(0)
    sampler = SpeculativeSampler(target, draft, 2, drafting)
    observed = np.zeros((NUM_TOKENS,) * 4)
    kinds = np.zeros(3)
    for _ in range(1500):
        done = sampler.generate(
            PROMPT, 4, sampling.temperature, sampling.top_p, sampling.top_k, generator
        )
        observed[tuple(done.output_ids)] += 1
        kinds += np.bincount([row.kind for row in done.rows], minlength=3)
    assert (kinds > 200).all(), (
        "accepted, rejected and undrafted tokens must all occur for this to say anything"
    )
    law = target.law(4, sampling)
    for at in range(4):  # the marginals of each pair of neighbours, and all four together
        other = tuple(axis for axis in range(4) if axis not in (at, at - 1))
        assert_follows(observed.sum(other), law.sum(other))
    assert_follows(observed, law)


def test_the_distribution_test_notices_a_wrong_residual() -> None:
    # After a rejection, drawing from p instead of the residual: the bug that the check above is
    # for.
    target = TableModel(seed=1)
    p_V = Sampling(temperature=1.0).probs(target.table[3, 1])
    token = int(p_V.argmax())
    wrong_V = p_V[token] * one_hot(token, NUM_TOKENS) + (1 - p_V[token]) * p_V
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        assert_follows(rng.multinomial(1500, wrong_V.numpy() / wrong_V.sum().item()), p_V.numpy())


@pytest.mark.parametrize("seed", range(20))
def test_one_verification_is_exact_by_enumeration(seed: int) -> None:
    # Σ_x q(x) [min(1, p/q)(x) δ_x + (1 − min(1, p/q)(x)) residual] = p, for every pair, point
    # masses included.
    generator = torch.Generator().manual_seed(seed)
    p_V = torch.randn(6, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    random_V = torch.randn(6, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    for q_V in (random_V, one_hot(int(random_V.argmax()), 6), p_V):
        law_V = torch.zeros(6, dtype=torch.float64)
        for x in range(6):
            if q_V[x] > 0:
                accepted = acceptance(p_V, q_V, x)
                law_V += q_V[x] * (accepted * one_hot(x, 6) + (1 - accepted) * residual(p_V, q_V))
        torch.testing.assert_close(law_V, p_V)


def greedy_alone(target: Any, prompt: list[int], num_output: int) -> list[int]:
    """What the target says by itself."""
    ids = list(prompt)
    for _ in range(num_output):
        with torch.no_grad():
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_greedy_answers_are_the_targets_own(drafting: Drafting, k: int) -> None:
    target, draft = tiny_llama(1, scale=0.3), tiny_llama(2, scale=0.3)
    for prompt in ([5], [7, 9, 11], [1, 2, 3, 4, 5, 6]):
        done = SpeculativeSampler(target, draft, k, drafting).generate(prompt, 12)
        assert done.output_ids == greedy_alone(target, prompt, 12)


def test_a_draft_equal_to_its_target_is_always_accepted() -> None:
    target = tiny_llama(1, scale=0.3)
    done = SpeculativeSampler(target, target, 3, "probabilistic").generate(
        [5, 6], 14, temperature=0.8, generator=torch.Generator().manual_seed(0)
    )
    assert [(len(s.draft_ids), s.num_tested, s.num_accepted) for s in done.steps] == [
        (3, 3, 3)
    ] * 3 + [(1, 1, 1)]
    assert [row.kind for row in done.rows] == [
        PLAIN,
        *[ACCEPTED] * 3,
        PLAIN,
        *[ACCEPTED] * 3,
        PLAIN,
        *[ACCEPTED] * 3,
    ] + [PLAIN, ACCEPTED]


def test_rows_are_what_a_plain_pass_of_the_target_says() -> None:
    target, draft = tiny_llama(1, scale=0.3), tiny_llama(2, scale=0.3)
    prompt = [4, 8, 15]
    done = SpeculativeSampler(target, draft, 3).generate(
        prompt, 10, temperature=0.9, generator=torch.Generator().manual_seed(1)
    )
    plain_SV = target_logprobs(target, prompt + done.output_ids)
    assert [row.position for row in done.rows] == list(range(3, 13))
    for row, token in zip(done.rows, done.output_ids, strict=True):
        torch.testing.assert_close(
            row.target_logprobs_V, plain_SV[row.position - 1], atol=1e-5, rtol=1e-5
        )
        assert (row.kind == ACCEPTED) == (row.draft_id == token)
        assert (row.kind == PLAIN) == (row.draft_id == -1)
    assert {row.kind for row in done.rows} >= {PLAIN, REJECTED}


def test_generation_stops_after_the_end_token_also_within_a_draft() -> None:
    target = tiny_llama(1, scale=0.3)
    whole = greedy_alone(target, [5, 6], 12)
    end = next(token for token in whole[2:] if token not in whole[:2])
    done = SpeculativeSampler(target, target, 5).generate([5, 6], 12, eos={end})
    assert done.output_ids == whole[: whole.index(end) + 1]
    assert sum(step.num_accepted for step in done.steps) + len(
        [r for r in done.rows if r.kind == PLAIN]
    ) == len(done.output_ids)


def test_a_generation_becomes_the_trace_of_its_rows() -> None:
    target, draft = tiny_llama(1, scale=0.3), tiny_llama(2, scale=0.3)
    done = SpeculativeSampler(target, draft, 3).generate([4, 8], 9)
    trace = done.trace(trace_id="a", target_id="t", top_k=6, domain="code")
    assert trace.output_ids.tolist() == done.output_ids
    assert trace.num_rows == 9
    # Greedy: the most likely token is the output.
    assert trace.target_ids[:, 0].tolist() == done.output_ids
    mass_N = np.exp(trace.target_logprobs.astype(float)).sum(1) + np.exp(trace.tail_logprob)
    assert mass_N == pytest.approx(1, abs=0.005)
    assert trace.num_draft_tokens == sum(len(step.draft_ids) for step in done.steps)
    everything = done.trace(trace_id="a", target_id="t", top_k=VOCAB_SIZE)
    assert (everything.tail_logprob == -np.inf).all()


def test_truncated_sampling_by_hand() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert Sampling(temperature=1.0, top_k=2).probs(logits_V).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert Sampling(temperature=1.0, top_p=0.65).probs(logits_V).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert Sampling(temperature=1.0, top_p=0.75).probs(logits_V).tolist() == pytest.approx(
        [4 / 9, 3 / 9, 2 / 9, 0]
    )
    assert Sampling(temperature=1.0, top_p=0.1).probs(logits_V).tolist() == [1, 0, 0, 0]
    assert Sampling(temperature=0.5).probs(logits_V).tolist() == pytest.approx(
        [16 / 30, 9 / 30, 4 / 30, 1 / 30]
    )
    assert Sampling(temperature=0.0).probs(logits_V).tolist() == [1, 0, 0, 0]
