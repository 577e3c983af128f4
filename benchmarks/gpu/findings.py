"""What a check finds: figures, some held to a bound, written down as soon as they are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PASSED, FAILED = "passed", "failed"
NOT_RUN, NOT_MEASURED = "not run", "not measured: no GPU"

Value = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of a check.

    Example:
        Figure(name="hook errors", value=0, goal="= 0", is_met=True)
    """

    name: str
    value: Value
    """None where it was not measured."""
    unit: str = ""
    is_of_gpu: bool = False
    """Whether a CPU cannot show it."""
    is_key: bool = False
    """Whether it stands in the table at the beginning of the report."""
    goal: str = ""
    is_met: bool | None = None
    """None where there is no goal, or nothing to hold against it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One check after its process has ended. `verdict` is one of the four words of this module."""

    check: str
    verdict: str
    reason: str = ""
    """Why it failed or was not run; for what was not measured, what was done all the same."""
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    details: tuple[str, ...] = ()
    log_tail: str = ""

    def __str__(self) -> str:
        """The verdict with its reason."""
        if not self.reason:
            return self.verdict
        is_remark = self.verdict == NOT_MEASURED
        return f"{self.verdict} ({self.reason})" if is_remark else f"{self.verdict}: {self.reason}"


class Findings:
    """The lines of one check, appended to a file one by one: what a crash or a hang cuts off keeps
    what was found before it."""

    def __init__(self, path: Path, *, has_gpu: bool) -> None:
        self._path, self._has_gpu = path, has_gpu
        path.write_text("")

    def fact(self, name: str, value: Value, unit: str = "", **how: Any) -> None:
        """What holds on any device: counts, identities, acceptance. `how`: a goal (`equals`,
        `at_least`, `at_most`), and `is_key`."""
        self._add_figure(name, value, unit, is_of_gpu=False, **how)

    def of_gpu(self, name: str, value: Value, unit: str = "", **how: Any) -> None:
        """What only a GPU shows: times, memory, graphs, syncs. Without one the value is dropped.
        `how` as in `fact`."""
        kept = value if self._has_gpu else None
        self._add_figure(name, kept, unit, is_of_gpu=True, **how)

    def detail(self, text: str) -> None:
        """A line for the details below the table."""
        self._add("detail", text)

    def error(self, text: str) -> None:
        """Why the check could not go on."""
        self._add("error", text)

    def done(self) -> None:
        """The check came to its end."""
        self._add("done", True)

    def _add_figure(
        self,
        name: str,
        value: Value,
        unit: str,
        *,
        is_of_gpu: bool,
        is_key: bool = False,
        equals: Value = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        goal, is_met = _judge(value, equals, at_least, at_most)
        figure = Figure(
            name=name,
            value=value,
            unit=unit,
            is_of_gpu=is_of_gpu,
            is_key=is_key,
            goal=goal,
            is_met=is_met,
        )
        self._add("figure", asdict(figure))

    def _add(self, key: str, value: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({key: value}) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The lines of a file of findings."""

    figures: tuple[Figure, ...] = ()
    details: tuple[str, ...] = ()
    error: str = ""
    is_done: bool = False

    @property
    def missed(self) -> list[Figure]:
        """Figures that do not meet their goal."""
        return [figure for figure in self.figures if figure.is_met is False]


def read(path: Path) -> Found:
    """What a check wrote before it ended. A line cut off in the middle is left out."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return Found(
        figures=tuple(Figure(**row["figure"]) for row in rows if "figure" in row),
        details=tuple(row["detail"] for row in rows if "detail" in row),
        error=next((row["error"] for row in rows if "error" in row), ""),
        is_done=any("done" in row for row in rows),
    )


def say_missed(figures: Sequence[Figure]) -> str:
    """The figures that miss their goals, in one line."""
    return "; ".join(f"{f.name}: {show(f)}, wanted {f.goal}" for f in figures)


def show(figure: Figure) -> str:
    """The value as a reader sees it."""
    if figure.value is None:
        return NOT_MEASURED if figure.is_of_gpu else "not measured"
    if isinstance(figure.value, bool):
        return "yes" if figure.value else "no"
    text = f"{figure.value:.4g}" if isinstance(figure.value, float) else str(figure.value)
    return f"{text} {figure.unit}".rstrip()


def _judge(
    value: Any, equals: Value, at_least: float | None, at_most: float | None
) -> tuple[str, bool | None]:
    """The goal in words, and whether the value meets it."""
    if equals is not None:
        word = {True: "yes", False: "no"}[equals] if isinstance(equals, bool) else equals
        return f"= {word}", None if value is None else value == equals
    goals = [] if at_least is None else [f">= {at_least:g}"]
    goals += [] if at_most is None else [f"<= {at_most:g}"]
    if value is None or not goals:
        return " and ".join(goals), None
    number = float(value)
    is_met = (at_least is None or number >= at_least) and (at_most is None or number <= at_most)
    return " and ".join(goals), is_met
