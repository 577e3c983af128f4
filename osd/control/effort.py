"""How much a round learns from: of what is stored, as much as there is time for, where the engines
lose little by it; of what has come, all, or after a rest the newest.

    newest round: seconds, steps ────────► what a step takes ─────────┐
    time between the newest rounds ──────► half of it ────────────────┼─► batches replayed for each
    `PaybackMeter.may_be_longer` ────────► more than the least, or not ┘   one of new traces

New traffic is learnt by many passes over little data: where requests are few, a trainer with a
device of its own would wait for them most of the time. The first round after a start, a rest or a
pause replays the least: the time between rounds was another one before, and a shift of traffic is
to be answered soon. Most of what came in a rest was of traffic that rounds brought too little on,
and what a round takes is reckoned of a small one: the first after it takes twice as many traces as
make a round, the newest. The others can still be replayed.
"""

from __future__ import annotations

from osd.config.schema import TrainerConfig
from osd.records import RoundOutcome, RoundSize

SHARE_OF_TIME = 0.5
"""Of the time from one round to the next that rounds may take: traces that come meanwhile wait, and
the rate at which they come is a guess."""


class Effort:
    """Told of each round. One per deployment.

    Example:
        effort = Effort(config.trainer)
        size = effort.begin_round(32, now=time.monotonic(), may_be_longer=False)  # 512 new, 8
        outcome = trainer.run_round(base, line, size)
        effort.end_round(outcome)
        effort.begin_round(32, now=time.monotonic(), may_be_longer=True)  # 512 new, 8 to 32
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        self._batch_size, self._most_new = trainer.batch_size, trainer.max_new_traces
        self._most_after_rest = min(2 * trainer.min_new_traces, trainer.max_new_traces)
        self._has_rested = False
        """Whether training has rested since the newest round that had an outcome."""
        self._least = trainer.replay_batches
        self._most = int(trainer.replay_batches * trainer.max_replay_growth)
        if trainer.averaging_rate < 1:  # more passes learn more of poison, too
            self._most = self._least
        self._began_at: float | None = None
        """When the newest round began; None after a rest."""
        self._gap_s: float | None = None
        """From the beginning of the round before it."""
        self._step_s: float | None = None
        """Seconds of a step, with its share of all else that a round does; None when not known."""

    def begin_round(self, num_new: int, *, now: float, may_be_longer: bool) -> RoundSize:
        """How much the next round learns from, where so many new traces are there. `now`: seconds
        of any clock."""
        most_new = self._most_after_rest if self._has_rested else self._most_new
        batches = self._batches(num_new, now, may_be_longer=may_be_longer)
        return RoundSize(new_traces=most_new, replay_batches=batches)

    def end_round(self, outcome: RoundOutcome) -> None:
        """A round has ended with an outcome. After one that was undone the next is a short one."""
        self._has_rested = False
        if outcome.num_steps and outcome.seconds > 0 and not outcome.discarded:
            self._step_s = outcome.seconds / outcome.num_steps

    def rest(self) -> None:
        """Training rests, as rounds bring too little."""
        self.pause()
        self._has_rested = True

    def pause(self) -> None:
        """There are no rounds for a while, whatever they would bring."""
        self._began_at = self._gap_s = None

    def _batches(self, num_new: int, now: float, *, may_be_longer: bool) -> int:
        gap_s = None if self._began_at is None else now - self._began_at
        # A time without traffic is no time to spend: it has to be there twice. Of the second round
        # after a rest one time is known.
        gaps_s = [gap for gap in (gap_s, self._gap_s) if gap is not None]
        step_s = self._step_s
        self._began_at, self._gap_s, self._step_s = now, gap_s, None
        if gap_s is None or step_s is None or not may_be_longer:
            return self._least
        num_steps = SHARE_OF_TIME * min(gaps_s) / step_s
        steps_of_new = min(max(num_new, 1), self._most_new) / self._batch_size
        return int(min(max(num_steps / steps_of_new - 1, self._least), self._most))
