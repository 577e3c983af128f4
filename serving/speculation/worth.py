"""What the draft is worth, and what a better one would be: how much faster the engine is than
without, as the goodput of the best plans says (`goodput.py`).

    estimates of the draft ──┬─► best goodput now          over that without the draft
                             └─► with fewer of its errors  over that now

A draft that is hardly used, since the memory knows what is served, is worth little, and so is a
better one: the controller holds that against what training takes (`osd/control/payback.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from osd.records import FEWER_ERRORS, DraftWorth
from serving.speculation.goodput import Load, Plan, candidates
from serving.speculation.step_times import StepTimes

KEEP = 0.97
"""Weight that an estimate keeps after one more."""
LEAST_WEIGHT = 3.5
"""Of four estimates: fewer say nothing."""


class Worth:
    """Fading means over the loads the engine decided for, in the scheduler's thread."""

    def __init__(self) -> None:
        self._weight = self._of_draft = self._of_better = 0.0

    def add(self, load: Load, plans: Sequence[Plan], times: StepTimes) -> None:
        """Plans that were foreseen for a load, `off` among them."""
        self._weight = KEEP * self._weight + 1
        of_draft = of_better = 0.0
        if load.draft_BG is not None:
            now = _best(plans)
            of_draft = math.log(now / _best([plan for plan in plans if not plan.passes]))
            better = candidates(load._replace(draft_BG=improved(load.draft_BG)), times)
            of_better = max(math.log(_best(better) / now), 0.0)
        self._of_draft = KEEP * self._of_draft + of_draft
        self._of_better = KEEP * self._of_better + of_better

    def restart(self) -> None:
        """Another draft serves."""
        self._weight = self._of_draft = self._of_better = 0.0

    def report(self) -> DraftWorth | None:
        """None while little is known."""
        if self._weight < LEAST_WEIGHT:
            return None
        return DraftWorth(
            of_draft=math.exp(self._of_draft / self._weight),
            of_better=math.exp(self._of_better / self._weight),
        )


def improved(survival_BG: np.ndarray) -> np.ndarray:
    """float [B, G]: survival of drafts that err less often by the share `FEWER_ERRORS`."""
    before_BG = np.concatenate([np.ones((len(survival_BG), 1)), survival_BG[:, :-1]], 1)
    alpha_BG = survival_BG / np.maximum(before_BG, 1e-12)
    return np.cumprod(1 - (1 - alpha_BG) * (1 - FEWER_ERRORS), 1)


def _best(plans: Sequence[Plan]) -> float:
    return max(plan.goodput for plan in plans)
