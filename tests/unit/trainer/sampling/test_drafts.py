"""What sampled drafts are expected to be accepted, against speculative decoding that samples
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from osd.config.schema import GateConfig
from osd.records import REJECTED, Trace
from tests.support.builders import make_trace
from tests.support.speculative_reference import Sampling, SpeculativeSampler, Step
from tests.support.tiny_drafts import VOCAB_SIZE, tiny_llama
from trainer.draft import RowModel
from trainer.evaluate import NUM_IF_SAMPLED, compare, replay
from trainer.loss import Coarse, acceptance, at_sampling, coarsen

K = 3


@cache
def flat_pair() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A target that is not sure, and a draft that is of another mind here and there."""
    target, draft = tiny_llama(0, scale=0.3), tiny_llama(0, scale=0.3)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.4 * parameter.std() * torch.randn_like(parameter)
    return target, draft


@cache
def served(temperature: float, num: int = 32) -> tuple[list[Trace], list[Step]]:
    """Requests answered by the pair, each with all of its rows, and what was tested."""
    target, draft = flat_pair()
    sampler = SpeculativeSampler(target, draft, K, "probabilistic")
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    traces, steps = [], []
    for index in range(num):
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 12))).tolist()
        done = sampler.generate(prompt, 24, temperature, generator=generator)
        traces.append(
            done.trace(
                trace_id=str(index), target_id="t", top_k=VOCAB_SIZE, temperature=temperature
            )
        )
        steps += done.steps
    return traces, steps


def thinned(trace: Trace, rng: np.random.Generator) -> Trace:
    """As capture keeps rows by default: those of rejected tokens, and half of the others."""
    keep_prob = np.where(trace.kind == REJECTED, 1.0, 0.5)
    kept = replace(trace, keep_prob=keep_prob)
    return kept.with_rows(rng.random(trace.num_rows) < keep_prob)


def alpha_of(steps: Sequence[Step]) -> tuple[float, float]:
    """α that was served, and its standard error for independent tokens."""
    tested, accepted = (
        sum(getattr(step, name) for step in steps) for name in ("num_tested", "num_accepted")
    )
    alpha = accepted / tested
    return alpha, float(np.sqrt(alpha * (1 - alpha) / tested))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("is_thinned", [False, True], ids=["every row", "as captured"])
def test_what_is_predicted_is_what_sampled_drafts_serve(
    temperature: float, is_thinned: bool
) -> None:
    traces, steps = served(temperature)
    if is_thinned:
        rng = np.random.default_rng(1)
        traces = [thinned(trace, rng) for trace in traces]
    alpha, error = alpha_of(steps)
    draft = RowModel(flat_pair()[1])
    found = replay(draft, traces, K, max_length=256, batch_size=7, is_sampled=True)
    assert found.alpha == pytest.approx(alpha, abs=3 * error)
    greedy = replay(draft, traces, K, max_length=256).alpha
    assert greedy is not None and abs(greedy - alpha) > 5 * error, "they must be told apart"


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_a_draft_that_is_the_target_is_always_accepted(temperature: float) -> None:
    traces = served(temperature, num=4)[0]
    found = replay(RowModel(flat_pair()[0]), traces, K, max_length=256, is_sampled=True)
    assert found.alpha == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_what_the_request_cuts_off_is_not_accepted(how: dict[str, Any]) -> None:
    traces = [replace(trace, **how) for trace in served(1.0, num=4)[0]]
    rows = np.concatenate([t.target_logprobs[t.position > len(t.prompt_ids)] for t in traces])
    likeliest = np.exp(rows.astype(float)).max(1).mean()
    found = replay(RowModel(flat_pair()[0]), traces, K, max_length=256, is_sampled=True)
    assert found.alpha == pytest.approx(likeliest, abs=0.005)


def test_each_position_is_tested_about_as_often_as_it_was() -> None:
    traces, steps = served(1.0)
    found = replay(RowModel(flat_pair()[1]), traces, K, max_length=256, is_sampled=True)
    tested = np.array([sum(step.num_tested > g for step in steps) for g in range(K)])
    assert (np.abs(found.tested_RG.sum(0) - tested) < 4 * np.sqrt(tested)).all()
    assert (np.diff(found.tested_RG.sum(0)) < 0).all()


def test_requests_at_temperature_0_are_counted_as_ever() -> None:
    greedy, _ = served(0.0, num=6)
    drawn = served(1.0)[0][:6]
    draft = RowModel(flat_pair()[1])
    mixed = [*greedy[:3], *drawn, *greedy[3:]]
    found = replay(draft, mixed, K, max_length=256, is_sampled=True)
    alone = replay(draft, greedy, K, max_length=256)
    chosen = [0, 1, 2, 9, 10, 11]
    assert found.tested_RG[chosen].tolist() == alone.tested_RG.tolist()
    assert found.accepted_RG[chosen].tolist() == alone.accepted_RG.tolist()
    assert found.alpha != replay(draft, mixed, K, max_length=256).alpha


