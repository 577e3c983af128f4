"""The upper bound of an evaluation, from its own runs.

    answers of `none` ─► the draft and the memory asked at every position ─► runs  ┐
    steps of their engines ─► what verifying and proposing took, by width ─► costs ├─► all rules
    prefill of `none` ─────────────────────────────────────────────────────────────┘

For loads that keep a number of requests in flight; steps of fewer requests are not priced. Methods
that cannot be asked again (n-gram lookup, suffix decoding, a head) are left out. Each proposer is
charged what its steps took. Of `none` the control's own time is left out, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np

from osd.evaluate.bound.costs import DraftCosts, StepCosts
from osd.evaluate.bound.replay import runs_of_draft, runs_of_memory
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns
from osd.evaluate.bound.speeds import ALL, best_fixed, fixed_name, rules_of, share_closed, speeds
from osd.evaluate.figures import MIN_STEPS, Figures
from osd.evaluate.plan import AUTO, DRAFT, MEMORY, NONE, Load
from osd.evaluate.runs import Request, Run, Step
from osd.records import Trace
from serving.speculation.control import Settings
from serving.speculation.memory.memory import Memory

if TYPE_CHECKING:
    from trainer.draft import Draft


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How fast the requests of one load could have been served.

    Example:
        Bound(load="batch 4", temperature=0.0, most={"draft": 3},
              speeds={"no speculation": 1.0, "draft, k = 3": 1.4, "oracle of all proposers": 1.9})
    """

    load: str
    temperature: float
    most: dict[str, int]
    """Proposer -> its longest draft."""
    speeds: dict[str, float]
    """Rule (`speeds.py`) -> speed over no speculation, all requests together."""

    @property
    def best_fixed(self) -> str:
        """The fastest choice that is the same in every step."""
        return best_fixed(self.speeds, self.most)


def closed_by_auto(bound: Bound, figures: Iterable[Figures]) -> float | None:
    """How much of the way from the best fixed choice to the oracle the control has gone, of the
    lengths that were measured. The control is held against the fastest of them as measured, the
    oracle against the fastest of them as computed: a length between them, which nobody ran, would
    shorten the way and be missed beside the control. None where one of them is missing."""
    measured = {
        (one.method, one.k): one.over_none.value
        for one in figures
        if (one.load, one.temperature) == (bound.load, bound.temperature) and one.over_none
    }
    auto = next((value for (method, _), value in measured.items() if method == AUTO), None)
    fixed = {choice: value for choice, value in measured.items() if choice[0] in bound.most}
    if auto is None or not fixed:
        return None
    computed = max(1.0, *(bound.speeds[fixed_name(*choice)] for choice in fixed))
    return share_closed(auto / max(1.0, *fixed.values()), 1.0, bound.speeds[ALL] / computed)


def bounds(
    runs: Sequence[Run], requests: Sequence[Request], loads: Iterable[Load], draft: Draft | None
) -> list[Bound]:
    """Of each load and temperature whose steps tell what they took. `draft`: None where there is
    none to be asked again; it is left out then."""
    found = []
    for load in loads:
        for temperature in dict.fromkeys(run.temperature for run in runs):
            mine = [
                run
                for run in runs
                if (run.load, run.temperature) == (load.name, temperature)
                and run.engine in (DRAFT, MEMORY)
            ]
            most = longest_drafts(mine)
            if draft is None:
                most.pop(DRAFT, None)
            costs = costs_of(mine, load.streams, most) if load.streams and most else None
            if costs is None:
                continue
            served = _answers(mine, requests)
            all_runs = _replayed(served, most, draft, load.streams)
            if any(one.num_output > 1 for one in all_runs):
                named = speeds(all_runs, costs, rules_of(most))
                by_rule = {name: one.of_sums for name, one in named.items()}
                found.append(
                    Bound(load=load.name, temperature=temperature, most=most, speeds=by_rule)
                )
    return found


def longest_drafts(runs: Iterable[Run]) -> dict[str, int]:
    """Proposer -> the longest draft it was measured with."""
    most: dict[str, int] = {}
    for run in runs:
        if run.method in (DRAFT, MEMORY):
            most[run.method] = max(run.k, most.get(run.method, 0))
    return most


