"""What the draft is worth, and what better ones would be: how much faster the engine is than
without, as the goodput of the best plans says (`goodput.py`).

    estimates of the draft ──┬─► best goodput now          over that without the draft
                             ├─► with fewer of its errors  over that now
                             └─► with far fewer of them    over that now

A draft that is hardly used, since the memory knows what is served, is worth little, and so is a
better one: the controller holds that against what training takes (`osd/control/payback.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from osd.records import FAR_FEWER_ERRORS, FEWER_ERRORS, DraftWorth
from serving.speculation.goodput import Load, Plan, candidates
from serving.speculation.step_times import StepTimes

KEEP = 0.9
"""Weight that an estimate keeps after one more. What a draft is worth falls within seconds when the
traffic changes: a mean over longer would call the first draft of the new traffic a loss."""
LEAST_WEIGHT = 3.4
"""Of four estimates: fewer say nothing."""


class Worth:
    """Fading means over the loads the engine decided for, in the scheduler's thread."""

    def __init__(self) -> None:
        self._weight, self._sum_3 = 0.0, np.zeros(3)
        """Logarithms: of the draft, of a better one, of a far better one."""

    def add(self, load: Load, plans: Sequence[Plan], times: StepTimes) -> None:
        """Plans that were foreseen for a load, `off` among them."""
        self._weight = KEEP * self._weight + 1
        self._sum_3 *= KEEP
        if load.draft_BG is None:
            return
        now = _best(plans)
        self._sum_3[0] += math.log(now / _best([plan for plan in plans if not plan.passes]))
        for i, share in enumerate((FEWER_ERRORS, FAR_FEWER_ERRORS), 1):
            better = load._replace(draft_BG=improved(load.draft_BG, share))
            self._sum_3[i] += max(math.log(_best(candidates(better, times)) / now), 0.0)

    def restart(self) -> None:
        """Another draft serves."""
        self._weight, self._sum_3 = 0.0, np.zeros(3)

    def report(self) -> DraftWorth | None:
        """None while little is known."""
        if self._weight < LEAST_WEIGHT:
            return None
        of_draft, of_better, of_far_better = np.exp(self._sum_3 / self._weight).tolist()
        return DraftWorth(of_draft=of_draft, of_better=of_better, of_far_better=of_far_better)


def improved(survival_BG: np.ndarray, share: float) -> np.ndarray:
    """float [B, G]: survival of drafts that err less often by a share."""
    before_BG = np.concatenate([np.ones((len(survival_BG), 1)), survival_BG[:, :-1]], 1)
    alpha_BG = survival_BG / np.maximum(before_BG, 1e-12)
    return np.cumprod(1 - (1 - alpha_BG) * (1 - share), 1)


def _best(plans: Sequence[Plan]) -> float:
    return max(plan.goodput for plan in plans)
