"""Decides when training is worth its cost: while the draft learns, when acceptance falls, and after
a long time without a round.

    rounds ──► `patience_rounds` in a row without gain ─► rest
    windows, in a rest of any reason ─► recent α far below the usual ─► learn
                                                     (TIDE's rule, arXiv 2602.05145)
    changes by hand, rollbacks ─────────────────────────► learn
    `max_idle_seconds` without a round ─────────────────► one round

Each average goes by the tokens served, not by those tested: a draft that is of no use on new
traffic is hardly tried there, and what it was worth before would hide that for long. Where it is
seldom tried the standard error is large. What is recent when a rest begins is usual in it. The
draft that a round has just made may serve better than that: a clear rise is usual, too. The state
is rebuilt from the feed when the process restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from osd.config.schema import TrainerConfig
from osd.control.policy import Decision
from osd.records import NO_TRACES, Event, MetricPoint, RoundOutcome, SpecWindow, SwapReport

NEWEST_TOKENS, RECENT_TOKENS, USUAL_TOKENS = 500, 4_000, 64_000
"""Half-lives, in output tokens."""
NEWEST_REQUESTS, LATE, LEAST_FALL = 6, 8, 0.1
"""Of a `Fall`: requests of the newest half-life, if they are longer; times as long as that is the
one of late; and by how much α is lower, beyond chance."""
STRETCH, MOST_STRETCH, MIN_DRAFTS = 250, 1000, 8
"""Output tokens of which α is taken together, at least, and where there were fewer drafts: one
that ends early tests few tokens, so that the α of one draft is too low in the mean."""
MIN_TESTED = 24
"""Draft tokens (faded) that must be tested before an average counts."""
SURE = 2.0
"""A fall must exceed the margin by this many standard errors."""
MAX_LABELS = 64
"""Traffic classes watched on their own. Further ones count only in the total."""
LABEL_SECONDS = 3600.0
"""Seconds after which a class that was not served again makes room for another."""
ENDS_OF_A_ROUND = frozenset({"published", "refused", "discarded"})
WAKING = frozenset({"rolled_back", "promoted", "unpinned"})
"""Events after which there is another draft to improve."""
RESTS = {"rests": True, "learns": False}
"""Events of the controller, and whether training rests after them."""


@dataclass(slots=True)
class FadingAlpha:
    """Conditional acceptance, of which the old fades exponentially. A stretch of output tokens
    weighs as much where the draft was hardly tried as where it proposed all of them.

    Example:
        usual = FadingAlpha(64_000)
        usual.add(window); usual.alpha  -> 0.81
    """

    half_life: float
    """Output tokens."""
    tested: float = 0.0
    """Draft tokens that were tested, faded."""
    weight: float = 0.0
    """Output tokens of the stretches that had any, faded."""
    total: float = 0.0
    """Their α, by weight."""
    variance: float = 0.0
    """Of `total`, for independent tokens."""
    _open: tuple[int, int, int, int] = (0, 0, 0, 0)
    """(output tokens, drafts, tested, accepted) of a stretch that is not long enough yet."""

    def add(self, window: SpecWindow) -> None:
        num_tokens, num_drafts, tested, accepted = self._open
        num_tokens += window.num_output_tokens
        num_drafts += window.num_drafts
        tested += sum(window.num_tested_per_pos)
        accepted += sum(window.num_accepted_tokens_per_pos)
        self._open = num_tokens, num_drafts, tested, accepted
        least = STRETCH if num_drafts >= MIN_DRAFTS else MOST_STRETCH
        if num_tokens >= least:
            self._open = 0, 0, 0, 0
            self._add(num_tokens, tested, accepted)

    def _add(self, num_tokens: int, tested: int, accepted: int) -> None:
        kept = 0.5 ** (num_tokens / self.half_life)
        self.tested, self.weight = self.tested * kept, self.weight * kept
        self.total, self.variance = self.total * kept, self.variance * kept**2
        if not tested:
            return
        # One added token keeps the variance above 0.
        alpha = (accepted + 0.5) / (tested + 1)
        weight = self.half_life * (1 - kept)  # of many tokens the first have faded, too
        self.tested += tested
        self.weight += weight
        self.total += weight * accepted / tested
        self.variance += weight**2 * alpha * (1 - alpha) / (tested + 1)

    def become(self, other: FadingAlpha) -> None:
        """The same α, with the weight of all that this average holds."""
        scale = self.half_life / other.half_life
        self.tested, self.weight = other.tested * scale, other.weight * scale
        self.total, self.variance = other.total * scale, other.variance * scale**2

    @property
    def alpha(self) -> float | None:
        """None while too little was tested."""
        return self.total / self.weight if self.tested >= MIN_TESTED else None

    @property
    def error(self) -> float:
        """Standard error of `alpha`, 0.5 while nothing was tested."""
        return math.sqrt(self.variance) / self.weight if self.weight else 0.5


@dataclass(slots=True)
class Watched:
    """The two averages of one traffic class."""

    recent: FadingAlpha = field(default_factory=lambda: FadingAlpha(RECENT_TOKENS))
    usual: FadingAlpha = field(default_factory=lambda: FadingAlpha(USUAL_TOKENS))
    usual_error: float = 0.0
    """Standard error of the recent α when it became the usual one."""
    seen_at: float = 0.0
    """End of the newest window."""

    def add(self, window: SpecWindow) -> None:
        self.seen_at = window.at
        self.recent.add(window)
        self.usual.add(window)

    def settle(self) -> None:
        """Make the recent α the usual one, with the full weight of the longer average."""
        self.usual_error = self.recent.error
        self.usual.become(self.recent)

    def fall(self, margin: float) -> tuple[float, float] | None:
        """(usual, recent) α when the recent one is clearly lower."""
        usual, recent = self.usual.alpha, self.recent.alpha
        if usual is None or recent is None or usual - recent <= margin + self._chance():
            return None
        return usual, recent

    def has_risen(self, margin: float) -> bool:
        """Whether the recent α is clearly higher than the usual one."""
        usual, recent = self.usual.alpha, self.recent.alpha
        return usual is not None and recent is not None and recent - usual > margin + self._chance()

    def _chance(self) -> float:
        return SURE * math.hypot(self.recent.error, self.usual_error)


class Fall:
    """Whether α of the last few requests is clearly lower than of late."""

    def __init__(self) -> None:
        self.num_since: int | None = None
        """Requests captured since that was first seen; None while it is not so."""
        self._newest, self._late = FadingAlpha(NEWEST_TOKENS), FadingAlpha(LATE * NEWEST_TOKENS)
        self._faded_tokens = self._faded_finished = 0.0

    def add(self, window: SpecWindow) -> None:
        kept = 0.5 ** (window.num_output_tokens / self._late.half_life)
        self._faded_tokens = self._faded_tokens * kept + window.num_output_tokens
        self._faded_finished = self._faded_finished * kept + window.num_finished
        of_requests = NEWEST_REQUESTS * self._faded_tokens / max(self._faded_finished, 1.0)
        self._newest.half_life = max(NEWEST_TOKENS, of_requests)
        self._late.half_life = LATE * self._newest.half_life
        self._newest.add(window)
        self._late.add(window)
        since = 0 if self.num_since is None else self.num_since + window.num_captured
        self.num_since = since if self._is_low() else None

    def _is_low(self) -> bool:
        newest, late = self._newest.alpha, self._late.alpha
        least = LEAST_FALL + SURE * math.hypot(self._newest.error, self._late.error)
        return newest is not None and late is not None and late - newest > least


class DriftDetector:
    """Decides whether new traces are worth a round. It is given every record of the feed, in order.

    Rounds of other targets are ignored, and so is all before the feed comes to `since`: a new
    target does not inherit the rest of an earlier one.

    Example:
        detector = DriftDetector(config.trainer, target_id="9f2c", since=releases.began_at("9f2c"))
        for _, record in registry.read():
            detector.add(record)
        detector.decide(time.time())
        # Decision(False, "at rest: 6 rounds in a row brought no gain; ...")
    """

    def __init__(self, trainer: TrainerConfig, target_id: str, since: float = 0.0) -> None:
        self._trainer, self._target_id, self._since = trainer, target_id, since
        self._has_begun = False
        """Whether the feed has come to `since`: what follows counts, also where the clock was set
        back."""
        self._is_own = False
        """Whether the newest round was of this target."""
        self._is_conclusive = False
        """Whether the newest round counts: it had held-out traces, or was undone."""
        self._fall = Fall()
        self._all, self._labels = Watched(), dict[str, Watched]()
        """The label that was seen the longest ago comes first."""
        self._num_captured = self._num_fruitless = 0
        self._rounds_at = 0.0
        """End of the newest round."""
        self._may_settle = True
        """Whether what is recent becomes usual when a rest for the price begins: not again before a
        round has ended or the traffic has changed."""
        self._rests_for_price = False
        """Whether training rests as a round would not pay (`payback.py`)."""
        self._is_told = False
        """Whether that was said since the start. Before, the feed tells it of an earlier process;
        later, it tells again what was said."""
        self.is_resting = False
        """Whether it rests as rounds brought no gain."""
        self.woken_by = ""
        """Why the last rest ended; "" when there was none."""
        self.num_wakes = 0
        """Times there was another draft to improve, at rest or not, or other traffic in a rest."""

    def add(self, record: SpecWindow | SwapReport | RoundOutcome | Event | MetricPoint) -> None:
        """Take one record of the feed."""
        if not isinstance(record, RoundOutcome):
            self._has_begun = self._has_begun or record.at >= self._since
            if not self._has_begun:
                return
        match record:
            case SpecWindow():
                self._add_window(record)
            case RoundOutcome():
                self._is_own = record.target_id == self._target_id
                is_undone = record.discarded not in ("", NO_TRACES)
                self._is_conclusive = record.eval is not None or is_undone
            case Event() if record.kind in WAKING:
                self._wake(f"another draft serves ({record.kind.replace('_', ' ')})")
            case Event() if record.kind == "rolled_out":
                # Better candidates were refused while this one was on trial.
                self._num_fruitless, self.is_resting = 0, False
            case Event() if record.kind in RESTS and not self._is_told:
                self._rest_for_price(is_on=RESTS[record.kind])
            case Event() if self._is_own and record.kind in ENDS_OF_A_ROUND:
                self._rounds_at = record.at
                self._end_round(gained=record.kind == "published")

    @property
    def num_captured(self) -> int:
        """Requests captured in all windows so far."""
        return self._num_captured

    @property
    def recent(self) -> FadingAlpha:
        """α of all traffic of late."""
        return self._all.recent

    @property
    def num_since_fall(self) -> int | None:
        """As of `Fall`."""
        return self._fall.num_since

    def note_price_rest(self, *, is_on: bool) -> None:
        """Whether training rests because a round would not pay. What was reckoned of one traffic
        says nothing of another: a fall of α ends this rest, too, unless a round would not pay then
        either."""
        self._is_told = True
        self._rest_for_price(is_on=is_on)

    def _rest_for_price(self, *, is_on: bool) -> None:
        if is_on and not self._rests_for_price:
            self.woken_by = ""
            if self._may_settle:
                self._settle()
        self._rests_for_price = is_on

    def begin(self) -> None:
        """What comes from now on is of this target, whatever the clock says."""
        self._has_begun = True

    def decide(self, now: float) -> Decision:
        """Whether a round is worth it now, and why."""
        if not self.is_resting:
            return Decision(True, self.woken_by or "learning")
        waited = now - self._rounds_at
        if waited >= self._trainer.max_idle_seconds:
            text = f"no round for {waited / 60:.0f} minutes: looking whether there is something to "
            return Decision(True, text + "learn")
        recent, usual = self._all.recent.alpha, self._all.usual.alpha
        text = f"at rest: {self._num_fruitless} rounds in a row brought no gain"
        if recent is not None and usual is not None:
            text += f"; α {recent:.2f}, usually {usual:.2f}"
        return Decision(False, text)

    def _add_window(self, window: SpecWindow) -> None:
        self._fall.add(window)
        self._all.add(window)
        self._num_captured += window.num_captured
        if window.domain:
            self._add_labelled(window)
        if self.is_resting or self._rests_for_price:
            for label, watched in {"": self._all, **self._labels}.items():
                if watched.has_risen(self._trainer.drift_margin):
                    watched.settle()
                if fell := watched.fall(self._trainer.drift_margin):
                    of = f" of {label!r}" if label else ""
                    return self._wake(f"α{of} fell from {fell[0]:.2f} to {fell[1]:.2f}")

    def _add_labelled(self, window: SpecWindow) -> None:
        watched = self._labels.pop(window.domain, None)
        if watched is None and len(self._labels) >= MAX_LABELS:
            label, oldest = next(iter(self._labels.items()))
            if window.at - oldest.seen_at < LABEL_SECONDS:
                return
            del self._labels[label]
        watched = self._labels[window.domain] = watched or Watched()
        watched.add(window)

    def _end_round(self, *, gained: bool) -> None:
        """A round brought gain if its candidate serves."""
        self._may_settle = True
        if not gained and not self._is_conclusive:
            return
        self._num_fruitless = 0 if gained else self._num_fruitless + 1
        patience = self._trainer.patience_rounds
        if gained:
            self.is_resting = False
        elif patience and self._num_fruitless >= patience and not self.is_resting:
            self.is_resting, self.woken_by = True, ""
            self._settle()

    def _settle(self) -> None:
        """A rest begins: what is recent is usual from here on."""
        self._may_settle = False
        for watched in (self._all, *self._labels.values()):
            watched.settle()

    def _wake(self, why: str) -> None:
        self.num_wakes += 1
        if self.is_resting or self._rests_for_price:
            self.woken_by = why
        self.is_resting = self._rests_for_price = False
        self._may_settle = True
        self._num_fruitless = 0
