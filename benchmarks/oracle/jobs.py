"""The jobs of the benchmark of the oracle: one schedule at one batch, at each price of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.drift import jobs
from benchmarks.record import Row
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, Family
from benchmarks.traffic.schedule import Schedule, arrivals

if TYPE_CHECKING:
    from benchmarks.replays.closed_loop import ClosedLoop
    from benchmarks.replays.recording import Recorded
    from benchmarks.replays.served import Served
    from benchmarks.replays.step_times import ModelledStepTimes
    from osd.evaluate.bound.costs import StepCosts
    from osd.evaluate.bound.runs import RequestRuns
    from osd.evaluate.bound.speeds import Speeds

STEPS, DRAFTING, VERIFYING = "more steps", "draft passes", "tokens verified"
"""What takes the control longer than the oracle."""


def run(
    name: str, schedule: Schedule, seed: int, times: Mapping[str, ModelledStepTimes]
) -> list[Row]:
    """Rows {"schedule", "seed", "batch", "price", "requests", "control", "speeds", "means",
    "parts"}, one a price, all of one batch. Speeds over no speculation, ratio of sums ("means":
    means over requests); parts as shares of the time over the oracle's. Where answers are drawn,
    two of the speeds are of who knows the odds."""
    from benchmarks.oracle.runs import costs_of, runs_of
    from benchmarks.replays.closed_loop import DRAFT, MEMORY, ClosedLoop
    from benchmarks.traffic.recordings import in_order
    from osd.evaluate.bound.speeds import rules_of, speeds
    from serving.speculation.memory.compiled import best
    from serving.speculation.memory.memory import Memory
    from trainer.draft import load_draft

    jobs.one_thread()
    config = jobs.base_config()
    given = config.speculation
    _, draft = FAMILIES[schedule.family].models()
    coming = arrivals(schedule, name, seed)
    requests = in_order(schedule.family, FIRST_SERVED + seed, coming)
    (batch,) = {one.batch for one in times.values()}
    memory = Memory(given.memory_bytes, given.memory_k_max, best(is_alone=True))
    runs = runs_of(requests, load_draft(draft), memory, k=given.k_max, batch=batch)
    if is_drawn := FAMILIES[schedule.family].temperature > 0:
        runs = list(_with_odds(runs, requests, FAMILIES[schedule.family]))
    rules = rules_of({DRAFT: given.k_max, MEMORY: given.memory_k_max})
    rows = []
    for price, of_step in times.items():
        found = speeds(runs, costs_of(of_step), rules)
        if is_drawn:
            found |= _with_foresight(runs, costs_of(of_step))
        loop = ClosedLoop(requests, config, of_step, seed=seed)
        loop.swap(draft, None)
        served = list(loop.serve())
        rows.append(
            {
                "schedule": name,
                "seed": seed,
                "batch": batch,
                "price": price,
                "requests": len(requests),
                "control": speed_of(served, of_step),
                "speeds": {rule: one.of_sums for rule, one in found.items()},
                "means": {rule: one.mean for rule, one in found.items()},
                "parts": parts_of(loop, served, found, of_step),
            }
        )
    return rows


def _with_odds(
    runs: Sequence[RequestRuns], requests: Sequence[Recorded], family: Family
) -> Iterator[RequestRuns]:
    from transformers import AutoModelForCausalLM

    from benchmarks.oracle.odds import with_odds
    from benchmarks.replays.served import TARGET_ID

    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
        for path in family.models()
    )
    for one, request in zip(runs, requests, strict=True):
        answer = request.bare_trace(TARGET_ID)
        yield with_odds(one, answer, target, draft, family.temperature)


def _with_foresight(runs: Sequence[RequestRuns], costs: StepCosts) -> dict[str, Speeds]:
    from benchmarks.replays.closed_loop import DRAFT, MEMORY
    from osd.evaluate.bound.foresight import KNOWS, PAYS, earning, foreseeing, paying_to_see

    return {
        KNOWS: earning(runs, costs, lambda rate: foreseeing((MEMORY, DRAFT), rate)),
        PAYS: earning(runs, costs, lambda rate: paying_to_see((MEMORY,), DRAFT, rate)),
    }


def speed_of(served: Sequence[Served], times: ModelledStepTimes) -> float:
    """Over no speculation: all tokens over all seconds."""
    tokens = sum(one.counts.tokens for one in served)
    return tokens / _seconds(served) / times.tokens_per_second_without()


def parts_of(
    loop: ClosedLoop,
    served: Sequence[Served],
    found: Mapping[str, Speeds],
    times: ModelledStepTimes,
) -> dict[str, float]:
    """What the time over the oracle's goes into, as shares of it: steps, each with the pass that
    any step is; drafting; and verifying drafts, which is the rest."""
    from benchmarks.replays.closed_loop import DRAFT
    from osd.evaluate.bound.speeds import ALL

    oracle, seconds = found[ALL], _seconds(served)
    steps = [step for course in oracle.courses for step in course.steps]
    over = seconds - float(oracle.seconds_R.sum()) / times.batch
    num_more = sum(one.counts.steps for one in served) - len(steps)
    num_drafted = sum(proposer == DRAFT for proposer, _, _ in steps)
    drafting = loop.drafting * seconds / loop.clock - num_drafted * times.draft_s / times.batch
    more = num_more * times.verify_s[0] / times.batch
    return {
        STEPS: more / over,
        DRAFTING: drafting / over,
        VERIFYING: (over - more - drafting) / over,
    }


def _seconds(served: Sequence[Served]) -> float:
    assert all(one.seconds is not None for one in served), "the closed loop keeps time"
    return sum(one.seconds or 0.0 for one in served)
