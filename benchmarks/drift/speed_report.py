"""The figures of `osd bench drift_speed` from its raw rows: medians of ratios of neighbouring
chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.record import Protocol, Row
from benchmarks.result import Figure, Lines, Result, Spread
from benchmarks.stats import Estimate, median_ratio, quantile
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Schedule

CONTENDER, REFERENCE, NO_SPECULATION = "contender", "reference", "no speculation"
STRETCH = 4
"""Chunks of a stretch within a phase, the last of which tells what has settled."""
Part = Callable[[Row], float]


def acceptance_of(judged: Sequence[Row]) -> float | None:
    """Draft tokens accepted over tested; None where none was tested."""
    tested = sum(part.get("tested", 0) for part in judged)
    return sum(part.get("accepted", 0) for part in judged) / tested if tested else None


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures per schedule and part of it."""
    figures: list[Figure] = []
    drawings: list[Spread | Lines] = []
    for name, tree in plan.sizes["schedules"].items():
        schedule = Schedule.model_validate(tree)
        against = plan.sizes["against"][name] or NO_SPECULATION
        mine = {arm: _newest(rows, name, arm) for arm in plan.arms}
        mine = {arm: own for arm, own in mine.items() if own}
        if not mine:
            continue
        for title, start, stop in _windows(schedule, plan.sizes["chunk"][name]):
            within = {
                arm: [r for r in own if start <= r["start"] < stop] for arm, own in mine.items()
            }
            within = {arm: own for arm, own in within.items() if own}
            figures += _figures(f"{name}: {title}", within, against) if within else []
        is_greedy = not FAMILIES[schedule.family].temperature
        figures += _checks(name, mine, is_greedy=is_greedy)
        drawings += [_spread(name, mine, against), _lines(name, mine, against)]
    return Result(protocol=plan, figures=tuple(figures), drawings=tuple(drawings))


def _newest(rows: Sequence[Row], name: str, arm: str) -> list[Row]:
    """The chunks of an arm. One that was cut off has begun anew: the newest row of each counts."""
    found = {r["start"]: r for r in rows if (r["schedule"], r["arm"]) == (name, arm)}
    return [found[start] for start in sorted(found)]


def _windows(schedule: Schedule, chunk: int) -> list[tuple[str, int, int]]:
    """(title, first request, end). The chunk a shift falls into counts where it begins."""
    found = [("all requests", 0, schedule.num_requests)]
    bounds = schedule.bounds
    for phase, start, stop in zip(schedule.phases, bounds, bounds[1:], strict=False):
        found.append((phase.name, start, stop))
        last = stop - STRETCH * chunk
        for first in range(start, last, STRETCH * chunk):
            end = min(first + STRETCH * chunk, last)
            title = f"{first - start + 1} to {end - start} of {phase.name}"
            found.append((title, first, end))
        if last > start:
            found.append((f"last {STRETCH * chunk} of {phase.name}", last, stop))
    return found


def _num_tokens(part: Row) -> int:
    return sum(request["tokens"] for request in part["requests"])


def _charged(*parts: Row) -> float:
    """Tokens per second, training after the last answers included."""
    seconds = sum(part["seconds"] + part["charged_s"] for part in parts)
    return sum(map(_num_tokens, parts)) / seconds


def _alone(*parts: Row) -> float:
    """Tokens per second from the first request to the last answer of each chunk."""
    return sum(map(_num_tokens, parts)) / sum(part["seconds"] for part in parts)


def _per_cpu(*parts: Row) -> float:
    """Tokens per CPU second of all processes."""
    return sum(map(_num_tokens, parts)) / sum(part["cpu_s"] for part in parts)


def _tpot(part: Row) -> float:
    """Median of the chunk's requests."""
    return median(_tpots(part))


def _tpots(part: Row) -> list[float]:
    return [
        (r["seconds"] - r["ttft_s"]) / (r["tokens"] - 1)
        for r in part["requests"]
        if r["tokens"] > 1
    ]


def _latencies(part: Row) -> list[float]:
    return [r["seconds"] for r in part["requests"]]


def _latency(part: Row) -> float:
    return median(_latencies(part))


SPEEDS: dict[str, Callable[..., float]] = {
    "tokens/s": _charged,
    "tokens/s, traffic alone": _alone,
    "tokens per CPU second": _per_cpu,
}
"""Of one chunk, or of several together."""
RATIOS: dict[str, Part] = {**SPEEDS, "TPOT": _tpot, "request latency": _latency}


