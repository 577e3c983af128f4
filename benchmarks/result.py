"""The result of a bench: figures with their intervals, their goals, and what to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.record import INCONCLUSIVE, Goal, Protocol, Shape
from benchmarks.stats import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number, with its 95 % interval where it has one.

    Example:
        Figure(group="batch 8", name="tokens/s, on / off", value=0.99, low=0.98, high=1.0, n=40)
    """

    group: str
    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 1
    """Observations behind it."""

    @classmethod
    def of(cls, group: str, name: str, found: Estimate, unit: str = "") -> Figure:
        """With its interval, which a single observation has none of: resampled, it would seem to
        be certain."""
        low, high = (found.low, found.high) if found.n > 1 else (None, None)
        return cls(
            group=group, name=name, value=found.value, unit=unit, low=low, high=high, n=found.n
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A drawing: per label the single observations, their middle, and its interval, on one axis.

    `reference` is where a line is drawn (1 for ratios).
    """

    title: str
    unit: str
    rows: tuple[tuple[str, Estimate, tuple[float, ...]], ...]
    """(label, estimate, observations)"""
    reference: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """A drawing: one line per label."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, tuple[tuple[float, float], ...]]
    """label -> (x, y) points, x ascending"""


Drawing = Spread | Lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All a bench has to say. Everything in it follows from the protocol and the raw rows."""

    protocol: Protocol
    figures: tuple[Figure, ...]
    drawings: tuple[Drawing, ...] = ()

    def verdicts(self) -> list[tuple[Goal, Figure, bool]]:
        """Each goal with each figure it is about, and whether that meets it."""
        found = []
        for goal in self.protocol.goals:
            for figure in self.figures:
                number = getattr(figure, goal.bound)
                if figure.name == goal.figure and number is not None:
                    found.append((goal, figure, goal.is_met(number)))
        return found

    def unjudged(self) -> list[tuple[Goal, str]]:
        """Each goal that could not be held against a figure, and the group of that figure, "" where
        there is none at all: a bench that measured too little has not met its goals."""
        found = []
        for goal in self.protocol.goals:
            groups = [
                f.group
                for f in self.figures
                if f.name == goal.figure and getattr(f, goal.bound) is None
            ]
            is_missing = not any(f.name == goal.figure for f in self.figures)
            found += [(goal, group) for group in ([""] if is_missing else groups)]
        return found

    def seen(self) -> list[tuple[Shape, Figure, str]]:
        """Each shape with each figure it is about, and what that shows."""
        return [
            (shape, figure, shape.verdict(figure.low, figure.high))
            for shape in self.protocol.shapes
            for figure in self.figures
            if figure.name == shape.figure
        ]

    def unseen(self) -> list[Shape]:
        """Shapes that no figure is about: too little was measured to say anything of them."""
        names = {figure.name for figure in self.figures}
        return [shape for shape in self.protocol.shapes if shape.figure not in names]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: {"bench", "figures": [...], "goals": [...], "shapes": [...]}; "met" is None
        where nothing could be judged."""
        goals: list[dict[str, Any]] = [
            {"group": f.group, "figure": f.name, "goal": str(goal), "met": is_met}
            for goal, f, is_met in self.verdicts()
        ]
        goals += [
            {"group": group, "figure": goal.figure, "goal": str(goal), "met": None}
            for goal, group in self.unjudged()
        ]
        shapes = [
            {"group": f.group, "figure": f.name, "shape": shape.says, "verdict": verdict}
            for shape, f, verdict in self.seen()
        ]
        shapes += [
            {"group": "", "figure": s.figure, "shape": s.says, "verdict": INCONCLUSIVE}
            for s in self.unseen()
        ]
        return {
            "bench": self.protocol.bench,
            "figures": [asdict(f) for f in self.figures],
            "goals": goals,
            "shapes": shapes,
        }


def number(value: float) -> str:
    """Four significant digits, whole numbers whole, thousands told apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(result: Result) -> str:
    """The figures as text, a line each, under the name of their group."""
    verdicts: dict[tuple[str, str], list[str]] = {}
    for goal, figure, is_met in result.verdicts():
        said = f"{goal}: {'met' if is_met else 'MISSED'}"
        verdicts.setdefault((figure.group, figure.name), []).append(said)
    for shape, figure, verdict in result.seen():
        said = f"{shape.says}: {verdict}"
        verdicts.setdefault((figure.group, figure.name), []).append(said)
    lines: list[Sequence[str]] = [("", "value", "95 % interval", "n", "goal")]
    group = None
    for figure in result.figures:
        if figure.group != group:
            group = figure.group
            lines.append((group, "", "", "", ""))
        goals = "; ".join(verdicts.get((figure.group, figure.name), ()))
        lines.append(_line(figure, goals))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    unjudged = [
        f"not judged: {group + ', ' if group else ''}{g.figure} {g}"
        for g, group in result.unjudged()
    ]
    unjudged += [f"not judged: {shape.says}" for shape in result.unseen()]
    return "\n".join([_aligned(line, widths).rstrip() for line in lines] + unjudged)


def _line(figure: Figure, goals: str) -> tuple[str, ...]:
    interval = ""
    if figure.low is not None and figure.high is not None:
        interval = f"{number(figure.low)} to {number(figure.high)}"
    return (
        f"  {figure.name}",
        f"{number(figure.value)} {figure.unit}".rstrip(),
        interval,
        str(figure.n),
        goals,
    )


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    name, *others = (f"{text:<{width}}" for text, width in zip(line, widths, strict=True))
    return "  ".join([name, *others])
