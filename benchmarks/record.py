"""The protocol of a run, written before it starts, and its measurements, written as they are made.

DIRECTORY/   protocol.json   raw.jsonl   result.json   report.html
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from osd.common import machine

Row = dict[str, Any]
"""One raw measurement: plain JSON."""

SEEN, NOT_SEEN, INCONCLUSIVE = "seen", "not seen", "inconclusive"
"""What a figure says of a shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A bound that a figure is held to. `bound` says which number: its value, or an end of its
    interval.

    Example:
        Goal(figure="tokens/s, on / off", bound="low", at_least=0.98)
    """

    figure: str
    """Name of the figure; every group that has it is held to the goal."""
    bound: str = "value"
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, number: float) -> bool:
        return (self.at_least is None or number >= self.at_least) and (
            self.at_most is None or number <= self.at_most
        )

    def __str__(self) -> str:
        what = {"value": "", "low": "lower bound ", "high": "upper bound "}[self.bound]
        return what + (
            f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Something that others have published, in form: a figure lies above a bound. It is *seen*
    where the whole interval of the figure does, *not seen* where none of it does, and otherwise,
    or without an interval, *inconclusive*.

    Example:
        Shape(figure="best fixed k, lowest load less highest", says="best k falls", above=0)
    """

    figure: str
    """Name of the figure; every group that has it is judged."""
    says: str
    above: float

    def verdict(self, low: float | None, high: float | None) -> str:
        """`low`, `high`: the ends of the figure's interval."""
        if low is None or high is None:
            return INCONCLUSIVE
        return SEEN if low > self.above else NOT_SEEN if high <= self.above else INCONCLUSIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """What a bench is going to do, written down before it does."""

    bench: str
    question: str
    arms: tuple[str, ...]
    order: str
    """How the arms take turns."""
    sizes: dict[str, Any]
    """Models, batches, lengths, repeats: all that the figures depend on."""
    goals: tuple[Goal, ...] = ()
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a bench is told: where to write, whether to be quick, whom to tell how it goes."""

    directory: Path
    quick: bool = False
    traces: Path | None = None
    """What others have recorded, for the benches that read it."""
    say: Callable[[str], None] = field(default=lambda text: None)


class Notebook:
    """The files of one run. The protocol is written by the constructor, each row as soon as it is
    measured."""

    def __init__(self, options: Options, protocol: Protocol) -> None:
        self.rows: list[Row] = []
        self._directory = options.directory
        self._directory.mkdir(parents=True, exist_ok=True)
        head = {"protocol": asdict(protocol), "quick": options.quick, "machine": machine.describe()}
        (self._directory / "protocol.json").write_text(json.dumps(head, indent=2) + "\n")
        (self._directory / "raw.jsonl").write_text("")

    def add(self, **row: Any) -> None:
        """Keep one raw measurement."""
        self.rows.append(row)
        with (self._directory / "raw.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(directory: Path) -> list[Row]:
    """The raw measurements of a run."""
    return [json.loads(line) for line in (directory / "raw.jsonl").read_text().splitlines()]
