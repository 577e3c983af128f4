"""Trials: now and then a promising plan is followed whose step time is not known well enough."""

from __future__ import annotations

from collections.abc import Sequence

from serving.speculation.goodput import Load, Plan, unmeasured
from serving.speculation.step_times import StepTimes

STEPS_PER_TRIAL = 24
"""Steps between two trials."""
ENOUGH_STEPS = 6
"""Steps of a shape that make its time known."""
MAX_TRIALS = 2
"""Trials of a plan while its time is unknown. More would not help: a memory that finds nothing
never makes the step that was asked for."""
STEPS_TO_RETRY = 400
"""Steps after which a plan that was not chosen is tried again, since its evidence is old. One plan
in so many: each is worth little."""
MAX_TRIED = 1024


class Trials:
    """Remembers which plans were followed or tried, and when."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_since_trial = 0
        self._retried_at = 0
        self._used: dict[tuple[int, str, int], tuple[int, int]] = {}
        """(batch, proposer, k) -> its trials, and the step in which it was last chosen"""

    def add_step(self) -> None:
        """A step is about to be scheduled."""
        self._num_steps += 1
        self._num_since_trial += 1

    def next(self, plans: Sequence[Plan], load: Load, times: StepTimes) -> Plan | None:
        """The plan to try now, if any."""
        if self._num_since_trial < STEPS_PER_TRIAL:
            return None

        def is_due(plan: Plan, num_known: int) -> bool:
            num_trials, used_at = self._used.get((load.batch, plan.proposer, plan.k), (0, 0))
            is_new = num_known < ENOUGH_STEPS and num_trials < MAX_TRIALS
            can_be_seen = num_known > 0 or plan.proposer == "draft"
            is_old = self._num_steps - max(used_at, self._retried_at) >= STEPS_TO_RETRY
            return is_new or (can_be_seen and is_old)

        trial = unmeasured(plans, load, times, is_due)
        if trial is not None:
            key = load.batch, trial.proposer, trial.k
            num_trials, used_at = self._used.get(key, (0, 0))
            if self._num_steps - used_at >= STEPS_TO_RETRY:
                self._retried_at = self._num_steps
            self._used[key] = num_trials + 1, self._num_steps
            self._num_since_trial = 0
        return trial

    def note_use(self, batch: int, plan: Plan) -> None:
        """The plan was chosen for this many requests."""
        key = batch, plan.proposer, plan.k
        num_trials, _ = self._used.pop(key, (0, 0))
        self._used[key] = num_trials, self._num_steps  # the newest last
        if len(self._used) > MAX_TRIED:
            del self._used[next(iter(self._used))]
