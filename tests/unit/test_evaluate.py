"""Token replay against real speculative decoding, and how sure a comparison is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from osd.config import GateConfig
from osd.records import Trace
from serving.reference import SpeculativeSampler, Step
from tests.tiny_drafts import VOCAB_SIZE, chain_traces, tiny_llama
from trainer.draft import RowModel
from trainer.evaluate import ReplayCounts, bootstrap_diff, can_replay, compare, count_steps, replay


def nearby(model: torch.nn.Module, noise: float, seed: int = 1) -> torch.nn.Module:
    """A draft that often, not always, agrees with its target."""
    copy = tiny_llama(scale=0.3)
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
    return copy


def counted(steps: Sequence[Step], k: int) -> tuple[list[int], list[int]]:
    tested = [sum(step.num_tested > g for step in steps) for g in range(k)]
    accepted = [sum(step.num_accepted > g for step in steps) for g in range(k)]
    return tested, accepted


@pytest.mark.parametrize("k, temperature", [(1, 0.0), (3, 0.0), (4, 0.7), (8, 0.7)])
def test_replay_counts_what_speculative_decoding_counted(k: int, temperature: float) -> None:
    target = tiny_llama(scale=0.3)
    draft = nearby(target, noise=0.15)
    sampler = SpeculativeSampler(target, draft, k)
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    traces, expected = [], []
    for index in range(10):
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 12))).tolist()
        num_output = int(rng.integers(1, 24))
        done = sampler.generate(
            prompt, num_output, temperature=temperature, generator=generator, eos={int(rng.integers(VOCAB_SIZE))}
        )
        traces.append(done.trace(trace_id=str(index), target_id="t", top_k=4))
        expected.append(counted(done.steps, k))
    counts = replay(RowModel(draft), traces, k, max_length=256, batch_size=3)
    assert counts.tested_RG.tolist() == [tested for tested, _ in expected]
    assert counts.accepted_RG.tolist() == [accepted for _, accepted in expected]
    assert counts.alpha is not None and 0.1 < counts.alpha < 0.99


def test_steps_by_hand() -> None:
    # matches  1 1 0 | 1 1 1 1 | 0 | 1   with k = 3
    # step at 0: two accepted, third rejected, next step at 3: three accepted, bonus 6, next at 7: rejected, 8: accepted
    tested, accepted = count_steps(np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], bool), 3)
    assert tested.tolist() == [4, 2, 2]
    assert accepted.tolist() == [3, 2, 1]


def test_no_output_no_test() -> None:
    assert [x.sum() for x in count_steps(np.zeros(0, bool), 4)] == [0, 0]
    assert not can_replay(chain_traces(1, num_output=1)[0])
    assert can_replay(chain_traces(1, num_output=2)[0])


def test_long_outputs_are_judged_on_their_end() -> None:
    draft = RowModel(tiny_llama(scale=0.3))
    counts = replay(draft, chain_traces(2, num_output=40), 1, max_length=10)
    assert (counts.tested_RG.sum(1) <= 10).all()
    assert (counts.tested_RG.sum(1) >= 5).all()


def counts_of(tested: Sequence[int], accepted: Sequence[int]) -> ReplayCounts:
    return ReplayCounts(tested_RG=np.array(tested)[:, None], accepted_RG=np.array(accepted)[:, None])


def test_requests_are_compared_in_pairs() -> None:
    # Requests differ wildly from one another, but the candidate gains 10 points in each: no doubt about the gain.
    accepted = np.array([5, 80, 20, 60, 40, 70, 10, 30])
    base, candidate = counts_of([100] * 8, accepted), counts_of([100] * 8, accepted + 10)
    diff_I = bootstrap_diff(candidate, base, 500, np.random.default_rng(0))
    assert diff_I == pytest.approx(0.1)


def test_resampling_spreads_as_the_standard_error_says() -> None:
    rng = np.random.default_rng(0)
    gain = rng.normal(0.05, 0.1, 200)
    base, candidate = counts_of([1000] * 200, [300] * 200), counts_of([1000] * 200, (300 + 1000 * gain).astype(int))
    diff_I = bootstrap_diff(candidate, base, 4000, rng)
    assert diff_I.mean() == pytest.approx(gain.mean(), abs=0.002)
    assert diff_I.std() == pytest.approx(gain.std() / np.sqrt(200), rel=0.05)


def test_the_lower_bound_is_one_sided() -> None:
    # No true gain: at confidence 0.9 about one candidate in ten passes, not one in twenty and not one in five.
    rng = np.random.default_rng(1)
    num_passed = 0
    for _ in range(400):
        gains = (1000 * rng.normal(0.0, 0.1, 40)).astype(int)
        diff_I = bootstrap_diff(counts_of([1000] * 40, 500 + gains), counts_of([1000] * 40, [500] * 40), 300, rng)
        num_passed += float(np.quantile(diff_I, 0.1)) > 0
    assert 0.065 < num_passed / 400 < 0.145


def test_a_report_says_who_is_better_and_where() -> None:
    target = tiny_llama(scale=0.3)
    sampler = SpeculativeSampler(target, target, 2)
    traces: list[Trace] = []
    for index in range(12):
        done = sampler.generate([index + 1, 2 * index], 16)
        domain = "code" if index % 3 else ""
        traces.append(done.trace(trace_id=str(index), target_id="t", top_k=4, domain=domain))
    good, bad = RowModel(nearby(target, noise=0.02)), RowModel(nearby(target, noise=0.5))
    report = compare(good, bad, traces, 3, GateConfig(), max_length=128)
    assert report.num_traces == 12
    assert report.num_tokens == 12 * 16
    assert report.alpha_candidate > report.alpha_base + 0.2
    assert 0 < report.diff_low < report.diff < report.diff_high
    assert report.diff == pytest.approx(report.alpha_candidate - report.alpha_base)
    assert len(report.alpha_base_per_pos) == len(report.alpha_candidate_per_pos) == 3
    assert {name: found.num_traces for name, found in report.classes.items()} == {"code": 8, "unlabelled 1": 4}
    assert all(found.alpha_base < found.alpha_candidate for found in report.classes.values())
    assert all(found.diff_high > found.alpha_candidate - found.alpha_base for found in report.classes.values())
    assert compare(good, bad, traces, 3, GateConfig(), max_length=128) == report
    same = compare(bad, bad, traces, 3, GateConfig(), max_length=128)
    assert same.diff == same.diff_low == same.diff_high == 0
