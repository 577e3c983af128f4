"""The counts of each request of a run, in order of arrival, and the figures of any window of
requests. Needs only numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from osd.records import acceptance_length, acceptance_rate, conditional_acceptance

COUNTS = ("tokens", "steps", "drafts", "drafted", "tested", "accepted")
"""Per request: output tokens after the first, verification steps, steps with a draft, and draft
tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """One request with one draft.

    Example:
        StepCounts(tokens=9, steps=3, drafts=2, drafted=8, tested=7, accepted=6)
        One of the three steps had nothing to propose.
    """

    tokens: int
    steps: int
    drafts: int
    drafted: int
    tested: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Counts of each request with the draft that served it, and what learning took."""

    counts: Mapping[str, np.ndarray]
    """name of `COUNTS` -> int [requests]"""
    cpu_s: np.ndarray
    """float [requests]: CPU seconds of training until each request was over."""
    num_rounds: int = 0
    num_published: int = 0
    num_discarded: int = 0
    """Rounds whose result was thrown away by the trainer itself."""
    train_seconds: float = 0.0
    padding: float = 0.0
    seconds: np.ndarray | None = None
    """float [requests]: each one's share of the decode time, where the run kept time."""
    notes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, counts: Sequence[StepCounts], cpu_s: Sequence[float] | None = None, **others: Any
    ) -> Curve:
        arrays = {
            name: np.array([getattr(one, name) for one in counts], np.int64) for name in COUNTS
        }
        seconds = np.zeros(len(counts)) if cpu_s is None else np.asarray(cpu_s, float)
        return cls(counts=arrays, cpu_s=seconds, **others)

    def __len__(self) -> int:
        return len(self.cpu_s)

    def total(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """Sum of a count over requests [start, stop)."""
        return int(self.counts[name][start:stop].sum())

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        """Acceptance rate; 0 where nothing was drafted."""
        return (
            acceptance_rate(self.total("accepted", start, stop), self.total("drafted", start, stop))
            or 0.0
        )

    def alpha(self, start: int = 0, stop: int | None = None) -> float:
        """Conditional acceptance; 0 where nothing was tested."""
        return (
            conditional_acceptance(
                self.total("accepted", start, stop), self.total("tested", start, stop)
            )
            or 0.0
        )

    def alpha_of_steps(self, start: int = 0, stop: int | None = None) -> float:
        """α with every step without a draft as one rejected token; α itself for drafts from a
        model. It tells one who seldom proposes, and then rightly, from one who always does."""
        tested = (
            self.total("tested", start, stop)
            + self.total("steps", start, stop)
            - self.total("drafts", start, stop)
        )
        return self.total("accepted", start, stop) / tested if tested else 0.0

    def length(self, start: int = 0, stop: int | None = None) -> float:
        """Acceptance length over the steps that had a draft; 1 where there was none."""
        return (
            acceptance_length(
                self.total("accepted", start, stop), self.total("drafts", start, stop)
            )
            or 1.0
        )

    def tokens_per_step(self, start: int = 0, stop: int | None = None) -> float:
        """Tokens of a pass of the target, steps without a draft included: what the speed
        follows."""
        return self.total("tokens", start, stop) / max(1, self.total("steps", start, stop))

    def moving_alpha(self, window: int) -> np.ndarray:
        """float [requests - window + 1]: α of the steps of each window, by its first request."""
        tested = self.counts["tested"] + self.counts["steps"] - self.counts["drafts"]
        return _moving_sum(self.counts["accepted"], window) / np.maximum(
            _moving_sum(tested, window), 1
        )

    def as_row(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "counts": {name: values.tolist() for name, values in self.counts.items()},
            "cpu_s": [round(value, 3) for value in self.cpu_s.tolist()],
            "num_rounds": self.num_rounds,
            "num_published": self.num_published,
            "num_discarded": self.num_discarded,
            "train_seconds": self.train_seconds,
            "padding": self.padding,
            "seconds": None
            if self.seconds is None
            else [round(value, 6) for value in self.seconds.tolist()],
            "notes": dict(self.notes),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Curve:
        """What `as_row` gave."""
        scalars = (
            "num_rounds",
            "num_published",
            "num_discarded",
            "train_seconds",
            "padding",
            "notes",
        )
        counts = {name: np.array(values, np.int64) for name, values in row["counts"].items()}
        seconds = None if row.get("seconds") is None else np.array(row["seconds"], float)
        return cls(
            counts=counts,
            cpu_s=np.array(row["cpu_s"], float),
            seconds=seconds,
            **{name: row[name] for name in scalars},
        )


def _moving_sum(values: np.ndarray, window: int) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(values)])
    return sums[window:] - sums[:-window]
