"""Figures of `osd bench trees` from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.record import Protocol, Row
from benchmarks.result import Figure, Lines, Result
from benchmarks.stats import Estimate, estimate, estimate_mean, median_ratio
from benchmarks.trees import trees
from benchmarks.trees.prices import (
    MAX_BATCH,
    NONE,
    AnyPrice,
    Price,
    Published,
    Widths,
    overtaken,
    speed,
)
from serving.trees.expand import text

MEASURED, PUBLISHED = "as measured here", "published (8 B, H100; modelled)"
MODELLED_BATCHES = (1, 4, 16, 64)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """All figures, and tokens per step by width as a drawing."""
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    prices: dict[str, AnyPrice] = {
        MEASURED: Price.fitted(_medians(by_kind["times"])),
        PUBLISHED: Published(),
    }
    figures = [
        *_successes(by_kind["success"]),
        *_tokens(plan, by_kind["steps"]),
        *_gains(by_kind["steps"]),
        *_times(by_kind["times"]),
        *_timed_speeds(by_kind["times"], by_kind["steps"]),
        *_speeds(prices, by_kind["steps"]),
        *_by_shape(plan, prices, by_kind["steps"]),
        *_costs(by_kind["costs"]),
    ]
    return Result(protocol=plan, figures=tuple(figures), drawings=(_drawing(by_kind["success"]),))


KINDS = ("success", "steps", "times", "costs")


def _case(row: Row) -> str:
    return f"{row['draft']} draft, T = {row['temperature']:g}"


def _successes(rows: Sequence[Row]) -> Iterator[Figure]:
    """Each rule's, and multi-step over naive sampling of the same draws."""
    found = {(_case(row), row["rule"], row["k"]): row["success"] for row in rows}
    for (case, rule, k), success in found.items():
        yield Figure.of(f"success: {case}", f"{rule}, k = {k}", estimate_mean(success))
    for (case, rule, k), success in found.items():
        if rule == trees.MULTI_STEP:
            gain = ratio_of_means(success, found[case, trees.NAIVE, k])
            yield Figure.of(f"success: {case}, k = {k}", trees.GAIN, gain)


def counted(rows: Sequence[Row]) -> dict[str, dict[Widths, list[float]]]:
    """Case -> widths -> tokens per step of each request; without the runs of `_gains`."""
    found: dict[str, dict[Widths, list[float]]] = {}
    for row in rows:
        if not row["rule"]:
            found.setdefault(_case(row), {})[tuple(row["widths"])] = row["tokens_per_step"]
    return found


def _brought(by_widths: dict[Widths, list[float]]) -> dict[Widths, float]:
    """Widths -> mean tokens per step; no speculation brings one."""
    return {widths: float(np.mean(values)) for widths, values in by_widths.items()} | {NONE: 1.0}


def _tokens(plan: Protocol, rows: Sequence[Row]) -> Iterator[Figure]:
    for case, by_widths in counted(rows).items():
        for widths, values in by_widths.items():
            yield Figure.of(f"tokens per step: {case}", text(widths), estimate_mean(values))
        for depth in plan.sizes["depths"]:
            wide, narrow = (by_widths[(width,) + (1,) * (depth - 1)] for width in (5, 1))
            gained = estimate_mean(np.subtract(wide, narrow))
            yield Figure.of(f"tokens per step: {case}, depth {depth}", trees.WIDER, gained)


def _gains(rows: Sequence[Row]) -> Iterator[Figure]:
    """Multi-step over naive sampling as it came out, each with chance of its own."""
    by_rule: dict[str, dict[tuple[str, str], list[float]]] = {"multi-step": {}, "naive": {}}
    for row in rows:
        if row["rule"]:
            key = (_case(row), text(row["widths"]))
            by_rule[row["rule"]][key] = row["accepted_per_step"]
    for (case, widths), ours in by_rule["multi-step"].items():
        naive = by_rule["naive"][case, widths]
        title = f"multi-step / naive, {widths}"
        yield Figure.of(f"accepted per step, drawn: {case}", title, ratio_of_means(ours, naive))


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """With the interval of resampled pairs."""
    pairs = np.stack([above, below], axis=-1)
    rng = np.random.default_rng(0)
    chosen = pairs[rng.integers(0, len(pairs), (4000, len(pairs)))].mean(1)
    low, high = np.quantile(chosen[:, 0] / chosen[:, 1], (0.025, 0.975))
    value = pairs[:, 0].mean() / pairs[:, 1].mean()
    return Estimate(value=float(value), low=float(low), high=float(high), n=len(pairs))


