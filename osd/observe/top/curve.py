"""A curve over time in characters: braille, eight dots in each, or ASCII where a terminal has no
braille."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.text import Text

GUTTER = 9
"""Columns left of the curve, for its scale."""
ASCII_LEVELS = {0: " ", 1: "'", 2: "-", 4: "."}


@dataclass(frozen=True, slots=True)
class Dots:
    """How dots make a character: a bit for each place, by column and by row from the top, and the
    character of a sum of bits."""

    bits: tuple[tuple[int, ...], ...]
    character: Callable[[int], str]


BRAILLE = Dots(
    ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)),
    lambda bits: chr(0x2800 + bits) if bits else " ",
)
ASCII = Dots(((1, 2, 4),), lambda bits: ASCII_LEVELS.get(bits, "|"))


def chart(history: dict[str, Any], window: str, width: int, height: int, dots: Dots) -> list[Text]:
    """α over the span of the answer of `/osd/history`, from 0 to 100 %; below it the drafts that
    began to serve."""
    num_columns, num_rows = max(1, width - GUTTER), max(1, height - 1)
    rows = draw(resample(history, num_columns * len(dots.bits)), num_rows, dots)
    marks = _columns_of_marks(history, num_columns)
    scale = {0: "100 %", (num_rows - 1) // 2: "50 %" if num_rows % 2 else "", num_rows - 1: "0 %"}
    lines = [_row(scale.get(number, ""), row, marks) for number, row in enumerate(rows)]
    return [*lines, _below(f"-{window}", marks, num_columns)]


def resample(history: dict[str, Any], num: int) -> list[float | None]:
    """α at `num` moments from `since` to `now`: accepted / tested of all buckets that reach into
    each."""
    series, since, bucket = history["series"], history["since"], history["bucket"]
    width = (history["now"] - since) / num or 1.0
    accepted, tested = [0.0] * num, [0.0] * num
    for at, alpha, weight in zip(series["at"], series["alpha"], series["tested"], strict=True):
        if alpha is None or not weight:
            continue
        first, end = int((at - since) / width), -int(-(at + bucket - since) // width)
        for place in range(max(0, first), min(num, end)):
            accepted[place] += alpha * weight
            tested[place] += weight
    return [a / t if t else None for a, t in zip(accepted, tested, strict=True)]


def draw(values: list[float | None], num_rows: int, dots: Dots) -> list[str]:
    """Rows of characters, the top one first; neighbours are joined, None leaves a gap."""
    across, down = len(dots.bits), len(dots.bits[0])
    cells = [[0] * (len(values) // across) for _ in range(num_rows)]
    before = None
    for x, value in enumerate(values):
        y = (
            None
            if value is None
            else round((1 - min(1.0, max(0.0, value))) * (num_rows * down - 1))
        )
        if y is not None:
            for dot in _between(before, y):
                cells[dot // down][x // across] |= dots.bits[x % across][dot % down]
        before = y
    return ["".join(map(dots.character, row)) for row in cells]


def _between(before: int | None, y: int) -> range:
    """`y` and what lies between it and its neighbour."""
    if before is None or before == y:
        return range(y, y + 1)
    return range(before + 1, y + 1) if before < y else range(y, before)


def _columns_of_marks(history: dict[str, Any], num_columns: int) -> dict[int, int]:
    """column -> version that began to serve there; the newest where several did"""
    seconds = history["now"] - history["since"] or 1.0
    places = [
        (int((mark["at"] - history["since"]) / seconds * num_columns), mark)
        for mark in history["marks"]
    ]
    return {min(place, num_columns - 1): mark["version"] for place, mark in places if place >= 0}


def _row(label: str, row: str, marks: dict[int, int]) -> Text:
    line = Text(f"{label:>{GUTTER - 2}} ┤", "dim")
    for column, character in enumerate(row):
        if column in marks and character == " ":
            line.append("┊", "yellow")
        else:
            line.append(character, "cyan")
    return line


def _below(label: str, marks: dict[int, int], num_columns: int) -> Text:
    """A name for each mark; an older one that would touch a newer one becomes a sign without a
    name, or nothing."""
    cells, free = [" "] * num_columns, num_columns + 1
    for column in sorted(marks, reverse=True):
        name = f"◆v{marks[column]}"
        start = column
        if start + len(name) > num_columns:
            name, start = f"v{marks[column]}◆", column + 1 - len(name)
        if start < 0 or start + len(name) >= free:
            name, start = "◆", column
        if start + len(name) < free:
            cells[start : start + len(name)] = name
            free = start
    return Text.assemble(
        (f"{label[: GUTTER - 2]:>{GUTTER - 2}}  ", "dim"), ("".join(cells), "yellow")
    )
