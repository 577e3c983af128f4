"""The protocol of a run, written before it starts, and its measurements, written as they are made.

DIRECTORY/   protocol.json   raw.jsonl   result.json   report.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import IN_PARTS
from osd.common import machine
from osd.common.files import replace_file
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
    kept. Raises `ConfigError` where one of the two runs takes hours and they are not the same, or
    where nothing says which run the rows there are of.
    """

    def __init__(self, options: Options, protocol: Protocol) -> None:
        self.rows: list[Row] = []
        self._directory = options.directory
        self._directory.mkdir(parents=True, exist_ok=True)
        head = {"protocol": asdict(protocol), "quick": options.quick, "machine": machine.describe()}
        text = json.dumps(head, indent=2) + "\n"
        path, raw = self._directory / "protocol.json", self._directory / "raw.jsonl"
        if raw.exists() and raw.stat().st_size:
            self.rows = _rows_to_keep(path, raw, json.loads(text))
        if not self.rows:
            raw.write_text("")
        replace_file(path, text.encode())

    def add(self, **row: Any) -> Row:
        """Keep one raw measurement."""
        self.rows.append(row)
        with (self._directory / "raw.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def find(self, key: Row) -> Row | None:
        """The row that has all of this."""
        return next((row for row in self.rows if key.items() <= row.items()), None)


def _rows_to_keep(path: Path, raw: Path, head: dict[str, Any]) -> list[Row]:
    """Of the run that a directory holds: all rows where `head` is that of the same run, none where
    neither took hours."""
    elsewhere = "choose another directory (--out)"
    try:
        before = json.loads(path.read_text())
        bench, differing = before["protocol"]["bench"], _differences(before, head)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"{path}: does not say which run the rows of {raw.name} are of; {elsewhere}"
        ) from None
    if {bench, head["protocol"]["bench"]}.isdisjoint(IN_PARTS):
        return []
    if differing:
        raise ConfigError(
            f"{raw.parent}: holds another run, which differs in {', '.join(differing)}; {elsewhere}"
        )
    return _whole_rows(raw)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What keeps two runs from being parts of one. Of tables that are cut, what both have is
    compared."""
    if (bench := now["protocol"]["bench"]) != before["protocol"]["bench"]:
        return ["bench"]
    cut = IN_PARTS.get(bench, ())
    old, new = (
        {"quick": head["quick"], **head["protocol"], **head["protocol"]["sizes"]}
        for head in (before, now)
    )
    names = [n for n in dict.fromkeys([*old, *new]) if n not in (*cut, "sizes")]
    found = [name for name in names if old.get(name) != new.get(name)]
    for name in (name for name in cut if isinstance(new[name], dict)):
        both = [key for key in old[name] if key in new[name]]
        found += [f"{name}.{key}" for key in both if old[name][key] != new[name][key]]
    return found


def _whole_rows(raw: Path) -> list[Row]:
    """The rows of a run that may have been killed while it wrote one, which is dropped."""
    data = raw.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    os.truncate(raw, len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ConfigError(
                f"{raw}: line {number} is not JSON; take it out, or choose another --out"
            ) from None
    return rows


def read_rows(directory: Path) -> list[Row]:
    """The raw measurements of a run."""
    return [json.loads(line) for line in (directory / "raw.jsonl").read_text().splitlines()]
