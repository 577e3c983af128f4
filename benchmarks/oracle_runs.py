"""What the draft and the memory would have had at each output position of recorded requests: what
the oracles of `osd bench oracle` know.

The draft's runs follow from where it is right. The memory is asked at every position, as it was
then: requests run so many at a time, side by side, each a token a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.closed_loop import DRAFT, MEMORY
from benchmarks.recording import Recorded
from benchmarks.served import matches_of
from benchmarks.step_times import WIDTHS, ModelledStepTimes
from osd.evaluate.bound.costs import DraftCosts, StepCosts
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns
from serving.speculation.requests import Remembers
from trainer.draft import Draft
from trainer.evaluate import leading_matches


def runs_of(
    requests: Sequence[Recorded], model: Draft, memory: Remembers, *, k: int, batch: int
) -> list[RequestRuns]:
    """Of each request. `k`: most tokens of the draft. `memory`: as it is before the first."""
    remembered = runs_of_memory(requests, memory, batch)
    return [
        RequestRuns(
            num_prompt=len(request.prompt_ids),
            num_output=len(request.output_ids),
            proposers={DRAFT: runs_of_draft(model, request, k), MEMORY: found},
        )
        for request, found in zip(requests, remembered, strict=True)
    ]


def runs_of_draft(model: Draft, request: Recorded, k: int) -> ProposerRuns:
    """Up to k tokens wherever it is asked."""
    return ProposerRuns.of_model(leading_matches(matches_of(model, request), k), k)


def runs_of_memory(
    requests: Sequence[Recorded], memory: Remembers, batch: int
) -> list[ProposerRuns]:
    """Whatever it finds, however unlikely."""
    offered = [np.zeros(max(len(one.output_ids) - 1, 0), np.int64) for one in requests]
    right = [np.zeros_like(one) for one in offered]
    coming = iter(range(len(requests)))
    running: dict[int, int] = {}  # index -> output tokens so far
    while True:
        while len(running) < batch and (index := next(coming, None)) is not None:
            memory.begin(requests[index].name, requests[index].prompt_ids.tolist())
            running[index] = 0
        if not running:
            break
        _advance(requests, memory, running)
        for index in [i for i, at in running.items() if at >= len(requests[i].output_ids)]:
            memory.end(requests[index].name)
            del running[index]
        for index, at in running.items():
            found = memory.propose(requests[index].name, memory.k, 0.0).tokens
            offered[index][at - 1] = len(found)
            right[index][at - 1] = _num_right(found, requests[index].output_ids[at:])
    return [ProposerRuns(right=r, offered=o) for r, o in zip(right, offered, strict=True)]


def costs_of(times: ModelledStepTimes) -> StepCosts:
    """The prices of the replay: the draft model costs a step as much however long its draft is, the
    memory nothing. A wider step is taken to last no less than a narrower one, however it was
    measured."""
    return StepCosts(
        batch=times.batch,
        widths=WIDTHS,
        verify_s=tuple(np.maximum.accumulate(times.verify_s).tolist()),
        drafts={DRAFT: DraftCosts(per_step_s=times.draft_s), MEMORY: DraftCosts()},
    )


def _advance(requests: Sequence[Recorded], memory: Remembers, running: dict[int, int]) -> None:
    """A token for each, where its answer has one."""
    memory.advance_all(
        [
            (requests[index].name, requests[index].output_ids[at : at + 1].tolist())
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
