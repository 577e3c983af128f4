"""Whether a training round pays: what it takes from the engines, against what it is expected to
save them.

    heartbeats ─► pace in a round, over that just before ───► slowdown ─┐
    rounds ─────► how long they take ───────────────────────────────────┴─► taken
    gates ──────► errors that rounds take from the draft ───────────────┐
    heartbeats ─► worth of drafts of fewer errors ──────────────────────┤
    heartbeats ─► worth of the draft after a round, over that before ───┴─► saved, within
                                                                            `payback_seconds`

Both are seconds of the engines' time, idle time left out. A trainer on a machine of its own takes
nothing; one that shares a core, or a GPU, slows every step down while it works. What it takes is
the median of rounds: one may fall on a machine that was suspended. One that replayed more than the
least (`effort.py`) counts as so many of the least, one after the other.

What rounds bring is what the engine promises of a draft with fewer errors, times the share of such
promises that came true: beside a memory, a draft that errs far less may make nothing faster. A
draft that is not worth its passes yet may need several rounds to be, so the next few are looked at
together. What is not measured yet forbids nothing: the first rounds show it. Engines that cannot
tell (a fixed k) are left out.

On other traffic all of this begins anew, and only rounds can tell. Those that brought too little
are an attempt in vain, and the next one waits until it was `VAIN_SHARE` of the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from osd.common.clock import Skew
from osd.common.wording import span
from osd.config.schema import TrainerConfig
from osd.control.policy import Decision
from osd.control.round_effects import (
    MIN_AT_REST,
    NEWEST_ROUNDS,
    Attempts,
    Fading,
    Gain,
    Pace,
    Progress,
)
from osd.records import NO_TRACES, Payback, ReplicaStatus, RoundOutcome

KEEP_BUSY = 0.997
"""Weight that evidence keeps after one more heartbeat."""
SETTLE_S = 0.7
"""Seconds in which the pace follows a beginning or an end of training."""
LATE_S = 3.0
"""Seconds after a round in which heartbeats are read that were sent in it."""
MOST_REST_S = 6.0
"""Seconds that a round waits, at most, for engines to show their pace without it, and what the
draft of the last one brought."""
MAX_PACE = 1e9
"""A heartbeat that says more, or as much less, is no measurement."""
MIN_BUSY = 0.02
"""An engine that has requests in fewer of its heartbeats neither loses nor gains."""
STRETCHES = (1, 2, 4, 8)
"""Rounds that are looked at together."""
LONGER, AFFORDABLE = 4, 0.25
"""Rounds of the least whose work a longer one may do, and the share of what they save that they may
take then."""
MIN_ROUNDS = 2
"""That show what rounds take, before one may be longer."""
WAKE = 1.2
"""A rest ends when what is saved exceeds what is taken by this factor."""


@dataclass(slots=True)
class _Engine:
    """What the heartbeats of a replica have shown."""

    busy: Fading = field(default_factory=lambda: Fading(KEEP_BUSY))
    """Share of the heartbeats with requests."""
    pace: Pace = field(default_factory=Pace)
    gain: Gain = field(default_factory=Gain)
    version: int = 0
    seen_at: float = 0.0
    """Time of its newest heartbeat, by its own clock."""
    skew: Skew = field(default_factory=Skew)

    @property
    def is_unknown(self) -> bool:
        """Whether it serves, and has not shown what rounds take from it, or bring."""
        is_measured = self.pace.slowdown is not None and self.gain.promise is not None
        return not is_measured and self.busy.mean >= MIN_BUSY

    @property
    def is_silent(self) -> bool:
        """Whether it serves, and a moment without the trainer would show more of a round."""
        is_pace_open = self.pace.slowdown is None and self.pace.at_rest.weight < MIN_AT_REST
        is_open = is_pace_open or self.gain.is_open
        return is_open and self.gain.promise is not None and self.busy.mean >= MIN_BUSY


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
        self._least = trainer.replay_batches
        self._engines: dict[str, _Engine] = {}
        """Of all replicas there ever were: one that is away for a moment has not changed."""
        self._living: list[_Engine] = []
        self._progress = Progress()
        self._round_s: deque[float] = deque(maxlen=NEWEST_ROUNDS)
        """Of the newest rounds, had they replayed the least."""
        self._rounds_at = 0.0
        """End of the newest round."""
        self._is_training, self._changed_at = False, 0.0
        self._has_outcome = False
        """Whether the newest round has ended with one, and its paces are not settled yet."""
        self._looks_until = -math.inf
        """Until when heartbeats show the pace beside a look at earlier drafts."""
        self._attempts = Attempts()
        self.is_resting = False

    def look(self, statuses: Iterable[ReplicaStatus], *, is_training: bool, now: float) -> None:
        """Take the newest heartbeat of each living replica."""
        self._attempts.look(now)
        if math.isfinite(self._looks_until):  # also where the clock was set back
            self._looks_until = min(self._looks_until, now + SETTLE_S)
        if is_training != self._is_training:
            self._change(is_training, now)
        living = {status.replica: status for status in statuses}
        for name, status in living.items():
            engine = self._engines.setdefault(name, _Engine())
            if status.at != engine.seen_at:
                self._add(engine, status, now)
        if self._has_outcome and not is_training and now - self._changed_at >= LATE_S:
            self._settle()
        if living:
            self._living = [self._engines[name] for name in living]
            self._rest_or_wake()

    def add_round(
        self, outcome: RoundOutcome, now: float, *, is_published: bool, is_on_trial: bool = False
    ) -> None:
        """A round has ended. `is_on_trial`: the draft before it is, for which a better one is
        refused; the next will have learnt as much."""
        if outcome.discarded == NO_TRACES:
            return
        self._has_outcome, self._rounds_at = True, now
        self._attempts.add_round(now, outcome.seconds)
        batches = self._least if outcome.replay_batches is None else outcome.replay_batches
        num = max((1 + batches) / (1 + self._least), 1.0)
        self._round_s.append(outcome.seconds / num)
        is_better = outcome.eval is not None and outcome.eval.diff_low > 0
        may_serve = is_published or (is_on_trial and is_better)
        share = self._progress.add(outcome, may_serve=may_serve, num=num)
        for engine in self._engines.values():
            engine.gain.end_round(share, is_published=is_published)
        self._rest_or_wake()

    def begin_look(self) -> None:
        """The trainer compares earlier drafts: what engines show now is neither their pace in a
        round nor that without the trainer."""
        self._looks_until = math.inf

    def end_look(self, now: float) -> None:
        """It has compared them."""
        self._looks_until = now + SETTLE_S

    def is_measuring(self, now: float) -> bool:
        """Whether what the last round took and brought is being measured, for which the trainer
        has to be idle for a moment."""
        return bool(self._within_s) and not self.is_resting and self._must_rest_first(now)

    def note_recall(self) -> None:
        """An earlier draft serves: how fast it is says nothing of the newest round."""
        for engine in self._engines.values():
            engine.gain.note_recall()

    def renew(self, now: float, *, has_rested: bool) -> None:
        """The traffic has changed: what earlier rounds brought says nothing of the next one.
        `has_rested`: whether training did, for whatever reason."""
        if has_rested:
            self._end_attempt(now)
        self._progress = Progress()
        for engine in self._engines.values():
            engine.gain.forget_rounds()
        self._rest_or_wake()

    def is_waiting(self, now: float) -> bool:
        """Whether the next round waits, as earlier attempts were in vain."""
        return self._attempts.wait_s(now) > 0

    def decide(self, now: float) -> Decision:
        """Whether a round pays now, and why."""
        if self.is_measuring(now):
            return Decision(False, "what the last round took and brought is being measured")
        if wait_s := self._attempts.wait_s(now):
            text = (
                f"at rest: rounds on other traffic brought too little; the next in {span(wait_s)}"
            )
            return Decision(False, text)
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

    def may_be_longer(self) -> bool:
        """Whether a round may replay more than the least: where rounds may take anything, or take
        nothing, or the next `LONGER` of the least take `AFFORDABLE` of what they save."""
        if not self._within_s:
            return True
        found = self.figures()
        is_known = not any(engine.is_unknown for engine in self._living)
        if found is None or not is_known or len(self._round_s) < MIN_ROUNDS:
            return False
        return found.taken_s <= AFFORDABLE * self._saved_s(LONGER, self._living)

    def figures(self) -> Payback | None:
        """None while it is not known what a round takes, or brings."""
        measured = self._measured()
        if not self._within_s or not measured or not self._round_s:
            return None
        engines = [engine for engine, _ in measured]
        return Payback(
            taken_s=_taken(measured) * median(self._round_s),
            saved_s=max(self._saved_s(num, engines) for num in STRETCHES),
            within_s=self._within_s,
            slowdown=max(slowdown for _, slowdown in measured),
            is_resting=self.is_resting,
        )

    # Inside

    def _measured(self) -> list[tuple[_Engine, float]]:
        """The living engines of which it is known what rounds take and bring, each with its
        slowdown."""
        return [
            (engine, slowdown)
            for engine in self._living
            if (slowdown := engine.pace.slowdown) is not None and engine.gain.promise is not None
        ]

    def _end_attempt(self, now: float) -> None:
        measured = self._measured()
        busy = sum(engine.busy.mean for engine, _ in measured)
        if not self._within_s or not busy:
            return
        saved_s, is_sure = 0.0, False
        for engine, _ in measured:
            saved_s += engine.busy.mean * (1 - math.exp(-max(engine.gain.in_all, 0.0)))
            is_sure |= engine.gain.is_sure
        taken = _taken(measured)
        if is_sure and saved_s * self._within_s >= taken * self._attempts.seconds:
            self._attempts.succeed()
        else:
            self._attempts.fail(taken / busy, now, self._max_idle_s)

    def _saved_s(self, num: int, engines: Sequence[_Engine]) -> float:
        """By each of the next `num` rounds, in the mean."""
        share = self._progress.of_rounds(num)
        saved = sum(e.busy.mean * (1 - math.exp(-e.gain.of_share(share))) for e in engines)
        return saved * max(self._within_s - num * median(self._round_s), 0.0) / num

    def _change(self, is_training: bool, now: float) -> None:
        if is_training:
            self._settle()
            for engine in self._engines.values():
                engine.pace.begin_round()
                engine.gain.begin_round(engine.version)
        else:
            self._rounds_at = now
        self._is_training, self._changed_at = is_training, now

    def _settle(self) -> None:
        """All is known of what the newest round took. One without an outcome shows nothing: its
        trainer may have failed long before it was given up."""
        for engine in self._engines.values():
            if self._has_outcome:
                engine.pace.end_round()
            engine.pace.before = None
        self._has_outcome = False

    def _add(self, engine: _Engine, status: ReplicaStatus, now: float) -> None:
        sent_at = engine.skew.by_ours(status.at, now)
        engine.seen_at, engine.version = status.at, status.version
        engine.busy.add(float(status.num_running > 0))
        report = status.speculation
        if report is None:
            return
        engine.gain.add(report.worth, status.version)
        if sent_at < self._looks_until:
            return
        if not status.num_running or report.pace is None or not math.isfinite(report.pace):
            return
        pace = math.log(min(max(report.pace, 1 / MAX_PACE), MAX_PACE))
        if sent_at < self._changed_at:  # it was sent before the trainer began or ended
            if not self._is_training:
                engine.pace.within.add(pace)
        elif sent_at - self._changed_at >= SETTLE_S:
            (engine.pace.within if self._is_training else engine.pace.at_rest).add(pace)

    def _must_rest_first(self, now: float) -> bool:
        """Whether a round that begins now would show nothing of what rounds take, or hide what the
        last one brought."""
        # Not in a rest that has yet to begin, since the clock was set back.
        is_short = 0 <= now - self._changed_at < MOST_REST_S
        return is_short and any(engine.is_silent for engine in self._living)

    def _rest_or_wake(self) -> None:
        found = self.figures()
        if found is None:
            self.is_resting = False
        else:
            least = found.taken_s * (WAKE if self.is_resting else 1.0)
            self.is_resting = found.saved_s < least


def _taken(measured: Iterable[tuple[_Engine, float]]) -> float:
    """Seconds of the engines' time that a second of the trainer takes."""
    return sum(engine.busy.mean * (1 - 1 / slowdown) for engine, slowdown in measured)
