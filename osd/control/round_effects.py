"""What training rounds do to an engine, as its heartbeats show: how much slower its steps are while
the trainer works (`Pace`), and how much faster it is with the draft of a round (`Gain`). Both are
logarithms of ratios."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from osd.records import DraftWorth

KEEP_PACE, KEEP_ROUND = 0.8, 0.7
"""Weight that evidence keeps after one more heartbeat at rest, and round."""
MIN_AT_REST = 1.5
"""Weight of the heartbeats between two rounds, two at least, that show the pace without the
trainer."""
NEWEST_ROUNDS = 9
"""Rounds that count of what they take."""
SHOWS_IN = 8
"""Heartbeats of a new draft within which it shows what it brought: later, the traffic has."""
MAX_WORTH = 100.0
"""No draft makes an engine so much faster: a heartbeat that says so is no measurement."""


def _logarithm(speedup: float) -> float | None:
    """No draft makes an engine slower, whose control would leave it; None of what is no number."""
    return math.log(min(max(speedup, 1.0), MAX_WORTH)) if math.isfinite(speedup) else None


@dataclass(slots=True)
class Fading:
    """A mean in which old samples fade.

    Example:
        pace = Fading(0.98)
        pace.add(0.1); pace.mean  -> 0.1
    """

    keep: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        more = self.and_also(value)
        self.weight, self.total = more.weight, more.total

    def and_also(self, value: float) -> Fading:
        """What it would be with one more."""
        return Fading(self.keep, self.keep * self.weight + 1, self.keep * self.total + value)

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class Pace:
    """What rounds take from an engine. Paces are logarithms."""

    at_rest: Fading = field(default_factory=lambda: Fading(KEEP_PACE))
    """Since the newest round."""
    before: float | None = None
    """At rest, just before the newest round."""
    within: Fading = field(default_factory=lambda: Fading(1.0))
    """In the newest round."""
    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST_ROUNDS))
    """How much the pace was higher in a round than before."""

    @property
    def slowdown(self) -> float | None:
        """Time of a step while the trainer works, over that at rest."""
        return math.exp(max(median(self.rounds), 0.0)) if self.rounds else None

    def begin_round(self) -> None:
        self.before = self.at_rest.mean if self.at_rest.weight >= MIN_AT_REST else None
        self.at_rest, self.within = Fading(KEEP_PACE), Fading(1.0)

    def end_round(self) -> None:
        if self.before is not None and self.within.weight:
            self.rounds.append(self.within.mean - self.before)
        self.before = None


@dataclass(slots=True)
class Gain:
    """What rounds bring an engine. All are logarithms of speeds."""

    of_draft: float | None = None
    """Speed with the draft that serves, over that without; None while it has shown none."""
    of_better: float | None = None
    """Speed with a draft of fewer errors, over that with this one."""
    rounds: Fading = field(default_factory=lambda: Fading(KEEP_ROUND))
    """What a round's draft made the engine faster, over the draft before it."""
    before: tuple[int, float | None] = (0, None)
    """Version that served when the newest round began, and its worth."""
    newest: float | None = None
    """What the newest published draft brought so far."""
    is_awaited: bool = False
    """Whether a draft was published that has not shown itself yet."""
    num_shown: int = 0
    """Heartbeats in which it has."""
    is_begun: bool = False
    """Whether a round was seen to begin that has not ended."""

    @property
    def of_round(self) -> float | None:
        """What is expected of the next one. Of a first round a better draft is expected, and that
        weighs as much as a round that was measured."""
        if self.of_better is None:
            return None
        seen = self.rounds if self.newest is None else self.rounds.and_also(self.newest)
        prior = 1 - (1 - KEEP_ROUND) * seen.weight
        return max((prior * self.of_better + seen.total) / (prior + seen.weight), 0.0)

    def begin_round(self, version: int) -> None:
        self._settle()
        self.before, self.is_begun = (version, self.of_draft), True

    def end_round(self, *, is_published: bool) -> None:
        """One that nobody saw begin, as it was over at once, shows nothing."""
        if not self.is_begun:
            return
        self.is_begun = False
        self.is_awaited, self.num_shown = is_published and self.before[1] is not None, 0
        if not is_published:
            self.newest = 0.0

    def add(self, worth: DraftWorth | None, version: int) -> None:
        """A heartbeat has said so of this version."""
        self.of_draft = None if worth is None else _logarithm(worth.of_draft)
        if worth is not None and (better := _logarithm(worth.of_better)) is not None:
            self.of_better = better
        served, before = self.before
        if self.is_awaited and version != served and self.of_draft is not None:
            assert before is not None, "nothing is awaited where it is not known"
            self.newest, self.num_shown = self.of_draft - before, self.num_shown + 1
            self.is_awaited = self.num_shown < SHOWS_IN

    def forget_rounds(self) -> None:
        self.rounds, self.newest, self.is_awaited = Fading(KEEP_ROUND), None, False

    def _settle(self) -> None:
        if self.newest is not None:
            self.rounds.add(self.newest)
        self.newest, self.is_awaited = None, False