def _ratio(rows: Sequence[Row], part: Part) -> Estimate:
    return median_ratio([part(r[CONTENDER]) for r in rows], [part(r[REFERENCE]) for r in rows])


def _compared(group: str, name: str, rows: Sequence[Row], part: Part) -> Figure:
    """The ratio; without an interval where there is but one chunk."""
    found = _ratio(rows, part)
    return (
        Figure.of(group, name, found)
        if found.n > 1
        else Figure(group=group, name=name, value=found.value)
    )


def _figures(group: str, within: dict[str, list[Row]], against: str) -> list[Figure]:
    figures = []
    for title, part in RATIOS.items():
        figures += [
            _compared(group, f"{title}, {arm} / {against}", own, part)
            for arm, own in within.items()
        ]
    for title, speed in SPEEDS.items():
        figures += [
            Figure(
                group=group,
                name=f"{title}, all tokens over all time, {arm} / {against}",
                value=speed(*(r[CONTENDER] for r in own)) / speed(*(r[REFERENCE] for r in own)),
                n=len(own),
            )
            for arm, own in within.items()
        ]
    for arm, own in within.items():
        # Rows of before it was noted have none.
        acceptance = acceptance_of([row.get("judged", {}) for row in own])
        if acceptance is not None:
            figures.append(Figure(group=group, name=f"acceptance, {arm}", value=acceptance))
        figures += _absolute(group, arm, own, CONTENDER)
    # The reference ran beside every contender: all its chunks together.
    return figures + _absolute(
        group, against, [r for own in within.values() for r in own], REFERENCE
    )


def _absolute(group: str, arm: str, rows: Sequence[Row], who: str) -> list[Figure]:
    parts = [row[who] for row in rows]
    figures = [
        Figure(group=group, name=f"{title}, {arm}", value=speed(*parts), unit="/s", n=len(parts))
        for title, speed in (("tokens/s", _charged), ("tokens per CPU second", _per_cpu))
    ]
    for title, values in (
        ("TPOT", [1e3 * v for part in parts for v in _tpots(part)]),
        ("request latency", [1e3 * v for part in parts for v in _latencies(part)]),
    ):
        for label, q in (("p50", 0.5), ("p99", 0.99)):
            value = quantile(values, q)
            figures.append(
                Figure(
                    group=group,
                    name=f"{title} {label}, {arm}",
                    value=value,
                    unit="ms",
                    n=len(values),
                )
            )
    return figures


def _checks(name: str, mine: dict[str, list[Row]], *, is_greedy: bool) -> list[Figure]:
    """Whether both did the same work, what was charged, and what became of training. Answers that
    are drawn are not compared."""
    figures, group = [], f"{name}: checks"
    for arm, own in mine.items():
        pairs = [
            p
            for row in own
            for p in zip(row[CONTENDER]["requests"], row[REFERENCE]["requests"], strict=True)
        ]
        num_different = sum(a["hash"] != b["hash"] for a, b in pairs)
        differ = f"answers that differ, {arm}"
        if is_greedy:
            figures.append(Figure(group=group, name=differ, value=num_different, n=len(pairs)))
        charged = sum(row[CONTENDER]["charged_s"] for row in own)
        figures.append(
            Figure(group=group, name=f"charged, {arm}", value=charged, unit="s", n=len(own))
        )
        for key, value in own[-1]["facts"].items():
            figures.append(Figure(group=group, name=f"{key}, {arm}", value=value))
    return figures


def _spread(name: str, mine: dict[str, list[Row]], against: str) -> Spread:
    rows = []
    for arm, own in mine.items():
        observed = tuple(_charged(r[CONTENDER]) / _charged(r[REFERENCE]) for r in own)
        rows.append((arm, _ratio(own, _charged), observed))
    return Spread(
        title=f"{name}: tokens/s over {against}", unit="ratio", rows=tuple(rows), reference=1.0
    )


def _lines(name: str, mine: dict[str, list[Row]], against: str) -> Lines:
    lines = {
        arm: tuple(
            (float(r["start"]), _charged(r[CONTENDER]) / _charged(r[REFERENCE])) for r in own
        )
        for arm, own in mine.items()
    }
    return Lines(
        title=f"{name}: as the traffic changes",
        x_label="requests served",
        y_label=f"tokens/s over {against}",
        lines=lines,
    )
