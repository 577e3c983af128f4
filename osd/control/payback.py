"""Whether a training round pays: what it takes from the engines, against what it is expected to
save them.

    heartbeats ─► pace while training, over pace at rest ─► slowdown ─┐
    rounds ─────► how long they take ─────────────────────────────────┴─► taken
    rounds ─────► errors of the draft that they remove ───────────────┐
    heartbeats ─► speed with a draft of fewer errors ─────────────────┴─► saved, within
                                                                          `payback_seconds`

Both are seconds of the engines' time, idle time left out. A trainer on a machine of its own takes
nothing; one that shares a core, or a GPU, slows every step down while it works. What is not
measured yet forbids nothing: the first rounds show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from osd.common.wording import span
from osd.config.schema import TrainerConfig
from osd.control.policy import Decision
from osd.records import FEWER_ERRORS, NO_TRACES, Payback, ReplicaStatus, RoundOutcome

KEEP_PACE, KEEP_BUSY, KEEP_ROUND = 0.98, 0.997, 0.7
"""Weight that evidence keeps after one more heartbeat, heartbeat, and round."""
MIN_SAMPLES = 5.0
"""Heartbeats that show a pace."""
SETTLE_S = 0.7
"""Seconds in which the pace follows a beginning or an end of training."""
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
    """What the heartbeats of a replica have shown."""

    training: Fading = field(default_factory=lambda: Fading(KEEP_PACE))
    """Logarithm of the pace while the trainer works."""
    resting: Fading = field(default_factory=lambda: Fading(KEEP_PACE))
    busy: Fading = field(default_factory=lambda: Fading(KEEP_BUSY))
    """Share of the heartbeats with requests."""
    of_better: float | None = None
    seen_at: float = 0.0

    @property
    def slowdown(self) -> float | None:
        """Time of a step while the trainer works, over that at rest."""
        if min(self.training.weight, self.resting.weight) < MIN_SAMPLES:
            return None
        return math.exp(max(self.training.mean - self.resting.mean, 0.0))


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
        self._round_s = Fading(KEEP_ROUND)
        self._removed = self._nothing_known()
        self._rounds_at = 0.0
        """End of the newest round."""
        self._was_training, self._changed_at, self._changed_before = False, 0.0, 0.0
        """Whether the trainer worked in the last look, since when that is so, and since when it was
        the other way round before."""
        self.is_resting = False

    def look(self, statuses: Iterable[ReplicaStatus], *, is_training: bool, now: float) -> None:
        """Take the newest heartbeat of each living replica."""
        if is_training != self._was_training:
            self._rounds_at = now if self._was_training else self._rounds_at
            self._was_training = is_training
            self._changed_before, self._changed_at = self._changed_at, now
        living = {status.replica: status for status in statuses}
        self._engines = {name: self._engines.get(name) or _Engine() for name in living}
        for name, status in living.items():
            if status.at > self._engines[name].seen_at:
                self._add(self._engines[name], status)
        self._rest_or_wake()

    def add_round(self, outcome: RoundOutcome, *, is_published: bool) -> None:
        """A round has ended. Errors that it removed count where its draft serves."""
        if outcome.discarded == NO_TRACES:
            return
        self._round_s.add(outcome.seconds)
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
        engines = [
            (engine.busy.mean, engine.slowdown, engine.of_better)
            for engine in self._engines.values()
        ]
        measured = [
            (busy, slowdown, better)
            for busy, slowdown, better in engines
            if slowdown is not None and better is not None
        ]
        if not measured or len(measured) < len(engines) or not self._round_s.weight:
            return None
        removed = self._removed.mean
        taken = sum(busy * (1 - 1 / slowdown) for busy, slowdown, _ in measured)
        saved = sum(busy * (1 - better**-removed) for busy, _, better in measured)
        return Payback(
            taken_s=taken * self._round_s.mean,
            saved_s=saved * self._within_s,
            within_s=self._within_s,
            slowdown=max(slowdown for _, slowdown, _ in measured),
            is_resting=self.is_resting,
        )

    # Inside

    def _add(self, engine: _Engine, status: ReplicaStatus) -> None:
        engine.seen_at = status.at
        engine.busy.add(float(status.num_running > 0))
        report = status.speculation
        if report is None:
            return
        if report.worth is not None:
            engine.of_better = report.worth.of_better
        # A heartbeat may have been sent before the trainer began or ended.
        is_late = status.at < self._changed_at
        since = self._changed_before if is_late else self._changed_at
        if status.num_running and status.at - since >= SETTLE_S:
            was_training = self._was_training is not is_late
            paces = engine.training if was_training else engine.resting
            paces.add(math.log(max(report.pace, 1e-3)))

    def _rest_or_wake(self) -> None:
        found = self.figures() if self._within_s else None
        if found is None:
            self.is_resting = False
        else:
            least = found.taken_s * (WAKE if self.is_resting else 1.0)
            self.is_resting = found.saved_s < least

    def _nothing_known(self) -> Fading:
        fading = Fading(KEEP_ROUND)
        fading.add(PRIOR)
        return fading
