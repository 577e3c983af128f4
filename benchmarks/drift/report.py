"""The figures of the drift benchmark from its raw rows: means over traffic seeds with 95 %
intervals (Student's t).

Some contenders propose only in some steps (n-gram, suffix decoding). *α of the steps* makes them
comparable: a step without a draft counts as one rejected token. For drafts of a model it equals α.
Under the closed loop, both count what the memory proposed as well as what the draft did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.drift import names
from benchmarks.drift.contest import LAST, Contest, Measure, compared, mean_with_interval
from benchmarks.drift.modelled import figures_of, seconds_of, step_times
from benchmarks.record import Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import ModelledStepTimes
from benchmarks.result import Figure, Lines, Result
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Schedule, returns, shifts

BY_ANYONE = "whoever proposed"
WINDOW = 48
"""Requests of a moving window, and of "first": right after a shift."""
TO_REACH = 0.9
"""Share of the ceiling's α that counts as having learnt."""
EVERY = 6
"""Requests between two points of a drawing."""


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures and drawings of every schedule."""
    timed = [row for row in rows if "step_s" in row]
    times = ModelledStepTimes.of(timed) if timed else None
    figures = step_times(times) if times else []
    drawings: list[Lines] = []
    for contest in contests(plan, [row for row in rows if "schedule" in row]):
        figures += figures_of(contest, times) if times else []
        figures += [
            *_overall(contest),
            *_windows(contest),
            *_recovery(contest, times),
            *_memory(contest),
        ]
        figures += [*_costs(contest), *_differences(contest)]
        drawings.append(_drawing(contest))
    return Result(protocol=plan, figures=tuple(figures), drawings=tuple(drawings))


def contests(plan: Protocol, rows: Sequence[Row]) -> Iterator[Contest]:
    """The rows by schedule and contender, in the protocol's order; OSD as the better of its
    published pairs."""
    for name, tree in plan.sizes["schedules"].items():
        mine = sorted((row for row in rows if row["schedule"] == name), key=lambda row: row["seed"])
        curves = {
            arm: [Curve.from_row(r) for r in mine if r["contender"] == arm] for arm in plan.arms
        }
        yield Contest(
            name=name, schedule=Schedule.model_validate(tree), curves=_with_better_osd(curves)
        )


def requests_to_reach(own: Curve, ceiling: Curve, start: int, stop: int) -> int | None:
    """Requests after `start` from which on `WINDOW` requests come to `TO_REACH` of the ceiling's α;
    None = never."""
    last = stop - WINDOW + 1
    reached = (
        own.moving_alpha(WINDOW)[start:last] >= TO_REACH * ceiling.moving_alpha(WINDOW)[start:last]
    )
    return int(np.argmax(reached)) if reached.any() else None


def _with_better_osd(curves: dict[str, list[Curve]]) -> dict[str, list[Curve]]:
    published = [name for name in names.OSD_PUBLISHED if curves.get(name)]
    if not published:
        return curves
    best = max(published, key=lambda name: np.mean([curve.alpha() for curve in curves[name]]))
    renamed = {
        f"{names.OSD} ({best.partition(', ')[2]})" if name == best else name: c
        for name, c in curves.items()
    }
    return {name: c for name, c in renamed.items() if name not in names.OSD_PUBLISHED}


def _overall(contest: Contest) -> list[Figure]:
    return [
        *compared(contest, "acceptance rate, all requests", Curve.rate),
        *compared(contest, f"α, {BY_ANYONE}, all requests", Curve.alpha),
        *compared(contest, "acceptance length, all requests", Curve.length),
        *compared(contest, "tokens per step of the target, all requests", Curve.tokens_per_step),
    ]


def _windows(contest: Contest) -> list[Figure]:
    figures: list[Figure] = []
    bounds = contest.schedule.bounds
    for phase, start, stop in zip(contest.schedule.phases, bounds, bounds[1:], strict=False):
        first, last = f"first {WINDOW} of {phase.name}", f"last {LAST} of {phase.name}"
        figures += compared(
            contest,
            f"α of the steps, {BY_ANYONE}, {first}",
            _over(Curve.alpha_of_steps, start, start + WINDOW),
        )
        figures += compared(
            contest,
            f"α of the steps, {BY_ANYONE}, {last}",
            _over(Curve.alpha_of_steps, stop - LAST, stop),
        )
        figures += compared(
            contest, f"tokens per step, {last}", _over(Curve.tokens_per_step, stop - LAST, stop)
        )
    return figures


def _over(measure: Callable[[Curve, int, int | None], float], start: int, stop: int) -> Measure:
    """The measure on one window."""
    return lambda curve: measure(curve, start, stop)


def _recovery(contest: Contest, times: ModelledStepTimes | None) -> list[Figure]:
    """How soon after each shift, in requests and in time, and what training had cost by then."""
    figures: list[Figure] = []
    ceilings = contest.curves.get(names.CEILING)
    if not ceilings:
        return figures
    bounds, phases = contest.schedule.bounds, contest.schedule.phases
    for number in shifts(contest.schedule, FAMILIES[contest.schedule.family]):
        start, stop, title = bounds[number], bounds[number + 1], phases[number].name
        requests = (
            f"{contest.name}: requests to {TO_REACH:.0%} of the ceiling after the shift to {title}"
        )
        seconds = f"{contest.name}: trainer's CPU by then, since the shift to {title}"
        clock = f"{contest.name}: modelled seconds of decoding by then, since the shift to {title}"
        for name, curves in contest.curves.items():
            if name == names.CEILING:
                continue
            found = [
                requests_to_reach(c, top, start, stop)
                for c, top in zip(curves, ceilings, strict=True)
            ]
            num_missed = found.count(None)
            label = name + (
                f" (never in {num_missed} of {len(found)}: counted as the phase)"
                if num_missed
                else ""
            )
            counted = [stop - start if one is None else one for one in found]
            figures.append(mean_with_interval(requests, label, counted))
            if times:
                waits = [
                    seconds_of(c, name, times)[start : start + n]
                    for c, n in zip(curves, counted, strict=True)
                ]
                figures.append(
                    mean_with_interval(clock, label, [float(some.sum()) for some in waits], "s")
                )
            if any(curve.num_rounds for curve in curves):
                spent = [
                    _cpu_between(c, start, start + n) for c, n in zip(curves, counted, strict=True)
                ]
                figures.append(mean_with_interval(seconds, label, spent, "s"))
    return sorted(figures, key=lambda figure: figure.group)


def _cpu_between(curve: Curve, start: int, stop: int) -> float:
    """CPU seconds of training from request `start` to request `stop`."""
    before = curve.cpu_s[start - 1] if start else 0.0
    return float(curve.cpu_s[stop - 1] - before) if stop > start else 0.0


def _memory(contest: Contest) -> list[Figure]:
    """α at once when traffic returns, over α when it left."""
    figures: list[Figure] = []
    bounds, phases = contest.schedule.bounds, contest.schedule.phases
    for earlier, later in returns(contest.schedule):
        left, back = bounds[earlier + 1], bounds[later]

        def kept(curve: Curve, left: int = left, back: int = back) -> float:
            before = curve.alpha_of_steps(left - WINDOW, left)
            return curve.alpha_of_steps(back, back + WINDOW) / before if before else 0.0

        title = (
            f"α kept of {phases[earlier].name}, {BY_ANYONE}: first {WINDOW} of "
            f"{phases[later].name} over its last {WINDOW}"
        )
        figures += compared(contest, title, kept)
    return figures


def _costs(contest: Contest) -> list[Figure]:
    figures = []
    for name, curves in contest.curves.items():
        if not any(curve.num_rounds for curve in curves):
            continue
        group = f"{contest.name}: training, {name}"
        counts: dict[str, tuple[Measure, str]] = {
            "CPU": (lambda c: float(c.cpu_s[-1]), "s"),
            "rounds": (lambda c: c.num_rounds, ""),
            "published": (lambda c: c.num_published, ""),
            "refused": (lambda c: c.num_rounds - c.num_published, ""),
        }
        figures += [
            mean_with_interval(group, title, [measure(c) for c in curves], unit)
            for title, (measure, unit) in counts.items()
        ]
    return figures


def _differences(contest: Contest) -> list[Figure]:
    """Ours against everybody, seed by seed: below 0 is a loss."""
    group = f"{contest.name}: α of the steps, {BY_ANYONE}, all requests: ours minus"
    figures = []
    ours = contest.curves.get(names.OURS, [])
    for name, curves in contest.curves.items():
        if ours and name != names.OURS:
            values = [
                a.alpha_of_steps() - b.alpha_of_steps() for a, b in zip(ours, curves, strict=True)
            ]
            figures.append(mean_with_interval(group, name, values))
    return figures


def _drawing(contest: Contest) -> Lines:
    lines = {}
    for name, curves in contest.curves.items():
        moving = np.mean([curve.moving_alpha(WINDOW) for curve in curves], axis=0)
        lines[name] = tuple(
            (float(at + WINDOW), float(moving[at])) for at in range(0, len(moving), EVERY)
        )
    turns = ", ".join(
        f"{phase.name} from {start}"
        for phase, start in zip(contest.schedule.phases, contest.schedule.bounds, strict=False)
    )
    return Lines(
        title=f"{contest.name}: {turns}",
        x_label="requests served",
        y_label=f"α of the steps, {BY_ANYONE}, last {WINDOW} requests",
        lines=lines,
    )
