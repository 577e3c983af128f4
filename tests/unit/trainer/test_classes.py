"""Traffic falls into classes by label, and unlabelled prompts by the words they share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from osd.records import Trace
from tests.support.builders import make_trace
from trainer.classes import SURE, classes_of, last_fall

COMMON = list(range(10))
"""Tokens of a chat template, in every prompt."""


def prompts(
    first: int, num: int, seed: int, *, num_words: int = 20, num_known: int = 30
) -> list[Trace]:
    """Traces whose prompts take their words from 30 tokens that begin with `first`."""
    rng = np.random.default_rng(seed)
    return [
        make_trace(
            trace_id=f"{first}-{index}",
            num_rows=0,
            prompt_ids=np.array(
                [*COMMON, *rng.integers(first, first + num_known, num_words)], np.int32
            ),
        )
        for index in range(num)
    ]


def are_told_apart(*kinds: list[Trace]) -> bool:
    """Whether no class holds prompts of two kinds (a kind may fall into two classes)."""
    found = classes_of([trace for kind in kinds for trace in kind])
    ends = np.cumsum([len(kind) for kind in kinds]).tolist()
    names = [set(found[end - len(kind) : end]) for kind, end in zip(kinds, ends, strict=True)]
    return sum(map(len, names)) == len(set().union(*names))


def test_labels_are_classes() -> None:
    sql, chat = prompts(100, 1, 0)[0], prompts(100, 1, 1)[0]
    assert classes_of([replace(sql, domain="sql"), chat, replace(chat, domain="code")]) == [
        "sql",
        "unlabelled 1",
        "code",
    ]


def test_prompts_of_other_words_are_other_classes() -> None:
    kinds = [prompts(100, 30, 1), prompts(300, 20, 2), prompts(70_000, 14, 3)]
    assert are_told_apart(*kinds)
    mixed = [trace for kind in kinds for trace in kind]
    order = np.random.default_rng(4).permutation(len(mixed)).tolist()
    found = dict(zip(order, classes_of([mixed[i] for i in order]), strict=True))
    names = [{found[i] for i in part} for part in (range(30), range(30, 50), range(50, 64))]
    assert sum(map(len, names)) == len(set().union(*names)) >= 3, "in any order"


def test_neither_length_nor_what_all_prompts_share_makes_a_class() -> None:
    kinds = [
        [*prompts(first, 12, first), *prompts(first, 12, first, num_words=400)]
        for first in (100, 300)
    ]
    assert are_told_apart(*kinds)
    # Half of each kind says the template's first token a hundred times.
    for kind in kinds:
        kind[::2] = [
            replace(t, prompt_ids=np.concatenate([t.prompt_ids, np.zeros(100, np.int32)]))
            for t in kind[::2]
        ]
    assert are_told_apart(*kinds)


def test_a_word_that_most_prompts_share_makes_them_alike_however_often_they_say_it() -> None:
    def saying(word: int, times: int, num: int) -> list[Trace]:
        return [
            make_trace(index=index, num_rows=0, prompt_ids=np.full(times, word))
            for index in range(num)
        ]

    found = classes_of([*saying(5, 1, 13), *saying(5, 100, 13), *saying(9, 1, 4)])
    assert found == ["unlabelled 1"] * 26 + ["unlabelled 2"] * 4


def test_the_largest_class_is_the_first() -> None:
    found = classes_of([*prompts(300, 12, 2), *prompts(100, 14, 1)])
    assert found == ["unlabelled 2"] * 12 + ["unlabelled 1"] * 14
    found = classes_of([*prompts(300, 14, 2), *prompts(100, 12, 1)])
    assert found == ["unlabelled 1"] * 14 + ["unlabelled 2"] * 12


@pytest.mark.parametrize(
    ("num", "num_classes"), [(1, 1), (23, 1), (24, 2), (35, 2), (36, 3), (48, 4), (200, 4)]
)
def test_there_are_at_most_four_classes_of_at_least_twelve_on_average(
    num: int, num_classes: int
) -> None:
    """Every prompt has words of its own."""
    traces = [
        trace for index in range(num) for trace in prompts(100 + 3 * index, 1, index, num_known=3)
    ]
    sizes = Counter(classes_of(traces))
    assert set(sizes) == {f"unlabelled {i + 1}" for i in range(num_classes)}
    assert [count for _, count in sorted(sizes.items())] == sorted(sizes.values(), reverse=True)


def test_labelled_prompts_are_no_part_of_any_cluster() -> None:
    labelled = [replace(trace, domain="sql") for trace in prompts(300, 30, 2)]
    found = classes_of([*labelled, *prompts(300, 12, 3), *prompts(100, 11, 1), *labelled])
    assert found == ["sql"] * 30 + ["unlabelled 1"] * 23 + ["sql"] * 30


@pytest.mark.filterwarnings("error")
def test_prompts_all_alike_are_no_trouble() -> None:
    one = prompts(100, 1, 1)[0]
    assert classes_of([one] * 40) == ["unlabelled 1"] * 40
    assert classes_of([]) == []


def test_the_same_traces_fall_into_the_same_classes() -> None:
    """Where they might as well fall into others: each prompt has words of its own."""
    traces = [
        trace for index in range(60) for trace in prompts(100 + 3 * index, 1, index, num_known=3)
    ]
    assert classes_of(traces, seed=5) == classes_of(traces, seed=5) != classes_of(traces, seed=6)
    assert classes_of(traces) == classes_of(traces, seed=0)


@pytest.mark.parametrize(
    ("accepted", "least", "found"),
    [
        ([80, 81] * 10 + [20, 21] * 4, 8, 20),
        ([80, 81] * 10 + [20, 21] * 4, 9, 19),
        ([80, 81] * 10 + [20, 21] * 3, 2, 0),  # too few whatever is asked for
        ([80, 81] * 3 + [20, 21] * 10, 2, 0),
        ([20, 21] * 10 + [80, 81] * 4, 8, 0),  # better
        ([80, 81] * 8 + [76, 77] * 8, 8, 0),  # a trifle, beyond any doubt
        ([80, 81] * 8 + [74, 75] * 8, 8, 16),
        ([80, 20] * 16, 8, 0),
        ([80, 81] * 5 + [50, 51] * 5 + [10, 11] * 5, 8, 20),  # the clearest
        ([], 8, 0),
        ([80], 8, 0),
    ],
)
def test_the_traffic_has_changed_where_a_draft_is_worse_from_then_on(
    accepted: list[int], least: int, found: int
) -> None:
    assert last_fall(np.array(accepted), np.full(len(accepted), 100), least) == found


def test_what_tested_nothing_says_nothing() -> None:
    untested = [0] * 24
    accepted, tested = [60, 61] * 20 + untested, [100] * 40 + untested
    assert last_fall(np.array(accepted), np.array(tested), 8) == 0
    accepted, tested = [80, 0] * 10 + [20, 0] * 10, [100, 0] * 20
    assert last_fall(np.array(accepted), np.array(tested), 8) == 20


def test_a_fall_must_exceed_its_standard_errors_by_whole_requests() -> None:
    """Of the tokens of requests 70 and 90 % are accepted in turns, and then fewer."""
    before, since = np.tile([70, 90], 8), np.tile([70, 90], 8)
    error = 10 * np.sqrt(16 / 15 / 16)  # of each mean, in per cent
    for fall, found in (
        (SURE * np.hypot(error, error) - 0.3, 0),
        (SURE * np.hypot(error, error) + 0.6, 16),
    ):
        accepted = 10 * np.array([*before, *(since - fall)])
        assert last_fall(accepted.round(), np.full(32, 1000), 16) == found


@pytest.mark.parametrize("long", [20, 100])
@pytest.mark.parametrize("low, high", [(0.3, 0.8), (0.1, 0.9), (0.5, 0.5)])
def test_traffic_that_is_mixed_seldom_seems_to_have_changed(
    low: float, high: float, long: int
) -> None:
    """Four in five requests have one token to test, or twenty."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(200):
        alpha_R = np.where(rng.random(64) < 0.2, high, low)
        tested_R = np.where(rng.random(64) < 0.2, long, 100 // long)
        found += last_fall(rng.binomial(tested_R, alpha_R), tested_R, 8) > 0
    assert found <= 6
