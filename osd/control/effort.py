"""How much a round learns from: of what is stored, as much as there is time for, where the engines
lose little by it; of what has come, all, or after a rest the newest.

    newest round: seconds, steps ────────► what a step takes ─────────┐
    time between the newest rounds ──────► half of it ────────────────┼─► batches replayed for each
    `PaybackMeter.may_be_longer` ────────► more than the least, or not ┘   one of new traces

New traffic is learnt by many passes over little data: where requests are few, a trainer with a
device of its own would wait for them most of the time. The first round after a start, a rest or a
pause replays the least: the time between rounds was another one before, and a shift of traffic is
to be answered soon. What came in a rest that other traffic ended was of the traffic that rounds
brought too little on. The first round after it takes as many traces as make one, and as many more
where they came since; the others can still be replayed.
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
        self._fewest_new = trainer.min_new_traces
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

    def begin_round(
        self, num_new: int, *, now: float, may_be_longer: bool, num_since_rest: int | None = None
    ) -> RoundSize:
        """How much the next round learns from, where so many new traces are there. `now`: seconds
        of any clock. `num_since_rest`: as of `DriftDetector`."""
        most_new = self._most_new
        if num_since_rest is not None:
            of_before = self._fewest_new
            most_new = min(of_before + min(num_since_rest, of_before), most_new)
        batches = self._batches(num_new, now, may_be_longer=may_be_longer)
        return RoundSize(new_traces=most_new, replay_batches=batches)

    def end_round(self, outcome: RoundOutcome) -> None:
        """A round has ended with an outcome. After one that was undone the next is a short one."""
        if outcome.num_steps and outcome.seconds > 0 and not outcome.discarded:
            self._step_s = outcome.seconds / outcome.num_steps

    def rest(self) -> None:
        """There are no rounds for a while."""
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