def costs_of(runs: Sequence[Run], batch: int, most: Mapping[str, int]) -> StepCosts | None:
    """What steps of `batch` requests took; None where too few of them tell."""
    by_width: dict[int, list[float]] = {}
    for run in runs:
        for step in _whole(run, batch):
            if step.width % batch == 0 and step.parts is not None:
                seconds = step.seconds - _proposing(step)
                by_width.setdefault(step.width // batch - 1, []).append(seconds)
    known = {w: median(s) for w, s in sorted(by_width.items()) if len(s) >= MIN_STEPS}
    drafts = {method: _draft_costs(method, runs, batch) for method in most}
    if 0 not in known or len(known) < 2 or None in drafts.values():
        return None
    return StepCosts(
        batch=batch,
        widths=tuple(known),
        verify_s=tuple(np.maximum.accumulate(list(known.values())).tolist()),
        prefill_s=batch * _prefill_s([run for run in runs if run.method == NONE]),
        drafts={method: costs for method, costs in drafts.items() if costs is not None},
    )


def _whole(run: Run, batch: int) -> list[Step]:
    """Its steps that only decode, with all requests in them, and tell their parts."""
    return [s for s in run.steps if s.is_pure and s.batch == batch and s.parts is not None]


def _proposing(step: Step) -> float:
    """Seconds in which tokens were proposed and the control decided."""
    assert step.parts is not None
    return step.parts[0] + step.own


def _draft_costs(method: str, runs: Iterable[Run], batch: int) -> DraftCosts | None:
    """The memory takes as much however long its draft is; each token of a draft model, a pass."""
    by_k: dict[int, list[float]] = {}
    for run in runs:
        if run.method == method:
            by_k.setdefault(run.k, []).extend(map(_proposing, _whole(run, batch)))
    known = {k: median(s) for k, s in by_k.items() if len(s) >= MIN_STEPS}
    if not known:
        return None
    if method == MEMORY:
        return DraftCosts(per_step_s=mean(known.values()))
    per_pass, per_step = (
        np.polyfit(list(known), list(known.values()), 1).tolist() if len(known) > 1 else (0.0, -1.0)
    )
    if per_step < 0:  # a line through nothing
        return DraftCosts(per_pass_s=mean(s / k for k, s in known.items()))
    if per_pass < 0:
        return DraftCosts(per_step_s=mean(known.values()))
    return DraftCosts(per_step_s=per_step, per_pass_s=per_pass)


def _prefill_s(nones: Sequence[Run]) -> float:
    """Seconds of the steps that read prompts, for each request."""
    seconds = sum(
        step.seconds - step.own for run in nones for step in run.steps if not step.is_pure
    )
    return seconds / max(sum(len(run.requests) for run in nones), 1)


def _answers(runs: Iterable[Run], requests: Sequence[Request]) -> list[Trace]:
    """Of the first run of `none`."""
    none = next(run for run in runs if run.method == NONE)
    return [
        Trace.of_text(requests[one.index].prompt_ids, one.token_ids, trace_id=str(one.index))
        for one in none.requests
    ]


def _replayed(
    answers: Sequence[Trace], most: Mapping[str, int], draft: Draft | None, batch: int
) -> list[RequestRuns]:
    by_answer: list[dict[str, ProposerRuns]] = [{} for _ in answers]
    if draft is not None and DRAFT in most:
        for found, answer in zip(by_answer, answers, strict=True):
            found[DRAFT] = runs_of_draft(draft, answer, most[DRAFT])
    if MEMORY in most:
        remembered = runs_of_memory(answers, Memory(Settings().memory_bytes, most[MEMORY]), batch)
        for found, one in zip(by_answer, remembered, strict=True):
            found[MEMORY] = one
    return [
        RequestRuns(
            num_prompt=len(answer.prompt_ids),
            num_output=max(len(answer.output_ids), 1),
            proposers=proposers,
        )
        for answer, proposers in zip(answers, by_answer, strict=True)
    ]