def test_what_has_no_row_behind_its_first_token_counts_for_nothing() -> None:
    trace = served(1.0)[0][0]
    first = trace.with_rows(trace.position == len(trace.prompt_ids))
    bare = trace.with_rows(np.zeros(trace.num_rows, bool))
    found = replay(RowModel(flat_pair()[1]), [first, bare], K, max_length=256, is_sampled=True)
    assert (found.tested_RG.sum(), found.alpha) == (0.0, None)


def test_rows_that_contradict_the_text_are_left_out() -> None:
    traces = served(1.0)[0][:8]
    target_ids, logprobs = traces[0].target_ids.copy(), traces[0].target_logprobs.copy()
    output = np.concatenate([traces[0].prompt_ids, traces[0].output_ids])[traces[0].position[-1]]
    target_ids[-1] = np.arange(VOCAB_SIZE)
    logprobs[-1] = np.log(1 / (VOCAB_SIZE - 1))
    logprobs[-1, output] = -np.inf
    wrong = replace(traces[0], target_ids=target_ids, target_logprobs=logprobs)
    without = traces[0].with_rows(np.arange(traces[0].num_rows) < traces[0].num_rows - 1)
    draft = RowModel(flat_pair()[1])
    found, wanted = (
        replay(draft, [one, *traces[1:]], K, max_length=256, is_sampled=True)
        for one in (wrong, without)
    )
    assert found.alpha == wanted.alpha


class Says(RowModel):
    """Proposes from the same distribution everywhere."""

    vocab_size, max_length = 3, 64

    def __init__(self, *probs: float) -> None:
        torch.nn.Module.__init__(self)
        self.logits = torch.nn.Parameter(torch.tensor(probs).log())
        self.can_pack = True

    def forward(self, ids_BS: Any, position_ids_BS: Any, row_b_N: Any, row_s_N: Any) -> Any:
        return self.logits.expand(len(row_b_N), -1)


def test_a_row_stands_for_those_that_were_not_kept_and_each_request_for_itself() -> None:
    probs = np.array([0.5, 0.3, 0.2])

    def trace(index: int, num: int, p: np.ndarray, keep: float) -> Trace:
        return make_trace(
            index=index,
            vocab_size=3,
            num_output=num,
            num_rows=num,
            top_k=3,
            temperature=1.0,
            output_ids=np.zeros(num, np.int32),
            target_ids=np.tile([0, 1, 2], (num, 1)),
            target_logprobs=np.tile(np.log(p), (num, 1)),
            tail_logprob=np.full(num, -np.inf),
            keep_prob=np.full(num, keep),
        )

    traces = [trace(0, 30, probs, 0.5), trace(1, 11, np.array([0.8, 0.1, 0.1]), 1.0)]
    found = replay(Says(*probs), traces, K, max_length=64, is_sampled=True)
    each = found.accepted_RG.sum(1) / found.tested_RG.sum(1)
    assert each == pytest.approx([1.0, 0.7], abs=0.002)
    assert found.alpha == pytest.approx((58 * 1.0 + 10 * 0.7) / 68, abs=0.002)


def test_the_gate_prefers_the_draft_that_is_accepted_more() -> None:
    """A target that says 0.4, 0.35 and 0.25. Who is sure of the first token is accepted 0.4 of the
    time when it is proposed greedily, and 0.5 when it is drawn; who is nearly as unsure as the
    target, but likes the second token best, 0.35 and 0.94."""
    rng, rows = np.random.default_rng(0), 40
    probs = np.array([0.4, 0.35, 0.25])
    traces = [
        make_trace(
            index=index,
            vocab_size=3,
            num_output=rows,
            num_rows=rows,
            top_k=3,
            output_ids=rng.choice(3, rows, p=probs),
            temperature=1.0,
            target_ids=np.tile([0, 1, 2], (rows, 1)),
            target_logprobs=np.tile(np.log(probs), (rows, 1)),
            tail_logprob=np.full(rows, -np.inf),
            keep_prob=np.ones(rows),
        )
        for index in range(20)
    ]
    sure, unsure = Says(0.9, 0.05, 0.05), Says(0.34, 0.36, 0.3)
    gate = GateConfig()
    drawn = compare(unsure, sure, traces, K, gate, max_length=64, is_sampled=True)
    assert drawn.alpha_base == pytest.approx(0.5, abs=0.002)
    assert drawn.alpha_candidate == pytest.approx(0.94, abs=0.002)
    assert drawn.diff_low > 0.4
    assert compare(unsure, sure, traces, K, gate, max_length=64).diff < 0


# ------------------------------------------------------------------------------ the target's side


def targets(num: int = 16) -> torch.Tensor:
    return torch.randn(num, 24, generator=torch.Generator().manual_seed(3)) * 2


