"""What the control of speculation has done: counters since the start, the newest changes of plan,
and a log of all steps where asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any

from osd.records import PlanChange, PlanTotals
from serving.speculation.goodput import Plan
from serving.speculation.step_seen import StepSeen

MAX_CHANGES = 50
MAX_LOG = 20_000


class Accounts:
    """One per engine, in the scheduler's thread."""

    def __init__(self) -> None:
        self._changes: deque[PlanChange] = deque(maxlen=MAX_CHANGES)
        self._totals: dict[str, PlanTotals] = {}
        """By the plan's name."""
        self._sources = {"draft": [0, 0], "memory": [0, 0]}
        """Whose tokens were verified -> [verified, accepted]"""
        self._num_decisions, self._decision_s = 0, 0.0
        self._log: deque[dict[str, Any]] | None = None

    def add_change(self, old: Plan, new: Plan, batch: int, reason: str) -> None:
        """The next steps follow another plan."""
        change = PlanChange(at=time.time(), old=old.name, new=new.name, batch=batch, reason=reason)
        self._changes.append(change)

    def add_decision(self, seconds: float) -> None:
        """A plan was chosen, which took this time."""
        self._num_decisions += 1
        self._decision_s += seconds

    def add_step(self, plan: Plan, seconds: float, tokens: int) -> None:
        """A step of nothing but decoding brought so many tokens."""
        totals = self._totals.setdefault(plan.name, PlanTotals())
        totals.steps += 1
        totals.seconds += seconds
        totals.tokens += tokens
        totals.predicted_seconds += plan.seconds

    def add_sources(self, step: StepSeen, is_counted: Callable[[str], bool]) -> None:
        """Whose tokens a step verified and accepted, of the requests that count."""
        for req_id, drafted, accepted in zip(
            step.req_ids, step.drafted, step.accepted, strict=True
        ):
            if drafted and is_counted(req_id):
                counts = self._sources["memory" if req_id in step.from_memory else "draft"]
                counts[0] += drafted
                counts[1] += accepted

    def keep_log(self, keep: bool) -> list[dict[str, Any]]:
        """Returns the log so far. From now on a new one is kept, or none."""
        log = list(self._log or ())
        self._log = deque(maxlen=MAX_LOG) if keep else None
        return log

    def write(self, step: StepSeen) -> None:
        """Add a step to the log, if one is kept."""
        if self._log is None:
            return
        plan, reason, *_ = step.stamp
        self._log.append(
            {
                "plan": plan.name,
                "reason": reason,
                "predicted_seconds": plan.seconds,
                "batch": len(step.req_ids),
                "drafted": sum(step.drafted),
                "accepted": sum(step.accepted),
                "from_memory": len(set(step.req_ids) & set(step.from_memory)),
                "tokens": step.num_delivered,
                "passes": step.draft.passes,
                "context": step.context,
                "is_pure": step.is_pure,
                "seconds": step.seconds,
            }
        )

    def report(self) -> dict[str, Any]:
        """The fields of `SpeculationReport` that this knows."""
        mean_s = self._decision_s / self._num_decisions if self._num_decisions else 0.0
        return {
            "plans": {name: copy(totals) for name, totals in self._totals.items()},
            "changes": tuple(self._changes),
            "decision_us": 1e6 * mean_s,
            "sources": {name: (tested, right) for name, (tested, right) in self._sources.items()},
        }
