"""All runs over one schedule of the drift benchmark, and the figures that compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replays.curve import Curve
from benchmarks.result import Figure
from benchmarks.traffic.schedule import Schedule

LAST = 96
"""Requests of "last": what has settled at the end of a phase."""
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 0.975 for 1 to 9 degrees of freedom."""

Measure = Callable[[Curve], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """All runs over one schedule."""

    name: str
    schedule: Schedule
    curves: dict[str, list[Curve]]
    """Contender -> a curve for each seed, in the same order for all."""


def mean_with_interval(group: str, name: str, values: Sequence[float], unit: str = "") -> Figure:
    """Mean over seeds; no interval from a single one."""
    mean, num = float(np.mean(values)), len(values)
    if num == 1:
        return Figure(group=group, name=name, value=mean, unit=unit)
    half = T_QUANTILES[num - 2] * float(np.std(values, ddof=1)) / num**0.5
    return Figure(
        group=group, name=name, value=mean, unit=unit, low=mean - half, high=mean + half, n=num
    )


def compared(contest: Contest, title: str, measure: Measure, unit: str = "") -> list[Figure]:
    """One number for each contender."""
    group = f"{contest.name}: {title}"
    return [
        mean_with_interval(group, name, [measure(c) for c in curves], unit)
        for name, curves in contest.curves.items()
    ]