def _grouped(rows: Sequence[Row]) -> dict[tuple[int, Widths], list[Row]]:
    found: dict[tuple[int, Widths], list[Row]] = {}
    for row in rows:
        found.setdefault((row["batch"], tuple(row["widths"])), []).append(row)
    return found


def _medians(rows: Sequence[Row]) -> list[Row]:
    """One row for each batch and arm."""
    return [
        {"batch": batch, "widths": widths}
        | {name: float(np.median([r[name] for r in group])) for name in ("target_s", "draft_s")}
        for (batch, widths), group in _grouped(rows).items()
    ]


def _name(widths: Widths) -> str:
    return text(widths) if widths else "no speculation"


def _times(rows: Sequence[Row]) -> Iterator[Figure]:
    for (batch, widths), group in _grouped(rows).items():
        for name in ("step_s", "target_s", "draft_s"):
            found = estimate([1000 * row[name] for row in group])
            title = f"{_name(widths)}: {name.removesuffix('_s')}"
            yield Figure.of(f"time of a step here, batch {batch}", title, found, "ms")


def _timed_speeds(times: Sequence[Row], steps: Sequence[Row]) -> Iterator[Figure]:
    """At the batches that were timed: pairs of repeats, times the mean tokens per step."""
    seconds = {key: [r["step_s"] for r in group] for key, group in _grouped(times).items()}
    for case, by_widths in counted(steps).items():
        brought = _brought(by_widths)
        for batch in sorted({batch for batch, _ in seconds}):
            for widths, base in PAIRS:
                speeds = [[brought[w] / s for s in seconds[batch, w]] for w in (widths, base)]
                title = f"{text(widths)} / {_name(base)}, batch {batch}"
                group = f"speed, timed here: {case}"
                yield Figure.of(group, title, median_ratio(*speeds))


def _speeds(prices: dict[str, AnyPrice], rows: Sequence[Row]) -> Iterator[Figure]:
    """Speed at the published price, and where the chain overtakes at either."""
    for case, by_widths in counted(rows).items():
        brought = _brought(by_widths)
        group = f"speed, {PUBLISHED}: {case}"
        for batch in MODELLED_BATCHES:
            for widths, base in PAIRS:
                speeds = [speed(prices[PUBLISHED], w, batch, brought[w]) for w in (widths, base)]
                title = f"{text(widths)} / {_name(base)}, batch {batch}"
                yield Figure(group=group, name=title, value=speeds[0] / speeds[1])
        for which, price in prices.items():
            for widths in TREES:
                chain = trees.CHAIN
                at = overtaken(price, widths, brought[widths], chain, brought[chain])
                title = f"{text(widths)}: {BEYOND if at == MAX_BATCH else OVERTAKEN}"
                yield Figure(group=f"{which}: {case}", name=title, value=at)


TREES = (trees.SIX, trees.TWENTY_ONE)
PAIRS = (
    *((widths, NONE) for widths in trees.SHAPES),
    *((widths, trees.CHAIN) for widths in TREES),
)
OVERTAKEN = "the chain is as fast from batch"
BEYOND = "ahead of the chain at every batch below"


def _by_shape(plan: Protocol, prices: dict[str, AnyPrice], rows: Sequence[Row]) -> Iterator[Figure]:
    """Modelled speed over no speculation at batch 1, by width and depth."""
    for case, by_widths in counted(rows).items():
        for which, price in prices.items():
            for widths in trees.grid(plan):
                base = speed(price, NONE, 1, 1.0)
                value = speed(price, widths, 1, float(np.mean(by_widths[widths]))) / base
                group = f"speed over none, batch 1, {which}: {case}"
                yield Figure(group=group, name=text(widths), value=value)


UNITS = {
    "weights of the drafts": (1e9, "GB"),
    "context of the drafts": (1e6, "MB"),
    "trees in the target's KV": (1e6, "MB"),
    "FLOPs over no speculation": (1, ""),
}
"""Name -> what its number is divided by, and the unit then."""


def _costs(rows: Sequence[Row]) -> Iterator[Figure]:
    for row in rows:
        group = f"8 B target, {row['pool']} draft(s) of 1 B, {text(row['widths'])}, batch 4"
        for name, value in row["costs"].items():
            size, unit = UNITS.get(name, (1e9, "GFLOP"))
            yield Figure(group=group, name=name, value=value / size, unit=unit)


def _drawing(rows: Sequence[Row]) -> Lines:
    """Success by the number of children."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = f"{_case(row)}, {row['rule']}"
        lines.setdefault(label, []).append((row["k"], float(np.mean(row["success"]))))
    return Lines(
        title="a child is accepted",
        x_label="children of a node",
        y_label="share of positions",
        lines={label: tuple(points) for label, points in lines.items()},
    )
