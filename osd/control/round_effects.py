"""What training rounds do to an engine, as its heartbeats show: how much slower its steps are while
the trainer works (`Pace`), and how much faster it is with the draft of a round (`Gain`). Both are
logarithms of ratios. `Progress`: how many errors rounds take from the draft. `Attempts`: the time
that those in vain took, and the next one waits for."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from osd.records import FAR_FEWER_ERRORS, FEWER_ERRORS, DraftWorth, RoundOutcome

KEEP_PACE, KEEP_ROUND = 0.8, 0.7
"""Weight that evidence keeps after one more heartbeat at rest, and round."""
MIN_AT_REST = 1.5
"""Weight of the heartbeats between two rounds, two at least, that show the pace without the
trainer."""
NEWEST_ROUNDS = 9
"""Rounds that count of what they take."""
SHOWS_IN = 8
"""Heartbeats of a new draft within which it shows what it brought: later, the traffic has."""
UNTRIED = 0.02
"""Promises weigh this much beside what rounds have shown of them, less with every one."""
LEAST_PROMISE = 0.005
"""A draft of which less is promised shows nothing of promises."""
CHANGED = 0.05
"""A draft that its gate found better makes no engine so much slower: its traffic has changed."""
CHANCE = 0.03
"""A draft that brings nothing may seem to make an engine faster by so much."""
VAIN_SHARE = 0.02
"""Of the engines' time that attempts in vain may take, where traffic changes again and again."""
MOST_OWED = 64
"""Rounds of an attempt that are paid off."""
MOST_UNJUDGED = 16
"""Rounds in a row that nobody could judge, after which one more has brought nothing: traffic of
which too little is held out would be trained on for ever."""
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


@dataclass(frozen=True, slots=True)
class Promise:
    """What drafts of fewer errors would bring, as the engine's control expects of its present
    traffic."""

    of_better: float
    of_far_better: float
    """Of drafts that err less often by `FEWER_ERRORS` and `FAR_FEWER_ERRORS`, over this one."""

    def of_share(self, share: float) -> float:
        """Of a draft that errs less often by any share."""
        shares = (0.0, FEWER_ERRORS, FAR_FEWER_ERRORS)
        return float(np.interp(share, shares, (0.0, self.of_better, self.of_far_better)))


@dataclass(slots=True)
class Gain:
    """What drafts bring an engine, by what they were to bring. All are logarithms of speeds."""

    of_draft: float | None = None
    """Speed with the draft that serves, over that without; None while it has shown none."""
    promise: Promise | None = None
    """None while the engine has said nothing."""
    brought: Fading = field(default_factory=lambda: Fading(KEEP_ROUND))
    """What a round's draft made the engine faster, over the draft before it."""
    promised: Fading = field(default_factory=lambda: Fading(KEEP_ROUND))
    """What it would have, by the engine's promise and the errors it makes less by its gate."""
    before: tuple[int, float | None, Promise | None] = (0, None, None)
    """Version that served when the newest round began, its worth, and the promise."""
    newest: tuple[float, float] | None = None
    """What the newest published draft brought so far, and what was promised of it."""
    num_shown: int = 0
    """Heartbeats in which it has shown that."""
    awaited: float | None = None
    """What is promised of a published draft that has not shown itself in full."""
    is_begun: bool = False
    """Whether a round was seen to begin that has not ended."""
    settled: float = 0.0
    """What the rounds' drafts before the newest made the engine faster, all together."""
    num_settled: int = 0

    @property
    def is_open(self) -> bool:
        """Whether a draft was published that has shown nothing yet."""
        return self.awaited is not None and not self.num_shown

    @property
    def in_all(self) -> float:
        """What the drafts of all rounds made the engine faster since they were forgotten."""
        return self.settled + (0.0 if self.newest is None else self.newest[0])

    @property
    def is_sure(self) -> bool:
        """Whether that is more than chance."""
        num = self.num_settled + (self.newest is not None)
        return num > 0 and self.in_all >= CHANCE * num**0.5

    @property
    def trust(self) -> float:
        """Share of what was promised that came true, 1 at first."""
        brought, promised = self.brought, self.promised
        if self.newest is not None:
            brought, promised = map(Fading.and_also, (brought, promised), self.newest)
        untried = UNTRIED * (1 - (1 - KEEP_ROUND) * promised.weight)
        # Less than nothing is chance: estimates of a new draft begin anew, maybe with the traffic.
        ratio = (untried + max(brought.total, 0.0)) / (untried + promised.total)
        return min(ratio, 1.0)

    def of_share(self, share: float) -> float:
        """What is expected of drafts that err less often by a share."""
        return 0.0 if self.promise is None else self.trust * self.promise.of_share(share)

    def begin_round(self, version: int) -> None:
        self._settle()
        self.before, self.is_begun = (version, self.of_draft, self.promise), True

    def end_round(self, share: float, *, is_published: bool) -> None:
        """`share`: of the errors, that the round's draft makes less. A round that nobody saw begin,
        as it was over at once, shows nothing."""
        if not self.is_begun:
            return
        self.is_begun, self.num_shown = False, 0
        _, worth, promise = self.before
        if is_published and worth is not None and promise is not None:
            self.awaited = promise.of_share(share)

    def add(self, worth: DraftWorth | None, version: int) -> None:
        """A heartbeat has said so of this version."""
        self.of_draft = None if worth is None else _logarithm(worth.of_draft)
        if worth is not None:
            better, far_better = _logarithm(worth.of_better), _logarithm(worth.of_far_better)
            if better is not None and far_better is not None:
                self.promise = Promise(better, far_better)
        served, before, _ = self.before
        if self.awaited is None or version == served or self.of_draft is None:
            return
        assert before is not None, "nothing is awaited where it is not known"
        brought = self.of_draft - before
        is_evidence = brought > -CHANGED and self.awaited >= LEAST_PROMISE
        self.newest = (brought, self.awaited) if is_evidence else None
        self.num_shown += 1
        if self.num_shown >= SHOWS_IN:
            self.awaited = None

    def forget_rounds(self) -> None:
        self.brought, self.promised = Fading(KEEP_ROUND), Fading(KEEP_ROUND)
        self.newest = self.awaited = None
        self.settled, self.num_settled = 0.0, 0

    def note_recall(self) -> None:
        """An earlier draft serves: how fast it is says nothing of the newest."""
        if self.newest is not None:
            self.settled, self.num_settled = self.in_all, self.num_settled + 1
        self.newest = self.awaited = None

    def _settle(self) -> None:
        if self.newest is not None:
            self.settled, self.num_settled = self.in_all, self.num_settled + 1
            self.brought.add(self.newest[0])
            self.promised.add(self.newest[1])
        self.newest = self.awaited = None


