"""What the draft and the memory would have had at each output position of recorded requests: what
the oracles of `osd bench oracle` know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.replays.closed_loop import DRAFT, MEMORY
from benchmarks.replays.recording import Recorded
from benchmarks.replays.served import TARGET_ID
from benchmarks.replays.step_times import WIDTHS, ModelledStepTimes
from osd.evaluate.bound.costs import DraftCosts, StepCosts
from osd.evaluate.bound.replay import runs_of_draft, runs_of_memory
from osd.evaluate.bound.runs import RequestRuns
from serving.speculation.memory.remembers import Remembers
from trainer.draft import Draft


def runs_of(
    requests: Sequence[Recorded], model: Draft, memory: Remembers, *, k: int, batch: int
) -> list[RequestRuns]:
    """Of each request. `k`: most tokens of the draft. `memory`: as it is before the first."""
    answers = [request.bare_trace(TARGET_ID) for request in requests]
    remembered = runs_of_memory(answers, memory, batch)
    return [
        RequestRuns(
            num_prompt=len(answer.prompt_ids),
            num_output=len(answer.output_ids),
            proposers={DRAFT: runs_of_draft(model, answer, k), MEMORY: found},
        )
        for answer, found in zip(answers, remembered, strict=True)
    ]


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
