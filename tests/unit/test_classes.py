"""Traffic falls into classes by label, and unlabelled prompts by the words they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from osd.records import Trace
from tests.builders import make_trace
from trainer.classes import MIN_PER_CLUSTER, classes_of

COMMON = list(range(10))
"""Tokens of a chat template, in every prompt."""


def prompts(first: int, num: int, seed: int) -> list[Trace]:
    """Traces whose prompts take their words from 30 tokens that begin with `first`."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            make_trace(trace_id=f"{first}-{index}"),
            prompt_ids=np.array([*COMMON, *rng.integers(first, first + 30, 20)], np.int32),
            domain="",
        )
        for index in range(num)
    ]


def test_labels_are_classes() -> None:
    sql, chat = prompts(100, 1, 0)[0], prompts(100, 1, 1)[0]
    assert classes_of([replace(sql, domain="sql"), chat, replace(chat, domain="code")]) == [
        "sql",
        "unlabelled 1",
        "code",
    ]


def test_prompts_of_other_words_are_other_classes() -> None:
    kinds = [prompts(100, 30, 1), prompts(300, 20, 2), prompts(600, 14, 3)]
    mixed = [trace for kind in kinds for trace in kind]
    order = np.random.default_rng(4).permutation(len(mixed))
    found = dict(zip(order.tolist(), classes_of([mixed[i] for i in order]), strict=True))
    kind_of = [0] * 30 + [1] * 20 + [2] * 14
    together = {(kind_of[i], found[i]) for i in range(len(mixed))}
    # Each class holds one kind alone (a kind may fall into two).
    assert len({name for _, name in together}) == len(together)
    assert len(together) >= 3


def test_few_prompts_are_one_class() -> None:
    few = [*prompts(100, MIN_PER_CLUSTER, 1), *prompts(300, MIN_PER_CLUSTER - 1, 2)]
    assert set(classes_of(few)) == {"unlabelled 1"}


def test_prompts_all_alike_are_no_trouble() -> None:
    one = prompts(100, 1, 1)[0]
    assert len(classes_of([one] * 40)) == 40
    assert classes_of([]) == []


def test_the_same_traces_fall_into_the_same_classes() -> None:
    traces = [*prompts(100, 20, 1), *prompts(300, 20, 2)]
    assert classes_of(traces, seed=5) == classes_of(traces, seed=5)
