"""First-fit decreasing bin packing: sequences of different lengths on lines of equal length.

Long lines cost attention (quadratic in length), short lines cost padding. So lines start as long as
the longest sequence and grow by `GROWTH` until at most `MAX_PADDING` of the whole is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_PADDING = 0.14
GROWTH = 1.1


class Place(NamedTuple):
    """Where a sequence begins."""

    line: int
    start: int


Layout = tuple[list[Place], int, int]
"""The place of each sequence, the number of lines, their length (at least one token)."""


def pack(lengths: Sequence[int]) -> Layout:
    """Let the sequences share lines."""
    capacity: float = max(1, *lengths)
    total = sum(lengths)
    while True:
        places, ends = _first_fit(lengths, int(capacity))
        length = max(1, *ends)
        if total >= (1 - MAX_PADDING) * length * len(ends) or len(ends) == 1:
            return places, len(ends), length
        capacity *= GROWTH


def one_a_line(lengths: Sequence[int]) -> Layout:
    """Put every sequence on a line of its own."""
    return [Place(line, 0) for line in range(len(lengths))], len(lengths), max(1, *lengths)


def _first_fit(lengths: Sequence[int], capacity: int) -> tuple[list[Place], list[int]]:
    """Place each sequence, longest first, on the first line with room. Also where each line
    ends."""
    ends: list[int] = []
    places = [Place(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        line = next(
            (line for line, end in enumerate(ends) if end + lengths[index] <= capacity), len(ends)
        )
        if line == len(ends):
            ends.append(0)
        places[index] = Place(line, ends[line])
        ends[line] += lengths[index]
    return places, ends
