"""What the runs say of each arm under each load.

    tokens/s over none    by pairs: runs of one engine, load, temperature and repeat
    latencies             TTFT from a request's arrival to its first token; TPOT from there to its
                          last, over the tokens after the first; latency from arrival to last token
    acceptance length     1 + accepted / drafts, as vLLM counts them
    α                     accepted / tested draft tokens (`osd/records`)
    target efficiency     T(1) / T(1 + k): what the target takes to verify one token of each
                          request, over what it takes for 1 + k (MoESD, arXiv 2505.19645)

Of `none` the time that the control took for itself is left out, as an engine without speculation
has no control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from osd.evaluate.plan import NONE, Arm
from osd.evaluate.runs import Counters, Request, Run, Served, Step

NUM_PLACES = 10
"""Parts of an answer of equal length, by which acceptance is told."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of requests, by their acceptance."""
MIN_STEPS = 3
"""Fewer steps of one width do not tell what that width takes."""
PARTS = ("draft", "verify", "sample", "scheduling", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Tokens/s over none: the median of the pairs, and the lowest and the highest.

    Example:
        Ratio(value=1.6, low=1.5, high=1.7, num=3)
    """

    value: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tails:
    """Half of the requests took no longer than `p50` seconds, 99 of 100 no longer than `p99`."""

    p50: float
    p99: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Draft tokens that were tested, and how many were accepted, by some class.

    Example:
        Acceptance(tested=(10, 8), accepted=(8, 5))
    """

    tested: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def alpha(self) -> tuple[float | None, ...]:
        """accepted / tested; None where nothing was tested."""
        pairs = zip(self.accepted, self.tested, strict=True)
        return tuple(right / all_ if all_ else None for right, all_ in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfData:
    """What an arm did on one data set."""

    data: str
    num_requests: int
    acceptance_length: float | None
    alpha: float | None
    tpot: Tails


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one arm, engine, load and temperature."""

    engine: str
    method: str
    k: int
    load: str
    temperature: float
    num_runs: int
    tokens_per_second: float
    over_none: Ratio | None
    """None of `none` itself, and where no run has its pair."""
    ttft: Tails
    tpot: Tails
    latency: Tails
    acceptance_length: float | None
    """None where nothing was drafted."""
    drafted_per_step: float
    """Draft tokens proposed, per step of a request."""
    verified_per_step: float
    """Tokens that the target computed, per step of a request."""
    step_ms: float
    """Milliseconds of a step that only decodes."""
    parts_ms: dict[str, float]
    """Part of such a step -> milliseconds; {} where the engine does not tell them."""
    target_efficiency: float | None
    by_draft_position: Acceptance
    by_output_place: Acceptance
    """By tenths of the answer."""
    by_request: tuple[float, ...]
    """`QUANTILES` of the requests' α; () where nothing was drafted."""
    by_data: tuple[OfData, ...]
    num_compared: int
    """Answers at temperature 0 that were compared with those of `none`."""
    num_different: int
    agrees_with_vllm: bool
    """Whether what was written down step by step adds up to vLLM's own counters."""

    @property
    def arm(self) -> Arm:
        return Arm(method=self.method, k=self.k)


def figures_of(runs: Sequence[Run], requests: Sequence[Request]) -> list[Figures]:
    """In the order of the runs."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.load, run.temperature, run.method, run.k), []).append(
            run
        )
    nones = {_turn(run): run for run in runs if run.method == NONE}
    return [_figures(group, nones, requests) for group in groups.values()]


def _turn(run: Run) -> tuple[Any, ...]:
    """Runs of one turn are paired."""
    return run.started, run.load, run.temperature, run.repeat


def _figures(
    runs: Sequence[Run], nones: dict[tuple[Any, ...], Run], requests: Sequence[Request]
) -> Figures:
    first = runs[0]
    pairs = [(run, nones[_turn(run)]) for run in runs if _turn(run) in nones]
    served = [one for run in runs for one in run.requests]
    pure = [step for run in runs for step in run.steps if step.is_pure]
    of_none = {id(none): none for _, none in pairs}.values()
    is_none = first.method == NONE
    return Figures(
        engine=first.engine,
        method=first.method,
        k=first.k,
        load=first.load,
        temperature=first.temperature,
        num_runs=len(runs),
        tokens_per_second=median(map(speed, runs)),
        over_none=None if is_none else _ratio(pairs),
        ttft=_tails(one.first_at - one.arrived for one in served),
        tpot=_tpot(served),
        latency=_tails(one.ended - one.arrived for one in served),
        acceptance_length=_length(served),
        drafted_per_step=_per_request(pure, _drafted),
        verified_per_step=_per_request(pure, lambda step: step.width),
        step_ms=1000 * float(np.mean([step.seconds for step in pure])) if pure else 0.0,
        parts_ms=_parts(pure),
        target_efficiency=None if is_none else _efficiency(first.k, of_none, pure),
        by_draft_position=_by_position(served, first.k),
        by_output_place=_by_place(served),
        by_request=_by_request(served),
        by_data=_by_data(served, requests),
        num_compared=0 if is_none or first.temperature else sum(len(r.requests) for r, _ in pairs),
        num_different=0 if is_none or first.temperature else _num_different(pairs),
        agrees_with_vllm=all(counted(run.requests, len_of(run)) == run.counters for run in runs),
    )


def speed(run: Run) -> float:
    """Tokens per second; of `none` without the control's own time."""
    own = sum(step.own for step in run.steps) if run.method == NONE else 0.0
    return run.num_tokens / max(run.seconds - own, 1e-9)


def len_of(run: Run) -> int:
    """Positions for which vLLM counts: those of the longest draft of its engine."""
    return len(run.counters.accepted_per_position)


def counted(served: Iterable[Served], num_positions: int) -> Counters:
    """vLLM's counters, from what was written down."""
    parts = [step for one in served for step in one.steps if step.drafted]
    per_position = np.zeros(num_positions, np.int64)
    for part in parts:
        per_position[: part.accepted] += 1
    return Counters(
        num_drafts=len(parts),
        num_draft_tokens=sum(len(part.drafted) for part in parts),
        num_accepted_tokens=sum(part.accepted for part in parts),
        accepted_per_position=tuple(per_position.tolist()),
    )


def _ratio(pairs: Sequence[tuple[Run, Run]]) -> Ratio | None:
    ratios = [speed(run) / speed(none) for run, none in pairs]
    if not ratios:
        return None
    return Ratio(value=median(ratios), low=min(ratios), high=max(ratios), num=len(ratios))


def _tails(seconds: Iterable[float]) -> Tails:
    found = np.array(list(seconds), float)
    if not found.size:
        return Tails(p50=0.0, p99=0.0)
    p50, p99 = np.quantile(found, (0.5, 0.99), method="inverted_cdf").tolist()
    return Tails(p50=p50, p99=p99)


def _tpot(served: Iterable[Served]) -> Tails:
    return _tails(
        (one.ended - one.first_at) / (len(one.token_ids) - 1)
        for one in served
        if len(one.token_ids) > 1
    )


def _length(served: Iterable[Served]) -> float | None:
    found = counted(served, 1024)
    return 1 + found.num_accepted_tokens / found.num_drafts if found.num_drafts else None


def _per_request(steps: Sequence[Step], count: Callable[[Step], int]) -> float:
    batch = sum(step.batch for step in steps)
    return sum(map(count, steps)) / batch if batch else 0.0


def _drafted(step: Step) -> int:
    """Where drafts stay on the device, the scheduler sees only those that are verified."""
    return max(step.proposed, step.width - step.batch)


def _parts(steps: Sequence[Step]) -> dict[str, float]:
    told = [step for step in steps if step.parts is not None]
    if not told:
        return {}
    rows = np.array([step.parts for step in told])
    draft, verify, sample, _ = rows.mean(0).tolist()
    scheduling = float(np.mean([step.scheduling for step in told]))
    whole = float(np.mean([step.seconds for step in told]))
    other = whole - draft - verify - sample - scheduling
    seconds = (draft, verify, sample, scheduling, other)
    return {name: 1000 * each for name, each in zip(PARTS, seconds, strict=True)}


def _efficiency(k: int, nones: Iterable[Run], steps: Sequence[Step]) -> float | None:
    """Steps of the batch that most steps had, and of full width."""
    if not steps:
        return None
    batch = int(np.argmax(np.bincount([step.batch for step in steps])))
    one = _verify([step for run in nones for step in run.steps if step.is_pure], batch, batch)
    more = _verify(steps, batch, batch * (1 + k))
    return one / more if one and more else None


def _verify(steps: Iterable[Step], batch: int, width: int) -> float | None:
    found = [
        step.parts[1]
        for step in steps
        if step.parts is not None and (step.batch, step.width) == (batch, width)
    ]
    return median(found) if len(found) >= MIN_STEPS else None


def _by_position(served: Iterable[Served], k: int) -> Acceptance:
    tested, accepted = np.zeros(k, np.int64), np.zeros(k, np.int64)
    for one in served:
        for part in one.steps:
            tested[: min(len(part.drafted), part.accepted + 1)] += 1
            accepted[: part.accepted] += 1
    return Acceptance(tested=tuple(tested.tolist()), accepted=tuple(accepted.tolist()))


def _by_place(served: Iterable[Served]) -> Acceptance:
    tested, accepted = np.zeros(NUM_PLACES, np.int64), np.zeros(NUM_PLACES, np.int64)
    for one in served:
        length = max(len(one.token_ids), 1)
        for part in one.steps:
            place = min(NUM_PLACES * part.at // length, NUM_PLACES - 1)
            tested[place] += min(len(part.drafted), part.accepted + 1)
            accepted[place] += part.accepted
    return Acceptance(tested=tuple(tested.tolist()), accepted=tuple(accepted.tolist()))


def _alpha(served: Iterable[Served]) -> float | None:
    parts = [part for one in served for part in one.steps]
    tested = sum(min(len(part.drafted), part.accepted + 1) for part in parts)
    return sum(part.accepted for part in parts) / tested if tested else None


def _by_request(served: Iterable[Served]) -> tuple[float, ...]:
    found = [alpha for one in served if (alpha := _alpha([one])) is not None]
    return tuple(np.quantile(found, QUANTILES).tolist()) if found else ()


def _by_data(served: Sequence[Served], requests: Sequence[Request]) -> tuple[OfData, ...]:
    groups: dict[str, list[Served]] = {}
    for one in served:
        groups.setdefault(requests[one.index].data, []).append(one)
    return tuple(
        OfData(
            data=data,
            num_requests=len({one.index for one in group}),
            acceptance_length=_length(group),
            alpha=_alpha(group),
            tpot=_tpot(group),
        )
        for data, group in sorted(groups.items())
    )


def _num_different(pairs: Iterable[tuple[Run, Run]]) -> int:
    return sum(
        one.token_ids != other.token_ids
        for run, none in pairs
        for one, other in zip(run.requests, none.requests, strict=True)
    )
