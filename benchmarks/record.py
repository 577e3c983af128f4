"""The protocol of a run, written before it starts, and its measurements, written as they are made.

DIRECTORY/   protocol.json   raw.jsonl   result.json   report.html
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import IN_PARTS
from osd.common import machine
from osd.errors import ConfigError

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
    only: tuple[str, ...] = ()
    """NAME=VALUE: the part of a bench that is asked for (`benchmarks/parts.py`)."""
    say: Callable[[str], None] = field(default=lambda text: None)


class Notebook:
    """The files of one run. The protocol is written by the constructor, each row as soon as it is
    measured.

    A bench of `IN_PARTS` goes on where the directory holds a run of the same bench: its rows are
    kept. Raises `ConfigError` where that run was of other sizes.
    """

    def __init__(self, options: Options, protocol: Protocol) -> None:
        self.rows: list[Row] = []
        self._directory = options.directory
        self._directory.mkdir(parents=True, exist_ok=True)
        head = {"protocol": asdict(protocol), "quick": options.quick, "machine": machine.describe()}
        text = json.dumps(head, indent=2) + "\n"
        path, raw = self._directory / "protocol.json", self._directory / "raw.jsonl"
        if protocol.bench in IN_PARTS and path.exists() and raw.exists() and raw.stat().st_size:
            if _uncut(json.loads(path.read_text())) != _uncut(json.loads(text)):
                raise ConfigError(
                    f"{self._directory}: holds another run, of other sizes; choose another "
                    "directory (--out)"
                )
            self.rows = _whole_rows(raw)
        else:
            raw.write_text("")
        path.write_text(text)

    def add(self, **row: Any) -> Row:
        """Keep one raw measurement."""
        self.rows.append(row)
        with (self._directory / "raw.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def find(self, key: Row) -> Row | None:
        """The row that has all of this."""
        return next((row for row in self.rows if key.items() <= row.items()), None)


def _uncut(head: dict[str, Any]) -> object:
    """What two parts of one run have in common."""
    protocol = head["protocol"]
    cut = IN_PARTS[protocol["bench"]]
    sizes = {name: value for name, value in protocol["sizes"].items() if name not in cut}
    kept = {name: value for name, value in protocol.items() if name not in (*cut, "sizes")}
    return kept, sizes, head["quick"]


def _whole_rows(raw: Path) -> list[Row]:
    """The rows of a run that may have been killed while it wrote one, which is dropped."""
    text = raw.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        raw.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def read_rows(directory: Path) -> list[Row]:
    """The raw measurements of a run."""
    return [json.loads(line) for line in (directory / "raw.jsonl").read_text().splitlines()]
