"""How much of what is stored a round replays: as much as there is time for, where the engines lose
little by it.

    newest round: seconds, steps ─────► what a step takes ────────────┐
    from its beginning to the next ───► half of that time ────────────┼─► batches replayed for each
    payback: what saves far more ─────► `PaybackMeter.affordable_s` ──┘   one of new traces

New traffic is learnt by many passes over little data: where requests are few, a trainer with a
device of its own would wait for them most of the time. The first round after a rest, or a start, is
of the least size: what was known of the time between rounds is of before, and it is to end soon.
"""

from __future__ import annotations

import math

from osd.config.schema import TrainerConfig
from osd.records import RoundOutcome

SHARE_OF_TIME = 0.5
"""Of the time from one round to the next that rounds may take: traces that come meanwhile wait, and
the rate at which they come is a guess."""


class Effort:
    """Told of each round. One per deployment.

    Example:
        effort = Effort(config.trainer)
        batches = effort.begin_round(32, now=time.monotonic(), affordable_s=math.inf)  # 8
        outcome = trainer.run_round(base, line, batches)
        effort.end_round(outcome)
        effort.begin_round(32, now=time.monotonic(), affordable_s=math.inf)  # up to 32
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        self._batch_size, self._most_new = trainer.batch_size, trainer.max_new_traces
        self._least = trainer.replay_batches
        self._most = max(self._least, trainer.max_replay_batches)
        self._began_at = math.nan
        """When the newest round began; NaN after a rest."""
        self._step_s = math.nan
        """Seconds of a step, its share of all that a round does beside; NaN when not known."""

    def begin_round(self, num_new: int, *, now: float, affordable_s: float) -> int:
        """Batches to replay for every batch of new traces.

        now: seconds of any clock. affordable_s: seconds that the round may take for the engines'
        sake; 0 where that is not known.
        """
        budget_s = min(SHARE_OF_TIME * (now - self._began_at), affordable_s)
        step_s, self._began_at, self._step_s = self._step_s, now, math.nan
        steps_of_new = min(max(num_new, 1), self._most_new) / self._batch_size
        if math.isnan(budget_s) or math.isnan(step_s):
            return self._least
        affordable = budget_s / (step_s * steps_of_new) - 1 if step_s > 0 else math.inf
        return int(min(max(affordable, self._least), self._most))

    def end_round(self, outcome: RoundOutcome) -> None:
        """A round has ended with an outcome."""
        if outcome.num_steps:
            self._step_s = outcome.seconds / outcome.num_steps

    def rest(self) -> None:
        """Training rests."""
        self._began_at = math.nan
