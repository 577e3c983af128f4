"""Figures of `osd bench fleet`, per number of replicas, and what follows for more requests.

A trace's cost is what spans with traces alone take beyond those with nothing but the controller,
over the traces they stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.record import Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import estimate, quantile

QUIET, REST, TRACES = "without traces", "nothing", "traces alone"
FAN_OUT, HISTORY = "fan-out", "with history"
ARMS = (QUIET, REST, TRACES, FAN_OUT, HISTORY)

REDIS, WIRE = "Redis without traces", "into Redis without traces"
CONTROLLER, CONTROLLER_LATER = "controller", "controller, with history"
LOOK, LOOK_LATER = "a look", "a look, with history"
MEDIAN, LAST = "fan-out, median replica", "fan-out, last replica of the slowest"
RECORDS, HOLDS = "records of the feed a second", "the feed holds"
FEED_MEMORY = "memory of a full feed"
HISTORY_MEMORY = "controller's memory for its history"
POLLS, HEARTBEATS = "polls a second and replica", "heartbeats a second and replica"
TRACE_CPU, TRACE_MAIN_CPU = "Redis CPU per trace", "its main thread's CPU per trace"
TRACE_WIRE, TRACE_MEMORY = "bytes per trace on the wire", "bytes per trace in memory"
MORE_CORES, MORE_MAIN = "extrapolated: Redis for traces", "extrapolated: its main thread"
MORE_BYTES = "extrapolated: traces into Redis"
MORE_HELD = "extrapolated: time that the default memory holds"
HALF_A_CORE = "extrapolated: traces/s that take half a core of the main thread"
FRACTION = "extrapolated: capture.request_fraction for that"


def title(num_replicas: int) -> str:
    return f"{num_replicas} replicas"


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures from the spans; the largest fleet's traces are extrapolated from."""
    figures, spread = list[Figure](), []
    for group in dict.fromkeys(row["group"] for row in rows):
        arms = {arm: [r for r in rows if (r["group"], r["arm"]) == (group, arm)] for arm in ARMS}
        redis = _shares(arms[QUIET], "redis_cpu_s")
        figures += [
            Figure.of(group, REDIS, estimate(redis), "cores"),
            Figure(group=group, name=WIRE, value=_rate(arms[QUIET], "bytes_in") / 1e6, unit="MB/s"),
            *_controller(group, CONTROLLER, LOOK, arms[QUIET]),
            *_controller(group, CONTROLLER_LATER, LOOK_LATER, arms[HISTORY]),
            *_memory(group, arms[HISTORY]),
            *_pace(group, arms[QUIET]),
            *_fan_out(group, arms[FAN_OUT]),
            *_feed(group, arms[QUIET], plan),
            *_traces(group, arms[REST], arms[TRACES]),
        ]
        spread.append((f"{group}, Redis", estimate(redis), tuple(redis)))
        for name, arm in ((CONTROLLER, QUIET), (CONTROLLER_LATER, HISTORY)):
            shares = _shares(arms[arm], "controller_cpu_s")
            spread.append((f"{group}, {name}", estimate(shares), tuple(shares)))
    figures += _extrapolated(figures, plan)
    drawing = Spread(title="CPU without traces", unit="cores", rows=tuple(spread), reference=0.5)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def _shares(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] / row["seconds"] for row in rows]


def _controller(group: str, name: str, look: str, rows: Sequence[Row]) -> list[Figure]:
    """Its share of a core, and the time of its looks. A span in which no look ended counts as one
    look of that length."""
    looks = [1000 * seconds for row in rows for seconds in row["look_seconds"] or [row["seconds"]]]
    p95 = quantile(looks, 0.95)
    return [
        Figure.of(group, name, estimate(_shares(rows, "controller_cpu_s")), "cores"),
        Figure.of(group, f"{look}, median", estimate(looks), "ms"),
        Figure(group=group, name=f"{look}, p95", value=p95, unit="ms", n=len(looks)),
    ]


