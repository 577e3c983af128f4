"""Whether a training round pays: what it takes from the engines, against what it is expected to
save them.

    heartbeats ─► pace in a round, over that just before ─► slowdown ─┐
    rounds ─────► how long they take ─────────────────────────────────┴─► taken
    rounds ─────► errors of the draft that they remove ───────────────┐
    heartbeats ─► speed with a draft of fewer errors ─────────────────┴─► saved, within
                                                                          `payback_seconds`

Both are seconds of the engines' time, idle time left out. A trainer on a machine of its own takes
nothing; one that shares a core, or a GPU, slows every step down while it works. What is not
measured yet forbids nothing: the first rounds show it. Engines that cannot tell (a fixed k) are
left out. What rounds show is their median: one may fall on a machine that was suspended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from osd.common.wording import span
from osd.config.schema import TrainerConfig
from osd.control.policy import Decision
from osd.records import FEWER_ERRORS, NO_TRACES, Payback, ReplicaStatus, RoundOutcome

KEEP_PACE, KEEP_BUSY, KEEP_ROUND = 0.8, 0.997, 0.7
"""Weight that evidence keeps after one more heartbeat at rest, heartbeat, and round."""
MIN_AT_REST = 1.5
"""Weight of the heartbeats between two rounds, two at least, that show the pace without the
trainer."""
NEWEST_ROUNDS = 9
"""Rounds that count of what they take."""
SETTLE_S = 0.7
"""Seconds in which the pace follows a beginning or an end of training."""
LATE_S = 3.0
"""Seconds after a round in which heartbeats are read that were sent in it."""
MOST_REST_S = 6.0
"""Seconds that a round waits, at most, for engines to show their pace without it."""
MAX_PACE = 1e9
"""A heartbeat that says more, or as much less, is no measurement."""
MIN_BUSY = 0.02
"""An engine that has requests in fewer of its heartbeats neither loses nor gains."""
PRIOR = 1.0
"""Times that a round of a draft of which nothing is known is expected to remove the share
`FEWER_ERRORS` of its errors. It weighs as much as a round."""
MAX_REMOVED = 8.0
WAKE = 1.2
"""A rest ends when what is saved exceeds what is taken by this factor."""


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
        self.weight = self.keep * self.weight + 1
        self.total = self.keep * self.total + value

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class _Engine:
    """What the heartbeats of a replica have shown. Paces are logarithms."""

    busy: Fading = field(default_factory=lambda: Fading(KEEP_BUSY))
    """Share of the heartbeats with requests."""
    at_rest: Fading = field(default_factory=lambda: Fading(KEEP_PACE))
    """Since the newest round."""
    before: float | None = None
    """At rest, just before the newest round."""
    within: Fading = field(default_factory=lambda: Fading(1.0))
    """In the newest round."""
    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST_ROUNDS))
    """How much the pace was higher in a round than before."""
    of_better: float | None = None
    seen_at: float = 0.0

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


class PaybackMeter:
    """Given each look's heartbeats, and each round. One per deployment.

    Example:
        meter = PaybackMeter(config.trainer)
        meter.look(statuses, is_training=False, now=time.time())
        meter.decide(time.time())
        # Decision(False, "at rest: a round takes 2.1 s from the engines, and is expected to ...")
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        self._within_s, self._max_idle_s = trainer.payback_seconds, trainer.max_idle_seconds
        self._engines: dict[str, _Engine] = {}
        """Of all replicas there ever were: one that is away for a moment has not changed."""
        self._living: list[_Engine] = []
        self._round_s: deque[float] = deque(maxlen=NEWEST_ROUNDS)
        self._removed = self._nothing_known()
        self._rounds_at = 0.0
        """End of the newest round."""
        self._is_training, self._changed_at = False, 0.0
        self._has_outcome = False
        """Whether the newest round has ended with one, and its paces are not settled yet."""
        self.is_resting = False

    def look(self, statuses: Iterable[ReplicaStatus], *, is_training: bool, now: float) -> None:
        """Take the newest heartbeat of each living replica."""
        if is_training != self._is_training:
            self._change(is_training, now)
        living = {status.replica: status for status in statuses}
        for name, status in living.items():
            engine = self._engines.setdefault(name, _Engine())
            if status.at != engine.seen_at:
                self._add(engine, status)
        if self._has_outcome and not is_training and now - self._changed_at >= LATE_S:
            self._settle()
        if living:
            self._living = [self._engines[name] for name in living]
            self._rest_or_wake()

    def add_round(self, outcome: RoundOutcome, *, is_published: bool) -> None:
        """A round has ended. Errors that it removed count where its draft serves."""
        if outcome.discarded == NO_TRACES:
            return
        self._has_outcome = True
        self._round_s.append(outcome.seconds)
        removed, report = 0.0, outcome.eval
        if is_published and report is not None:
            left = (1 - report.alpha_candidate) / max(1 - report.alpha_base, 1e-6)
            removed = math.log(max(left, 1e-6)) / math.log(1 - FEWER_ERRORS)
        self._removed.add(min(max(removed, 0.0), MAX_REMOVED))
        self._rest_or_wake()

    def renew(self) -> None:
        """The traffic has changed: what earlier rounds brought says nothing of the next one."""
        self._removed = self._nothing_known()

    def decide(self, now: float) -> Decision:
        """Whether a round pays now, and why."""
        if self._within_s and self._must_rest_first(now):
            return Decision(False, "the engines' pace without the trainer is being measured")
        found, waited = self.figures(), now - self._rounds_at
        if found is None:
            return Decision(True, "learning")
        if self.is_resting and waited >= self._max_idle_s:
            return Decision(True, f"no round for {span(waited)}: measuring what one brings")
        text = (
            f"a round takes {found.taken_s:.1f} s from the engines, and is expected to save "
            f"{found.saved_s:.1f} s of the next {span(found.within_s)} (trainer.payback_seconds)"
        )
        return Decision(not self.is_resting, f"at rest: {text}" if self.is_resting else text)

    def figures(self) -> Payback | None:
        """None while it is not known what a round takes, or brings."""
        measured = [
            (engine.busy.mean, engine.slowdown, engine.of_better)
            for engine in self._living
            if engine.slowdown is not None and engine.of_better is not None
        ]
        if not self._within_s or not measured or not self._round_s:
            return None
        removed = self._removed.mean
        taken = sum(busy * (1 - 1 / slowdown) for busy, slowdown, _ in measured)
        saved = sum(busy * (1 - better**-removed) for busy, _, better in measured)
        return Payback(
            taken_s=taken * median(self._round_s),
            saved_s=saved * self._within_s,
            within_s=self._within_s,
            slowdown=max(slowdown for _, slowdown, _ in measured),
            is_resting=self.is_resting,
        )

    # Inside

    def _change(self, is_training: bool, now: float) -> None:
        if is_training:
            self._settle()
            for engine in self._engines.values():
                engine.begin_round()
        else:
            self._rounds_at = now
        self._is_training, self._changed_at = is_training, now

    def _settle(self) -> None:
        """All is known of the newest round. One without an outcome shows nothing: its trainer may
        have failed long before it was given up."""
        for engine in self._engines.values():
            if self._has_outcome:
                engine.end_round()
            engine.before = None
        self._has_outcome = False

    def _add(self, engine: _Engine, status: ReplicaStatus) -> None:
        engine.seen_at = status.at
        engine.busy.add(float(status.num_running > 0))
        report = status.speculation
        if report is None:
            return
        if report.worth is not None and math.isfinite(report.worth.of_better):
            engine.of_better = max(report.worth.of_better, 1.0)
        if not status.num_running or report.pace is None or not math.isfinite(report.pace):
            return
        pace = math.log(min(max(report.pace, 1 / MAX_PACE), MAX_PACE))
        if status.at < self._changed_at:  # it was sent before the trainer began or ended
            if not self._is_training:
                engine.within.add(pace)
        elif status.at - self._changed_at >= SETTLE_S:
            (engine.within if self._is_training else engine.at_rest).add(pace)

    def _must_rest_first(self, now: float) -> bool:
        """Whether a round that begins now would show nothing of what rounds take."""
        return now - self._changed_at < MOST_REST_S and any(
            engine.slowdown is None
            and engine.of_better is not None
            and engine.busy.mean >= MIN_BUSY
            and engine.at_rest.weight < MIN_AT_REST
            for engine in self._living
        )

    def _rest_or_wake(self) -> None:
        found = self.figures()
        if found is None:
            self.is_resting = False
        else:
            least = found.taken_s * (WAKE if self.is_resting else 1.0)
            self.is_resting = found.saved_s < least

    def _nothing_known(self) -> Fading:
        fading = Fading(KEEP_ROUND)
        fading.add(PRIOR)
        return fading