@dataclass(slots=True)
class Progress:
    """The errors that rounds' drafts make less, by their gates."""

    shares: Fading = field(default_factory=lambda: Fading(KEEP_ROUND))
    num_unjudged: int = 0
    """In a row."""

    def add(self, outcome: RoundOutcome, *, may_serve: bool, num: float = 1.0) -> float:
        """A round has ended that did the work of so many. Returns its share; one that was not
        judged says nothing, unless many were not."""
        is_unjudged = outcome.eval is None and not outcome.discarded
        self.num_unjudged = self.num_unjudged + 1 if is_unjudged else 0
        if 0 < self.num_unjudged <= MOST_UNJUDGED:
            return self.of_rounds(num)
        share = 0.0
        if may_serve and outcome.eval is not None and outcome.eval.alpha_base < 1:
            errors, left = 1 - outcome.eval.alpha_base, 1 - outcome.eval.alpha_candidate
            share = max(1 - left / errors, 0.0)
        self.shares.add(1 - (1 - share) ** (1 / num))
        return share

    def of_rounds(self, num: float) -> float:
        """Share expected of the next rounds together. Of a first one it is `FEWER_ERRORS`, and
        that weighs as much as a round that was measured."""
        prior = 1 - (1 - KEEP_ROUND) * self.shares.weight
        of_one = (prior * FEWER_ERRORS + self.shares.total) / (prior + self.shares.weight)
        return float(1 - (1 - of_one) ** num)


@dataclass(slots=True)
class Attempts:
    """To learn the traffic: the rounds between two changes of it are one. Those in vain are paid
    off at `VAIN_SHARE` of the time, from the end of each round on, before the next may begin.

    Example:
        attempts = Attempts()
        attempts.add_round(60.0, 10.0)
        attempts.fail(0.2, now=80.0, most_s=3600.0); attempts.wait_s(80.0)  -> 80.0
    """

    rounds: list[tuple[float, float]] = field(default_factory=list)
    """When each round of the present one ended, and its seconds."""
    free_at: float = -math.inf
    """When those before are paid off."""
    looked_at: float = -math.inf

    @property
    def seconds(self) -> float:
        """Of the rounds of the present one."""
        return sum(seconds for _, seconds in self.rounds)

    def look(self, now: float) -> None:
        """Nothing is owed where the clock was set back."""
        if now < self.looked_at:
            self.succeed()
        self.looked_at = now

    def add_round(self, ended_at: float, seconds: float) -> None:
        self.rounds = [*self.rounds, (ended_at, seconds)][-MOST_OWED:]

    def succeed(self) -> None:
        """It paid: other traffic is worth an attempt."""
        self.free_at, self.rounds = -math.inf, []

    def fail(self, taken: float, now: float, most_s: float) -> None:
        """It was in vain. A second of a round takes `taken` from an engine. Nothing waits longer
        than `most_s`."""
        for ended_at, seconds in self.rounds:
            self.free_at = max(self.free_at, ended_at) + seconds * taken / VAIN_SHARE
        self.free_at, self.rounds = min(self.free_at, now + most_s), []

    def wait_s(self, now: float) -> float:
        """Until the next round."""
        return max(self.free_at - now, 0.0)