def _memory(group: str, rows: Sequence[Row]) -> list[Figure]:
    value = rows[0]["history_bytes"] / 1e6
    return [Figure(group=group, name=HISTORY_MEMORY, value=value, unit="MB")]


def _pace(group: str, rows: Sequence[Row]) -> list[Figure]:
    """Whether the simulated replicas kept the product's pace."""
    return [
        Figure(group=group, name=name, value=_rate(rows, counted) / rows[0]["num_replicas"])
        for name, counted in ((POLLS, "num_polls"), (HEARTBEATS, "num_heartbeats"))
    ]


def _rate(rows: Sequence[Row], name: str) -> float:
    return float(sum(row[name] for row in rows) / sum(row["seconds"] for row in rows))


def _fan_out(group: str, rows: Sequence[Row]) -> list[Figure]:
    """Of the changes, the middle one's middle replica, and the last replica that any one had."""
    medians = [quantile(row["seconds"], 0.5) for row in rows]
    last = max(row["seconds"][-1] for row in rows)
    return [
        Figure.of(group, MEDIAN, estimate(medians), "s"),
        Figure(group=group, name=LAST, value=last, unit="s", n=len(rows)),
    ]


def _feed(group: str, rows: Sequence[Row], plan: Protocol) -> list[Figure]:
    """How long its newest records reach back, and what it takes when it is full."""
    per_second, length = _rate(rows, "num_records"), plan.sizes["feed_length"]
    stored = rows[-1]["stored"]
    memory = length * stored["feed_bytes"] / stored["feed_records"] / 1e6
    return [
        Figure(group=group, name=RECORDS, value=per_second),
        Figure(group=group, name=HOLDS, value=length / per_second, unit="s"),
        Figure(group=group, name=FEED_MEMORY, value=memory, unit="MB"),
    ]


def _traces(group: str, rest: Sequence[Row], loud: Sequence[Row]) -> list[Figure]:
    def beyond(name: str) -> Any:
        """Of each span with traces: what it took beyond the mean of those at rest, per trace."""
        usual = fmean(_shares(rest, name))
        return estimate([(row[name] - usual * row["seconds"]) / row["num_traces"] for row in loud])

    def micro(name: str, counted: str) -> Figure:
        found = beyond(counted)
        return Figure(
            group=group,
            name=name,
            value=1e6 * found.value,
            low=1e6 * found.low,
            high=1e6 * found.high,
            unit="µs",
            n=found.n,
        )

    stored = loud[-1]["stored"]
    memory = stored["traces_bytes"] / stored["traces_stored"]
    return [
        micro(TRACE_CPU, "redis_cpu_s"),
        micro(TRACE_MAIN_CPU, "redis_main_cpu_s"),
        Figure.of(group, TRACE_WIRE, beyond("bytes_in"), "B"),
        Figure(group=group, name=TRACE_MEMORY, value=memory, unit="B"),
    ]


def _extrapolated(figures: Sequence[Figure], plan: Protocol) -> list[Figure]:
    """What the traces of more requests would take, if each costs what it costs the largest fleet
    measured: not measured itself."""
    num = plan.sizes["extrapolated_traces_per_second"]
    of = {figure.name: figure.value for figure in figures}  # the largest fleet's come last
    per_second = 0.5e6 / of[TRACE_MAIN_CPU]
    held = plan.sizes["max_memory"] / of[TRACE_MEMORY] / num
    found = (
        (MORE_CORES, num * of[TRACE_CPU] / 1e6, "cores"),
        (MORE_MAIN, num * of[TRACE_MAIN_CPU] / 1e6, "cores"),
        (MORE_BYTES, num * of[TRACE_WIRE] / 1e6, "MB/s"),
        (MORE_HELD, held, "s"),
        (HALF_A_CORE, per_second, ""),
        (FRACTION, min(1.0, per_second / num), ""),
    )
    group = f"{num:,} requests/s"
    return [Figure(group=group, name=name, value=v, unit=unit) for name, v, unit in found]
