"""Token replay against real speculative decoding, and how sure a comparison is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from osd.config.schema import GateConfig
from osd.records import ClassReport, EvalReport, Trace
from tests.support.builders import make_trace
from tests.support.speculative_reference import SpeculativeSampler, Step
from tests.support.tiny_drafts import VOCAB_SIZE, chain_traces, tiny_llama
from trainer.classes import classes_of
from trainer.draft import RowModel
from trainer.evaluate import (
    ReplayCounts,
    _class_reports,
    bootstrap_diff,
    can_replay,
    compare,
    count_steps,
    is_match,
    leading_matches,
    least_diff,
    replay,
)


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


@pytest.mark.parametrize("k, temperature", [(1, 0.7), (3, 0.0), (8, 0.7)])
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
            prompt,
            num_output,
            temperature=temperature,
            generator=generator,
            eos={int(rng.integers(VOCAB_SIZE))},
        )
        traces.append(done.trace(trace_id=str(index), target_id="t", top_k=4))
        expected.append(counted(done.steps, k))
    counts = replay(RowModel(draft), traces, k, max_length=256, batch_size=3)
    assert counts.tested_RG.tolist() == [tested for tested, _ in expected]
    assert counts.accepted_RG.tolist() == [accepted for _, accepted in expected]
    assert counts.alpha is not None and 0.1 < counts.alpha < 0.99


@pytest.mark.parametrize(
    ("matches", "k", "tested", "accepted"),
    [
        # Where steps begin is marked; a token after the accepted ones is the target's own and tests
        # nothing.
        ("|110|1111|0|1", 3, [4, 2, 2], [3, 2, 1]),
        ("|1111|1111", 3, [2, 2, 2], [2, 2, 2]),
        ("|1111|1", 3, [2, 1, 1], [2, 1, 1]),  # one is left to draft at the end
        ("|1111|11", 3, [2, 2, 1], [2, 2, 1]),
        ("|1111|10", 3, [2, 2, 1], [2, 1, 1]),
        ("|1110|1", 3, [2, 1, 1], [2, 1, 1]),  # the fourth was not drafted
        ("|0|0|0", 3, [3, 0, 0], [0, 0, 0]),
        ("|10|10|1", 3, [3, 2, 0], [3, 0, 0]),
        ("|0|10|110|1110", 3, [4, 3, 2], [3, 2, 1]),
        ("|1", 3, [1, 0, 0], [1, 0, 0]),
        ("|0", 3, [1, 0, 0], [0, 0, 0]),
        ("", 3, [0, 0, 0], [0, 0, 0]),
        ("|11|0|0|11", 1, [4], [2]),
        ("|111|10|0", 2, [3, 2], [2, 1]),
        ("|1110|111", 8, [2, 2, 2, 1, 0, 0, 0, 0], [2, 2, 2, 0, 0, 0, 0, 0]),
    ],
)
def test_steps_by_hand(matches: str, k: int, tested: list[int], accepted: list[int]) -> None:
    is_match_T = np.array([char == "1" for char in matches if char != "|"], bool)
    assert [counts.tolist() for counts in count_steps(is_match_T, k)] == [tested, accepted]


@pytest.mark.parametrize(
    ("depths", "k", "tested", "accepted"),
    [
        # One line per depth: whether what is proposed there, in a step that began so many tokens
        # earlier, equals the served token.
        (["11111", "00000"], 2, [3, 2], [3, 0]),  # steps begin at 0, 2 and 4
        (["11111", "01000"], 2, [2, 2], [2, 1]),  # at 0 and 3
        (["10010", "11100", "00100"], 3, [2, 1, 1], [1, 1, 1]),  # at 0 and (rejected) 4
        (["1111", "0101", "1111"], 3, [1, 1, 1], [1, 1, 1]),  # all of it in one
        (["0000", "1111"], 2, [4, 0], [0, 0]),  # a later depth alone is nothing
    ],
)
def test_steps_of_a_head_by_hand(
    depths: list[str], k: int, tested: list[int], accepted: list[int]
) -> None:
    is_match_GT = np.array([[char == "1" for char in depth] for depth in depths])
    assert [counts.tolist() for counts in count_steps(is_match_GT, k)] == [tested, accepted]


def test_runs_are_counted_from_matches_at_each_depth() -> None:
    one = np.array([[True, True, False, True, True]])
    assert leading_matches(one, 4).tolist() == [2, 1, 0, 2, 1]
    assert leading_matches(one, 1).tolist() == [1, 1, 0, 1, 1]
    two = np.array([[True] * 4, [True, False, True, True]])
    # Begun at 0 its second token stands at 1, where depth 1 is wrong.
    assert leading_matches(two, 9).tolist() == [1, 3, 2, 1]
    assert leading_matches(np.zeros((1, 0), bool), 3).tolist() == []


def test_what_has_one_token_was_never_drafted() -> None:
    assert [can_replay(chain_traces(1, num_output=num)[0]) for num in (0, 1, 2)] == [
        False,
        False,
        True,
    ]


# -- a draft that knows some words ----------------------------------------------------------------


class Knows(RowModel):
    """Where it knows, it guesses that token t is followed by t + 1; else it is wrong. Its n-th
    guess, of `ranks`, is n − 1 further. Notes how it is asked."""

    vocab_size = 256
    max_length = 64

    def __init__(self, *known: range, can_pack: bool = True, ranks: int = 1) -> None:
        torch.nn.Module.__init__(self)
        self.ranks = ranks
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.can_pack = can_pack
        self.is_known_V = torch.tensor(
            [any(token in some for some in known) for token in range(self.vocab_size)]
        )
        self.asked: list[tuple[int, int]] = []
        """lines and tokens of each batch"""

    def forward(
        self,
        ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor,
        row_b_N: torch.Tensor,
        row_s_N: torch.Tensor,
    ) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.asked.append((ids_BS.shape[0], ids_BS.shape[1]))
        ids_N = ids_BS[row_b_N, row_s_N]
        guess_N, logits_NV = ids_N + self.is_known_V[ids_N], self.weight
        for rank in range(self.ranks):
            nth_NV = torch.nn.functional.one_hot(guess_N + rank, self.vocab_size)
            logits_NV = logits_NV + nth_NV * (self.ranks - rank)
        return logits_NV


def counting(first: int, num_output: int = 11, num_prompt: int = 1, domain: str = "") -> Trace:
    """A request whose prompt counts from `first`, and whose answer goes on."""
    prompt_ids, output_ids = np.split(
        np.arange(first, first + num_prompt + num_output), [num_prompt]
    )
    return make_trace(
        index=first, num_rows=0, prompt_ids=prompt_ids, output_ids=output_ids, domain=domain
    )


def test_a_match_is_the_served_token_from_the_second_on() -> None:
    trace = counting(10, num_output=6)  # 10 | 11 12 13 14 15 16
    assert is_match(Knows(range(12, 15)), trace, 64).tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize(("max_length", "max_length_of_model"), [(64, 6), (6, 64)])
def test_long_outputs_are_replayed_on_their_end(max_length: int, max_length_of_model: int) -> None:
    draft = Knows(range(45, 49))
    draft.max_length = max_length_of_model
    matches = is_match(draft, counting(10, num_output=40), max_length)
    assert matches.tolist() == [[False, True, True, True, True, False]], "its last is token 50"


@pytest.mark.parametrize("can_pack", [True, False])
def test_short_requests_are_replayed_together_and_each_gets_its_own_counts(can_pack: bool) -> None:
    draft = Knows(range(10, 40), can_pack=can_pack)
    traces = [counting(first, num) for first, num in [(60, 9), (10, 2), (20, 12), (30, 1), (40, 4)]]
    traces.append(counting(30, 6, num_prompt=7))
    counts = replay(draft, traces, 2, max_length=64, batch_size=2)
    # Of the last request, tokens 38 to 40 are known and 41, 42 are not.
    assert counts.tested_RG.tolist() == [[8, 0], [1, 0], [4, 4], [0, 0], [3, 0], [3, 1]]
    assert counts.accepted_RG.tolist() == [[0, 0], [1, 0], [4, 4], [0, 0], [0, 0], [1, 1]]
    if not can_pack:
        assert draft.asked == [(2, 2), (2, 9), (2, 12)], (
            "a line for each, the shortest first: little is padded"
        )
    assert len(draft.asked) == 3


def test_counts_in_words() -> None:
    counts = ReplayCounts(
        tested_RG=np.array([[4, 2, 0], [6, 2, 0]]),
        accepted_RG=np.array([[2, 1, 0], [5, 0, 0]]),
        held_RK=np.array([[3, 4, 4, 4, 4], [5, 6, 7, 7, 8]]),
        served_R=np.array([6, 10]),
    )
    assert (counts.alpha, counts.alpha_per_pos) == (8 / 14, (0.7, 0.25, 0.0))
    second = counts.of(np.array([False, True]))
    assert (second.alpha, second.alpha_per_pos) == (5 / 8, (5 / 6, 0.0, 0.0))
    assert counts.success == (8 / 16, 10 / 16, 11 / 16, 11 / 16, 12 / 16)
    assert second.success == (0.5, 0.6, 0.7, 0.7, 0.8)
    nobody = counts.of(np.array([False, False]))
    assert nobody.alpha is None and nobody.success == (0.0,) * 5


def test_success_by_k_is_how_often_the_served_token_is_among_the_likeliest() -> None:
    """Of a draft whose n-th likeliest token after each is the n-th after it in order, on answers
    that go on by steps of 1 to 6."""
    steps = np.array([1, 1, 2, 3, 3, 3, 5, 6, 1])
    tokens = 10 + np.cumsum(steps)
    trace = make_trace(num_rows=0, prompt_ids=[10], output_ids=tokens)
    counts = replay(Knows(range(256), ranks=5), [trace], 2, max_length=64)
    later = steps[1:]
    assert counts.served_R.tolist() == [len(later)]
    assert counts.held_RK.tolist() == [[int((later <= k).sum()) for k in range(1, 6)]]


def test_a_report_by_hand() -> None:
    """One request of 11 tokens, so that 10 can be drafted: the candidate knows all, the base
    two."""
    report = compare(
        Knows(range(256)), Knows(range(11, 13)), [counting(10)], 3, GateConfig(), max_length=64
    )
    assert (
        report
        == EvalReport(
            num_traces=1,
            num_tokens=11,
            k=3,
            alpha_base=0.2,
            alpha_candidate=1.0,
            alpha_base_per_pos=(1 / 8, 1.0, 0.0),  # steps of 3 tested tokens, then of 1 seven times
            alpha_candidate_per_pos=(1.0, 1.0, 1.0),
            diff=0.8,
            diff_low=0.8,
            diff_high=0.8,
            success_base=(0.2, *report.success_base[1:]),
            success_candidate=(1.0,) * 5,
            classes={
                "unlabelled 1": ClassReport(
                    num_traces=1,
                    alpha_base=0.2,
                    alpha_candidate=1.0,
                    diff_high=0.8,
                    success_candidate=(1.0,) * 5,
                )
            },
        )
    )


def test_both_drafts_see_as_much_in_as_large_batches() -> None:
    drafts = Knows(can_pack=False), Knows(range(256), can_pack=False)
    report = compare(*drafts, [counting(10)] * 5, 2, GateConfig(), max_length=7, batch_size=2)
    assert drafts[0].asked == drafts[1].asked == [(2, 7), (2, 7), (1, 7)]
    assert (report.alpha_candidate, report.alpha_base) == (0, 1)


def test_nothing_to_test_is_no_gain() -> None:
    report = compare(
        Knows(range(256)), Knows(), [counting(10, num_output=1)], 3, GateConfig(), max_length=64
    )
    assert (report.alpha_base, report.alpha_candidate, report.diff, report.diff_low) == (0, 0, 0, 0)


# -- how sure a comparison is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "low", "high"),
    [
        # Of two requests drawn with replacement, a quarter are the first twice (5 of 5 against 0 of
        # 10), a quarter the second twice (0 and 0), the others one of each: 5 of 15, as measured.
        (0.55, 1 / 3, 1 / 3),
        (0.73, 1 / 3, 1 / 3),
        (0.77, 0.0, 1.0),
        (0.99, 0.0, 1.0),
    ],
)
def test_each_bound_is_one_sided_at_the_gates_confidence(
    confidence: float, low: float, high: float
) -> None:
    gate = GateConfig(confidence=confidence, num_bootstrap=4000)
    traces = [counting(10, domain="sql"), counting(50, domain="sql"), counting(90, domain="chat")]
    knows, knows_nothing = Knows(range(10, 50)), Knows()
    found = compare(knows, knows_nothing, traces[:2], 1, gate, max_length=64)
    assert (found.diff, found.diff_low, found.diff_high) == pytest.approx((1 / 3, low, high))
    # And of a class by itself, which here loses.
    found = compare(knows_nothing, knows, traces, 1, gate, max_length=64)
    classes = {name: (c.alpha_base, c.alpha_candidate) for name, c in found.classes.items()}
    assert classes == {"chat": (0, 0), "sql": (5 / 15, 0)}
    assert found.classes["chat"].diff_high == 0
    assert found.classes["sql"].diff_high == pytest.approx(-low)


def test_a_report_is_drawn_with_the_given_seed_and_as_often_as_the_gate_says() -> None:
    candidate, base = Knows(range(10, 80)), Knows(range(60, 99))
    traces = [
        *(counting(first, num_output=3 + first % 7) for first in range(10, 90)),
        counting(99, domain="sql"),
    ]
    gate = GateConfig(num_bootstrap=137)
    reports = [
        compare(candidate, base, traces, 2, gate, max_length=64, seed=seed) for seed in (0, 7, 7)
    ]
    assert reports[1] == reports[2] != reports[0]
    assert reports[0] == compare(candidate, base, traces, 2, gate, max_length=64)
    counts = [replay(draft, traces, 2, max_length=64) for draft in (candidate, base)]
    for seed, report in zip((0, 7), reports, strict=False):
        diff_I = bootstrap_diff(counts[0], counts[1], 137, np.random.default_rng(seed))
        assert diff_I.shape == (137,)
        assert (report.diff_low, report.diff_high) == tuple(np.quantile(diff_I, [0.1, 0.9]))
        classes = np.array(classes_of(traces, seed))
        for name, found in report.classes.items():
            alphas = [each.of(classes == name).alpha for each in counts]
            assert [found.num_traces, found.alpha_candidate, found.alpha_base] == [
                (classes == name).sum(),
                *alphas,
            ]
            assert found.success_candidate == counts[0].of(classes == name).success


def test_where_it_is_known_since_when_the_traffic_is_another_that_is_taken() -> None:
    """However few came since, and however alike the draft is on both."""
    traces = [replace(counting(10 + i), finished_at=100.0 + i) for i in range(20)]
    both = Knows(range(10, 80)), Knows(range(10, 80))

    def num_judged(since: float) -> tuple[int, int]:
        report = compare(*both, traces, 2, GateConfig(), max_length=64, since=since)
        return report.num_before, report.num_traces

    assert num_judged(0.0) == (0, 20) and num_judged(115.0) == (15, 5)


def counts_of(tested: Sequence[int], accepted: Sequence[int]) -> ReplayCounts:
    return ReplayCounts(
        tested_RG=np.array(tested)[:, None],
        accepted_RG=np.array(accepted)[:, None],
        held_RK=np.zeros((len(tested), 5), np.int64),
        served_R=np.array(tested),
    )


def test_requests_are_compared_in_pairs() -> None:
    # Requests differ wildly from one another, but the candidate gains 10 points in each: no doubt
    # about the gain.
    accepted = np.array([5, 80, 20, 60, 40, 70, 10, 30])
    base, candidate = counts_of([100] * 8, accepted), counts_of([100] * 8, accepted + 10)
    diff_I = bootstrap_diff(candidate, base, 500, np.random.default_rng(0))
    assert diff_I == pytest.approx(0.1)


def test_of_few_requests_an_earlier_draft_seldom_seems_better_by_chance() -> None:
    rng, chance, num = np.random.default_rng(0), 0.02, 1500
    num_wrong = dict.fromkeys((8, 16), 0)
    for few in num_wrong:
        for _ in range(num):
            tested = rng.integers(10, 60, few)
            alike = [rng.binomial(tested, rng.beta(2, 3, few)) for _ in range(2)]
            better, base = (counts_of(tested, accepted) for accepted in alike)
            num_wrong[few] += least_diff(better, base, chance) > 0
    assert all(wrong < 1.5 * chance * num for wrong in num_wrong.values()), num_wrong
    gains = counts_of([40] * 8, rng.integers(20, 25, 8))
    assert 0.2 < least_diff(gains, counts_of([40] * 8, [10] * 8), 0.003) < 0.3


def test_the_least_difference_is_students_bound_of_paired_requests() -> None:
    accepted, gain = np.array([5, 80, 20, 60, 40, 70, 10, 30]), np.array([9, 11, 10, 8] * 2)
    base, better = counts_of([100] * 8, accepted), counts_of([100] * 8, accepted + gain)
    standard_error = (gain / 100).std(ddof=1) / np.sqrt(8)
    expected = gain.mean() / 100 - 2.998 * standard_error  # t of 7 degrees of freedom
    assert least_diff(better, base, 0.01) == pytest.approx(expected, abs=1e-5)
    nothing = counts_of([0] * 8, [0] * 8)
    assert least_diff(nothing, nothing, 0.01) == 0.0
    assert not least_diff(counts_of([9], [9]), counts_of([9], [1]), 0.01) > 0, "of one request"


def test_resampling_spreads_as_the_standard_error_says() -> None:
    rng = np.random.default_rng(0)
    gain = rng.normal(0.05, 0.1, 200)
    base, candidate = (
        counts_of([1000] * 200, [300] * 200),
        counts_of([1000] * 200, (300 + 1000 * gain).astype(int)),
    )
    diff_I = bootstrap_diff(candidate, base, 4000, rng)
    assert diff_I.mean() == pytest.approx(gain.mean(), abs=0.002)
    assert diff_I.std() == pytest.approx(gain.std() / np.sqrt(200), rel=0.05)


def test_a_class_that_is_still_served_is_looked_at_on_all_of_its_traces() -> None:
    gate = GateConfig()
    traces = [
        make_trace(index=i, domain=d) for i, d in enumerate(["home"] * 24 + ["new", "home"] * 6)
    ]
    num = len(traces)
    base, candidate = counts_of([100] * num, [80] * num), counts_of([100] * num, [50] * num)
    found = _class_reports(traces, base, candidate, gate, 0, 24)
    assert {name: one.num_traces for name, one in found.items()} == {"home": 30, "new": 6}
    stray = [*traces[:24], *[make_trace(index=90 + i, domain="new") for i in range(20)], traces[0]]
    num = len(stray)
    base, candidate = counts_of([100] * num, [80] * num), counts_of([100] * num, [50] * num)
    assert set(_class_reports(stray, base, candidate, gate, 0, 24)) == {"new"}


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
    assert {name: found.num_traces for name, found in report.classes.items()} == {
        "code": 8,
        "unlabelled 1": 4,
    }
    assert all(found.alpha_base < found.alpha_candidate for found in report.classes.values())
    assert all(
        found.diff_high > found.alpha_candidate - found.alpha_base
        for found in report.classes.values()
    )
    assert compare(good, bad, traces, 3, GateConfig(), max_length=128) == report
    same = compare(bad, bad, traces, 3, GateConfig(), max_length=128)
    assert same.diff == same.diff_low == same.diff_high == 0