def listed(logits_NV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits_NV.log_softmax(1)
    top = logprobs.topk(top_k, dim=1)
    tail_N = logprobs.scatter(1, top.indices, -torch.inf).logsumexp(1)
    return top.indices, top.values, tail_N


def ways() -> Iterator[Sampling]:
    for temperature in (0.5, 1.0, 1.7):
        yield Sampling(temperature=temperature)
        yield Sampling(temperature=temperature, top_k=5)
        yield Sampling(temperature=temperature, top_p=0.8)
        yield Sampling(temperature=temperature, top_k=6, top_p=0.5)


@pytest.mark.parametrize("sampling", [*ways()], ids=str)
def test_rows_are_as_the_target_samples(sampling: Sampling) -> None:
    logits_NV = targets()
    ids_NK, logprobs_NK, tail_N = listed(logits_NV, 24)
    num = len(logits_NV)
    found_NK, tail_N = at_sampling(
        logprobs_NK,
        tail_N,
        24,
        torch.full((num,), sampling.temperature),
        torch.full((num,), sampling.top_p),
        torch.full((num,), sampling.top_k),
    )
    wanted_NV = torch.stack([sampling.probs(row) for row in logits_NV])
    assert torch.allclose(found_NK.exp().double(), wanted_NV.gather(1, ids_NK), atol=1e-5)
    assert (tail_N == -torch.inf).all()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.3)])
def test_the_tail_stays_only_where_it_may_be_sampled(top_k: int, top_p: float) -> None:
    _, logprobs_NK, tail_N = listed(targets(), 8)
    one_N, top_p_N, top_k_N = (torch.full((16,), value) for value in (1.0, top_p, top_k))
    found_NK, found_N = at_sampling(logprobs_NK, tail_N, 24, one_N, top_p_N, top_k_N)
    mass_N = found_NK.exp().sum(1) + found_N.exp()
    assert torch.allclose(mass_N, torch.ones(16), atol=1e-5)
    if (top_k, top_p) == (0, 1.0):
        assert torch.allclose(found_NK, logprobs_NK, atol=1e-5)
        assert torch.allclose(found_N, tail_N, atol=1e-4)
    else:
        assert (found_N == -torch.inf).all()


def coarse(logits_NV: torch.Tensor, top_k: int) -> tuple[Coarse, torch.Tensor]:
    ids_NK, logprobs_NK, tail_N = listed(targets(), top_k)
    return coarsen(logits_NV, ids_NK, logprobs_NK, tail_N), tail_N


def test_acceptance_is_the_mass_that_both_share() -> None:
    draft_NV = targets().flip(0)
    wanted_N = torch.minimum(targets().softmax(1), draft_NV.softmax(1)).sum(1)
    assert torch.allclose(acceptance(*coarse(draft_NV, 24)), wanted_N, atol=1e-5)
    assert (acceptance(*coarse(draft_NV, 8)) >= wanted_N - 1e-5).all()


def test_what_a_head_cannot_propose_is_not_accepted() -> None:
    """Its rest holds, beside the tail, tokens of the target that it lacks."""
    both, _ = coarse(targets().flip(0), 8)
    nothing_N = torch.full((16,), -torch.inf)
    listed_N = torch.minimum(both.p_NC, both.q_NC)[:, :-1].sum(1)
    assert torch.allclose(acceptance(both, nothing_N), listed_N, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_report_of_greedy_drafts_says_what_drawn_ones_would_bring(temperature: float) -> None:
    """By the newest requests that were drafted for greedily."""
    target, draft = flat_pair()
    sampler = SpeculativeSampler(target, draft, K)
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    traces = []
    for index in range(NUM_IF_SAMPLED + 2):
        prompt = rng.integers(0, VOCAB_SIZE, 6).tolist()
        done = sampler.generate(prompt, 24, temperature, generator=generator)
        sampled_at = {"top_k": VOCAB_SIZE, "temperature": temperature}
        traces.append(done.trace(trace_id=str(index), target_id="t", **sampled_at))
    model, gate = RowModel(draft), GateConfig()
    report = compare(model, model, traces, K, gate, max_length=128)
    assert report.sampled is not None
    greedy, drawn = report.sampled
    newest = traces[-NUM_IF_SAMPLED:]
    assert greedy == replay(model, newest, K, max_length=128).alpha
    assert drawn == replay(model, newest, K, max_length=128, is_sampled=True).alpha
    served_with, _ = alpha_of(served(temperature)[1])
    assert drawn == pytest.approx(served_with, abs=0.04) and drawn > greedy + 0.02
    assert compare(model, model, traces, K, gate, max_length=128, is_sampled=True).sampled is None
    few = traces[: NUM_IF_SAMPLED - 1]
    assert compare(model, model, few, K, gate, max_length=128).sampled is None
    torn = [*traces, replace(traces[0], target_logprobs=traces[0].target_logprobs - 1)]
    assert compare(model, model, torn, K, gate, max_length=128).sampled == report.sampled
    cold = [replace(trace, temperature=0.0) for trace in traces]
    assert compare(model, model, cold, K, gate, max_length=128).sampled is None
    bare = [trace.with_rows(np.zeros(trace.num_rows, bool)) for trace in traces]
    assert compare(model, model, bare, K, gate, max_length=128).sampled is None
