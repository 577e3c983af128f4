"""Success by k: how often a token tree of width k would have held the served token.

    answers of the draft model's engine ─► one pass of the draft over each ─► its k likeliest tokens

No tree is verified for it (SpecInfer, arXiv 2305.09781, table 1; `docs/trees.md`). The answers of
one run of `none` at each temperature are read. An EAGLE-3 head is left out: it would need the
target's hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from osd.evaluate.bound.replay import UNLIMITED
from osd.evaluate.plan import DRAFT, NONE
from osd.evaluate.runs import Request, Run
from osd.records import Trace

if TYPE_CHECKING:
    from trainer.draft import Draft
    from trainer.evaluate import ReplayCounts

ALL = "all data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """Of a draft model, in answers to one data set.

    Example:
        Success(temperature=0.0, data="gsm8k", num_tokens=812,
                by_k=(0.68, 0.77, 0.81, 0.84, 0.85))
    """

    temperature: float
    data: str
    """One, or where there are several also `ALL`."""
    num_tokens: int
    """Served tokens that were looked for: of each answer those from the second on."""
    by_k: tuple[float, ...]
    """Share of them among the draft's k likeliest, from k = 1 on."""


def successes(runs: Iterable[Run], requests: Sequence[Request], draft: Draft) -> list[Success]:
    """By temperature and data set, in the order of the runs; none where the draft has no run."""
    from trainer.evaluate import can_replay, replay

    found: list[Success] = []
    for temperature, run in _answers(runs).items():
        by_data: dict[str, list[Trace]] = {}
        for one in run.requests:
            request = requests[one.index]
            trace = Trace.of_text(request.prompt_ids, one.token_ids)
            if can_replay(trace):
                by_data.setdefault(request.data, []).append(trace)
        counts = {
            data: replay(draft, traces, 1, max_length=UNLIMITED)
            for data, traces in sorted(by_data.items())
        }
        found += [_of(temperature, data, [one]) for data, one in counts.items()]
        if len(counts) > 1:
            found.append(_of(temperature, ALL, list(counts.values())))
    return found


def _of(temperature: float, data: str, counts: Sequence[ReplayCounts]) -> Success:
    num = sum(int(one.served_R.sum()) for one in counts)
    held_K = sum(one.held_RK.sum(0) for one in counts)
    return Success(
        temperature=temperature, data=data, num_tokens=num, by_k=tuple((held_K / num).tolist())
    )


def _answers(runs: Iterable[Run]) -> dict[float, Run]:
    """Temperature -> the first run of `none` in the draft model's engine."""
    found: dict[float, Run] = {}
    for run in runs:
        if run.engine == DRAFT and run.method == NONE:
            found.setdefault(run.temperature, run)
    return found
