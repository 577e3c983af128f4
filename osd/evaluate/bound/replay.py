"""What the draft model and the memory would have had at each output position of served answers.

The draft's runs follow from where it is right. The memory is asked at every position, as it was
then: requests run so many at a time, side by side, each a token a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from osd.evaluate.bound.runs import ProposerRuns
from osd.records import Trace

if TYPE_CHECKING:
    from serving.speculation.memory.remembers import Remembers
    from trainer.draft import Draft

UNLIMITED = 10**6
"""Tokens of context that the draft sees: as many as it can, as in the engine."""


def runs_of_draft(model: Draft, answer: Trace, k: int) -> ProposerRuns:
    """Up to k tokens wherever it is asked."""
    from trainer.evaluate import is_match, leading_matches

    matches_GT = is_match(model, answer, max_length=UNLIMITED)
    return ProposerRuns.of_model(leading_matches(matches_GT, k), k)


def runs_of_memory(answers: Sequence[Trace], memory: Remembers, batch: int) -> list[ProposerRuns]:
    """Whatever it finds, however unlikely. `answers`: no two of one `trace_id`. `memory`: as it is
    before the first."""
    offered = [np.zeros(max(len(one.output_ids) - 1, 0), np.int64) for one in answers]
    right = [np.zeros_like(one) for one in offered]
    tokens = [np.full((len(one), memory.k), -1) for one in offered]
    coming = iter(range(len(answers)))
    running: dict[int, int] = {}  # index -> output tokens so far
    while True:
        while len(running) < batch and (index := next(coming, None)) is not None:
            memory.begin(answers[index].trace_id, answers[index].prompt_ids.tolist())
            running[index] = 0
        if not running:
            break
        _advance(answers, memory, running)
        for index in [i for i, at in running.items() if at >= len(answers[i].output_ids)]:
            memory.end(answers[index].trace_id)
            del running[index]
        for index, at in running.items():
            found = memory.propose(answers[index].trace_id, memory.k, 0.0).tokens
            offered[index][at - 1] = len(found)
            tokens[index][at - 1, : len(found)] = found
            right[index][at - 1] = _num_right(found, answers[index].output_ids[at:])
    return [
        ProposerRuns(right=r, offered=o, tokens=t)
        for r, o, t in zip(right, offered, tokens, strict=True)
    ]


def _advance(answers: Sequence[Trace], memory: Remembers, running: dict[int, int]) -> None:
    """A token for each, where its answer has one."""
    memory.advance_all(
        [
            (answers[index].trace_id, answers[index].output_ids[at : at + 1].tolist())
            for index, at in running.items()
        ]
    )
    memory.work()
    for index in running:
        running[index] += 1


def _num_right(found: Sequence[int], served: np.ndarray) -> int:
    num = min(len(found), len(served))
    wrong = np.flatnonzero(np.asarray(found[:num], np.int64) != served[:num])
    return int(wrong[0]) if len(wrong) else num
