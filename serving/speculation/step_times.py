"""The time of an engine step, learnt from the steps themselves: T(batch, verified tokens, context,
draft passes).

    pure-decode step ──► cell: same batch, width ──median──► non-negative ──► T(shape)
                         and draft passes                    least squares

Each cell keeps its last few steps, so old ones leave, and a spike does not move the median. Where a
cell was seen, it corrects the fit. Recursive least squares would not do: while the shape stays the
same, it forgets all others and diverges.

A machine is not always equally fast (clocks, neighbours), and shapes are seen at different times.
The pace is the factor by which steps of well-known cells are off, the same for all shapes. Cells
hold times at pace 1. A full cell takes in few steps, so that it does not absorb the pace. The pace
is a median, as cells are: a mean lies above it where some steps take far longer, and what the pace
is too high by the cells would be too low by, and the pace higher again, without end.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

CELL_SIZE = 15
"""Newest steps kept of each cell."""
MAX_CELLS = 512
MAX_KNOWN_SHAPES = 256
STEPS_PER_FIT, MIN_STEPS_PER_FIT = 100, 8
NEW_SHAPE_STEPS = 4
"""Steps of a new shape after which a fit is worth it."""
CELL_WEIGHT = 1.5
"""A cell of n steps weighs n / (n + CELL_WEIGHT) against the fit."""
STALE_STEPS, STALE_SIZE = 300, 3
"""After so many steps of other shapes, a cell keeps only its newest steps when it is seen again."""
STEPS_PER_RENEWAL = 8
"""A full cell takes in one step of so many."""
NUM_PACES = 9
"""Newest steps whose median is the pace of now."""
PACE_GAIN, MAX_OFF = 0.2, 0.3
"""The share of its deviation from that by which the pace follows it in each step, and the largest
deviation that counts (in logarithms)."""
PACE_FADES = 1e-4
"""The share of it by which the pace (its logarithm) nears 1 in each step: what is left of chance
would add up."""
KNEES = (8, 32, 128)
"""Verified tokens beyond which each costs more: small batches wait for memory, large ones
compute."""

_KNEES = np.array(KNEES, np.float64)
_CONTEXT = 3 + len(KNEES)
"""Index of the context among the features."""


class Shape(NamedTuple):
    """A decode step."""

    batch: int
    """requests"""
    tokens: int
    """verified tokens: 1 + k of each request"""
    context: int
    """tokens of all requests together"""
    drafted: int
    """passes of the draft model"""


Key = tuple[int, int, int]


def key_of(shape: Shape) -> Key:
    """The cell of a shape; widths differ by an eighth of a doubling."""
    return shape.batch, round(8 * math.log2(shape.tokens)) if shape.tokens > 1 else 0, shape.drafted


@dataclass(slots=True)
class _Cell:
    shapes: deque[Shape] = field(default_factory=lambda: deque(maxlen=CELL_SIZE))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=CELL_SIZE))
    seen_at: int = 0
    known: tuple[Shape, float, int] | None = None
    """`middle`, unless the steps have changed since."""

    def add(self, shape: Shape, seconds: float) -> None:
        self.shapes.append(shape)
        self.seconds.append(seconds)
        self.known = None

    def forget_all_but(self, num: int) -> None:
        for values in (self.shapes, self.seconds):
            while len(values) > num:
                values.popleft()
        self.known = None

    def middle(self) -> tuple[Shape, float, int]:
        """Medians of the steps, and their number. The engine waits for those of all cells, few of
        which have changed since the fit before."""
        if self.known is None:
            shape = Shape(*(int(median(values)) for values in zip(*self.shapes, strict=True)))
            self.known = shape, float(median(self.seconds)), len(self.seconds)
        return self.known


class StepTimes:
    """Learns and predicts. `padded`: the sizes CUDA graphs were captured for, to which the number
    of verified tokens is rounded up; empty without graphs."""

    def __init__(self, padded: Sequence[int] = ()) -> None:
        self._padded = np.array(sorted(padded), np.float64)
        self._cells: dict[Key, _Cell] = {}
        self._fit: np.ndarray | None = None
        self._corrections: dict[Key, float] = {}
        self._known_shapes: dict[tuple[Shape, ...], tuple[np.ndarray, list[Key]]] = {}
        self._pace, self._is_paced = 1.0, False
        self._paces: deque[float] = deque(maxlen=NUM_PACES)
        """Logarithms of what the newest steps took, over what their cells say."""
        self._num_steps = 0
        self._num_seen: Counter[tuple[int, int]] = Counter()
        """(batch, draft passes) -> steps"""
        self._num_since_fit = 0
        self._fitting: threading.Thread | None = None

    @property
    def is_fitted(self) -> bool:
        return self._fit is not None

    @property
    def pace(self) -> float | None:
        """Factor by which every step now takes longer than remembered; None while no step was of a
        well-known shape."""
        return self._pace if self._is_paced else None

    @property
    def num_cells(self) -> int:
        return len(self._cells)

    def add(self, shape: Shape, seconds: float) -> None:
        """Add a step of nothing but decoding. A thread fits anew every `STEPS_PER_FIT` steps, and
        when a shape has become known."""
        self._follow_pace(shape, seconds)
        is_new = self._remember(shape, seconds / self._pace) == NEW_SHAPE_STEPS
        self._num_since_fit += 1
        is_due = self._num_since_fit >= (
            MIN_STEPS_PER_FIT if is_new and self.is_fitted else STEPS_PER_FIT
        )
        if is_due and (self._fitting is None or not self._fitting.is_alive()):
            self._num_since_fit = 0
            self._fitting = threading.Thread(
                target=self._refit, args=(self._medians(),), daemon=True
            )
            self._fitting.start()

    def fit(self) -> None:
        """Fit now, in this thread."""
        self._refit(self._medians())

    def settle(self) -> None:
        """Wait for the fit under way, if there is one."""
        if self._fitting is not None:
            self._fitting.join()

    def predict(self, shapes: Sequence[Shape], context: int = 0) -> np.ndarray:
        """float [shapes]: seconds, with `context` added to that of each shape. Before the first fit
        every step costs the same."""
        fit, corrections = self._fit, self._corrections
        if fit is None:
            return np.ones(len(shapes))
        features, keys = self._prepared(tuple(shapes))
        seconds = features @ fit + context / 1000 * fit[_CONTEXT]
        seconds *= [corrections.get(key, 1.0) * self._pace for key in keys]
        return np.maximum(seconds, 1e-6, out=seconds)

    def _prepared(self, shapes: tuple[Shape, ...]) -> tuple[np.ndarray, list[Key]]:
        """Features and cells of shapes, cached: the control asks for the same shapes repeatedly."""
        if (found := self._known_shapes.get(shapes)) is None:
            if len(self._known_shapes) >= MAX_KNOWN_SHAPES:
                self._known_shapes.clear()
            features = self._features(np.array(shapes, np.float64).reshape(-1, len(Shape._fields)))
            found = self._known_shapes[shapes] = features, [key_of(shape) for shape in shapes]
        return found

    def num_steps(self, shape: Shape) -> int:
        """Steps that are kept in the cell of this shape."""
        cell = self._cells.get(key_of(shape))
        return len(cell.seconds) if cell is not None else 0

    def num_steps_of(self, batch: int, drafted: int) -> int:
        """Steps that were seen of a batch and so many draft passes, of whatever width."""
        return self._num_seen[batch, drafted]

    def seconds_per_token(self, shape: Shape) -> float:
        """Seconds of one more verified token at this shape; with CUDA graphs its share of a larger
        one. 0 before the first fit."""
        if self._fit is None:
            return 0.0
        _, _, per_token, *rest = self._fit.tolist()
        per_token += sum(
            cost for knee, cost in zip(KNEES, rest, strict=False) if shape.tokens > knee
        )
        return self._pace * (per_token + (rest[len(KNEES) + 2] if shape.drafted else 0.0))

    # -- the profile that outlives a process ------------------------------------------------------

    def to_rows(self) -> list[dict[str, Any]]:
        """Cells as JSON: {"batch", "tokens", "context", "drafted", "seconds", "steps"}."""
        return [
            {**shape._asdict(), "seconds": seconds * self._pace, "steps": steps}
            for shape, seconds, steps in self._medians().values()
        ]

    def load_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begin with what an earlier engine measured; own steps soon outweigh it. Raises
        `KeyError`, `TypeError` or `ValueError` for malformed rows."""
        found = []
        for row in rows:
            shape = Shape(*(int(row[name]) for name in Shape._fields))
            seconds, steps = float(row["seconds"]), int(row["steps"])
            if not (
                math.isfinite(seconds)
                and seconds > 0 < shape.tokens
                and shape.batch > 0 <= shape.drafted
            ):
                raise ValueError(f"no step takes such time: {dict(row)}")
            found += [(shape, seconds)] * min(steps, CELL_SIZE // 2)
        for shape, seconds in found:
            self._remember(shape, seconds)
        self.fit()

    # -- inside -----------------------------------------------------------------------------------

    def _follow_pace(self, shape: Shape, seconds: float) -> None:
        """A step of a well-known shape that takes longer shows that the machine has slowed down."""
        if self._fit is None or self.num_steps(shape) < CELL_SIZE:
            return
        expected = float(self.predict([shape._replace(context=0)], shape.context)[0]) / self._pace
        self._paces.append(math.log(max(seconds, 1e-9) / expected))
        pace = math.log(self._pace)
        off = min(max(median(self._paces) - pace, -MAX_OFF), MAX_OFF)
        self._pace = math.exp((1 - PACE_FADES) * pace + PACE_GAIN * off)
        self._is_paced = True

    def _remember(self, shape: Shape, seconds: float) -> int:
        key = key_of(shape)
        cell = self._cells.pop(key, None) or _Cell()
        self._cells[key] = cell  # the newest last
        self._num_steps += 1
        self._num_seen[shape.batch, shape.drafted] += 1
        if self._num_steps - cell.seen_at > STALE_STEPS:
            cell.forget_all_but(STALE_SIZE)
        cell.seen_at = self._num_steps
        if (
            len(cell.seconds) < CELL_SIZE
            or not self.is_fitted
            or self._num_steps % STEPS_PER_RENEWAL == 0
        ):
            cell.add(shape, seconds)
        if len(self._cells) > MAX_CELLS:
            del self._cells[next(iter(self._cells))]
        return len(cell.seconds)

    def _medians(self) -> dict[Key, tuple[Shape, float, int]]:
        return {key: cell.middle() for key, cell in self._cells.items()}

    def _refit(self, medians: dict[Key, tuple[Shape, float, int]]) -> None:
        if not medians:
            return
        shapes = np.array([shape for shape, _, _ in medians.values()], np.float64)
        seconds = np.array([seconds for _, seconds, _ in medians.values()])
        steps = np.array([steps for _, _, steps in medians.values()])
        features = self._features(shapes)
        weight = np.sqrt(steps) / seconds  # relative errors, and often seen cells weigh more
        scale = np.maximum(features.max(0), 1e-9)
        fit = nnls(features / scale * weight[:, None], seconds * weight)[0] / scale
        ratio = seconds / np.maximum(features @ fit, 1e-9)
        trust = steps / (steps + CELL_WEIGHT)
        self._corrections = dict(zip(medians, 1 + (ratio - 1) * trust, strict=True))
        self._fit = fit

    def _features(self, shapes: np.ndarray) -> np.ndarray:
        """float [shapes, features], all non-negative, each with a non-negative cost."""
        batch, tokens, context, drafted = shapes.T
        if len(self._padded):
            at = np.searchsorted(self._padded, tokens)
            tokens = np.where(
                at < len(self._padded), self._padded[np.minimum(at, len(self._padded) - 1)], tokens
            )
        found = np.empty((len(shapes), 8 + len(KNEES)))
        found[:, 0], found[:, 1], found[:, 2] = 1, batch, tokens
        found[:, 3:_CONTEXT] = np.maximum(tokens[:, None] - _KNEES, 0)
        rest = found[:, _CONTEXT:]
        rest[:, 0], rest[:, 1] = context / 1000, drafted > 0
        rest[:, 2], rest[:, 3], rest[:, 4] = rest[:, 1] * tokens, drafted, drafted * batch
        return found


def padded_sizes(config: Any) -> list[int]:
    """Numbers of tokens to which CUDA graphs round up a step; empty without graphs."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    has_graphs = mode is not None and getattr(mode, "name", str(mode)) != "NONE"
    return list(compilation.cudagraph_capture_sizes or ()) if has_graphs else []
