"""What the benchmark of heads says: its figures from raw rows, means over traffic seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.drift import names
from benchmarks.drift.contest import mean_with_interval
from benchmarks.drift.report import TO_REACH, requests_to_reach
from benchmarks.heads.jobs import LEARNING, TIMELESS
from benchmarks.learning.online_report import MEASURED, PUBLISHED
from benchmarks.record import Protocol, Row
from benchmarks.replays.curve import Curve
from benchmarks.replays.step_times import ModelledStepTimes, published
from benchmarks.result import Figure, Result
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Schedule, shifts

WITHOUT = "learning over frozen, without the memory: decode speed, last third off home"
WITH = "learning over frozen, with the memory: decode speed, last third off home"
OF_OFFLINE = "α of the learning draft over that trained offline, last third off home"
HOME_KEPT = "home kept: α on unserved home requests, last draft over first"
TWO_BY_TWO = {
    WITHOUT: (names.LEARNING_DRAFT_LOOP, names.DRAFT_LOOP),
    WITH: (names.SERVED, names.FROZEN_LOOP),
}


@dataclass(frozen=True, slots=True)
class Side:
    """All runs of a schedule with one kind of draft, at one price."""

    title: str
    schedule: Schedule
    rows: dict[str, list[Row]]
    """arm -> a row for each seed"""
    times: ModelledStepTimes

    @property
    def curves(self) -> dict[str, list[Curve]]:
        return {arm: [Curve.from_row(row) for row in rows] for arm, rows in self.rows.items()}

    def speed(self, curve: Curve, start: int, stop: int) -> float:
        """Tokens per second of decoding over those without speculation."""
        seconds = self.times.seconds(curve, has_draft_model=True)[start:stop].sum()
        tokens = curve.total("tokens", start, stop)
        return float(tokens / seconds / self.times.tokens_per_second_without())


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures of every schedule, draft and price."""
    figures = [figure for side in sides(plan, rows) for figure in _of_side(side)]
    return Result(protocol=plan, figures=tuple(figures))


def sides(plan: Protocol, rows: Sequence[Row]) -> Iterator[Side]:
    """The rows by schedule, draft and price; arms that did not run are left out."""
    timed = [row for row in rows if "step_s" in row]
    times = {PUBLISHED: published(), **({MEASURED: ModelledStepTimes.of(timed)} if timed else {})}
    for name, tree in plan.sizes["schedules"].items():
        for family in plan.sizes["families"][name]:
            for price in plan.sizes["prices"]:
                found = {
                    arm: [r for r in rows if _is_of(r, name, family, arm, price)]
                    for arm in plan.arms
                }
                yield Side(
                    f"{name}, {family}, price {price}",
                    Schedule.model_validate(tree | {"family": family}),
                    {arm: some for arm, some in found.items() if some},
                    times[price],
                )


def _is_of(row: Row, name: str, family: str, arm: str, price: str) -> bool:
    asked = PUBLISHED if arm in TIMELESS else price
    wanted = {"schedule": name, "family": family, "contender": arm, "price": asked}
    return wanted.items() <= row.items()


def _of_side(side: Side) -> Iterator[Figure]:
    yield from _tables(side)
    yield from _costs(side)
    for number in shifts(side.schedule, FAMILIES[side.schedule.family]):
        if side.schedule.phases[number].mix.keys() != {_home(side)}:
            yield from _compared(side, number)
    group = f"{side.title}: compared"
    for arm in (arm for arm in LEARNING if arm in side.rows):
        kept = [row["home"][1] / row["home"][0] for row in side.rows[arm]]
        yield mean_with_interval(f"{group}, {arm}", HOME_KEPT, kept)


def _tables(side: Side) -> Iterator[Figure]:
    bounds = side.schedule.bounds
    for number, phase in enumerate(side.schedule.phases):
        start, (third, stop) = bounds[number], side.schedule.last_third(number)
        for title, first in ((phase.name, start), (f"last third of {phase.name}", third)):
            for what, of in (
                ("α", Curve.alpha),
                ("tokens per step", Curve.tokens_per_step),
                ("decode speed over none", side.speed),
            ):
                for arm, curves in side.curves.items():
                    values = [of(curve, first, stop) for curve in curves]
                    yield mean_with_interval(f"{side.title}: {what}, {title}", arm, values)


def _costs(side: Side) -> Iterator[Figure]:
    for arm, curves in side.curves.items():
        if arm not in LEARNING:
            continue
        group = f"{side.title}: training, {arm}"
        cpu = [float(curve.cpu_s[-1]) for curve in curves]
        yield mean_with_interval(group, "CPU", cpu, "s")
        features = [float(curve.notes["features_cpu_s"]) for curve in curves]
        yield mean_with_interval(group, "of it the target's features", features, "s")
        yield mean_with_interval(group, "rounds", [curve.num_rounds for curve in curves])
        yield mean_with_interval(group, "published", [curve.num_published for curve in curves])


def _compared(side: Side, number: int) -> Iterator[Figure]:
    """Of a phase off home."""
    start, (third, stop) = side.schedule.bounds[number], side.schedule.last_third(number)
    group, curves = f"{side.title}: compared", side.curves
    for figure, (learning, frozen) in TWO_BY_TWO.items():
        if {learning, frozen} <= curves.keys():
            pairs = zip(curves[learning], curves[frozen], strict=True)
            ratios = [side.speed(a, third, stop) / side.speed(b, third, stop) for a, b in pairs]
            yield mean_with_interval(group, figure, ratios)
    if not {names.OURS, names.CEILING} <= curves.keys():
        return
    tops = curves[names.CEILING]
    pairs = zip(curves[names.OURS], tops, strict=True)
    ratios = [a.alpha(third, stop) / b.alpha(third, stop) for a, b in pairs]
    yield mean_with_interval(group, OF_OFFLINE, ratios)
    group = f"{side.title}: requests to {TO_REACH:.0%} of the α trained offline"
    for arm in (arm for arm in (names.OURS, names.LEARNING_DRAFT_LOOP) if arm in curves):
        pairs = zip(curves[arm], tops, strict=True)
        found = [requests_to_reach(own, top, start, stop) for own, top in pairs]
        missed = f" (never in {n}: counted as the phase)" if (n := found.count(None)) else ""
        counted = [stop - start if one is None else one for one in found]
        yield mean_with_interval(group, arm + missed, counted)


def _home(side: Side) -> str:
    return FAMILIES[side.schedule.family].home()
