"""Replays of sampled drafts, against speculative decoding that samples them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replays.drawn import chances
from benchmarks.replays.recording import Recorded
from benchmarks.replays.served import counts_of, matches_of
from osd.records import Trace
from tests.unit.trainer.sampling.test_drafts import K, alpha_of, flat_pair, served
from trainer.draft import RowModel
from trainer.evaluate import replay

EVERYTHING = 10**6


def recorded(trace: Trace, top_k: int | None = None) -> Recorded:
    """A request of which every row was kept, with the `top_k` likeliest tokens of each."""
    assert trace.num_rows == len(trace.output_ids)
    order = np.argsort(-trace.target_logprobs, axis=1)
    ids = np.take_along_axis(trace.target_ids, order, 1)[:, :top_k]
    logprobs = np.take_along_axis(trace.target_logprobs, order, 1)[:, :top_k]
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(1 - np.exp(logprobs.astype(float)).sum(1), 0))
    return Recorded(
        name=trace.trace_id,
        prompt_ids=trace.prompt_ids,
        output_ids=trace.output_ids,
        target_ids=ids,
        target_logprobs=logprobs,
        tail_logprob=tail.astype(np.float32),
        temperature=trace.temperature,
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_replay_accepts_as_often_as_sampled_drafts_were(temperature: float) -> None:
    traces, steps = served(temperature)
    draft = RowModel(flat_pair()[1])
    requests = [recorded(trace) for trace in traces]
    counts = [counts_of(matches_of(draft, one, is_sampled=True), K) for one in requests]
    alpha, error = alpha_of(steps)
    found = sum(one.accepted for one in counts) / sum(one.tested for one in counts)
    assert found == pytest.approx(alpha, abs=4 * error)
    tokens_per_step = sum(one.tokens for one in counts) / sum(one.steps for one in counts)
    of_served = 1 + sum(step.num_accepted for step in steps) / len(steps)
    assert tokens_per_step == pytest.approx(of_served, rel=0.06)
    greedy = [counts_of(matches_of(draft, one), K) for one in requests]
    far = sum(one.accepted for one in greedy) / sum(one.tested for one in greedy)
    assert abs(far - alpha) > 5 * error, "they must be told apart"


def test_the_chances_agree_with_what_the_gate_expects_and_are_never_above_1() -> None:
    traces = served(1.0)[0]
    draft = RowModel(flat_pair()[1])
    chance_N = np.concatenate([chances(draft, recorded(t), EVERYTHING) for t in traces])
    expected = replay(draft, traces, 1, max_length=256, is_sampled=True).alpha
    assert chance_N.min() >= 0 and chance_N.max() <= 1
    assert chance_N.mean() == pytest.approx(
        expected, abs=4 * float(chance_N.std()) / len(chance_N) ** 0.5
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted_also_beyond_the_listed_tokens(
    temperature: float,
) -> None:
    target = RowModel(flat_pair()[0])
    traces = served(temperature)[0][:8]
    whole = np.concatenate([chances(target, recorded(t), EVERYTHING) for t in traces])
    assert whole == pytest.approx(np.ones(len(whole)), abs=0.02)
    cut = np.concatenate([chances(target, recorded(t, top_k=8), EVERYTHING) for t in traces])
    assert cut.mean() > 0.85


def test_a_request_at_temperature_0_is_drafted_for_greedily() -> None:
    (trace, *_), _ = served(0.0, num=6)
    draft = RowModel(flat_pair()[1])
    one = recorded(trace)
    assert (matches_of(draft, one, is_sampled=True) == matches_of(draft, one)).all()


def test_every_draft_meets_the_same_random_numbers() -> None:
    draft = RowModel(flat_pair()[1])
    one = recorded(served(1.0)[0][0])
    first = matches_of(draft, one, is_sampled=True)
    assert (first == matches_of(draft, one, is_sampled=True)).all()
    better = matches_of(RowModel(flat_pair()[0]), one, is_sampled=True)
    assert better.sum() > first.sum()
