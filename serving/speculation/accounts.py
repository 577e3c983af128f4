"""What the control of speculation has done: counters since the start, the newest changes of plan, and, where asked for,
every step."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from serving.speculation.goodput import Plan

MAX_CHANGES = 50
MAX_LOG = 20_000


class Accounts:
    """One per engine, in the scheduler's thread."""

    def __init__(self) -> None:
        self._changes: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        self._totals: dict[str, list[float]] = {}
        """plan -> [steps, seconds, tokens, seconds predicted]"""
        self._num_decisions, self._decision_s = 0, 0.0
        self._log: deque[dict[str, Any]] | None = None

    def add_change(self, old: Plan, new: Plan, batch: int, reason: str) -> None:
        """The next steps are planned otherwise."""
        self._changes.append({"at": time.time(), "from": old.name, "to": new.name, "batch": batch, "reason": reason})

    def add_decision(self, seconds: float) -> None:
        """A plan was chosen, which took so long."""
        self._num_decisions += 1
        self._decision_s += seconds

    def add_step(self, plan: Plan, seconds: float, tokens: int) -> None:
        """A step of nothing but decoding has brought so many tokens."""
        totals = self._totals.setdefault(plan.name, [0, 0.0, 0, 0.0])
        totals[0] += 1
        totals[1] += seconds
        totals[2] += tokens
        totals[3] += plan.seconds

    def keep_log(self, keep: bool) -> list[dict[str, Any]]:
        """The log so far; from now on one is kept anew, or none."""
        log = list(self._log or ())
        self._log = deque(maxlen=MAX_LOG) if keep else None
        return log

    @property
    def has_log(self) -> bool:
        return self._log is not None

    def write(self, plan: Plan, **step: Any) -> None:
        """Add a step to the log, which is kept (`has_log`)."""
        assert self._log is not None
        self._log.append({"plan": plan.name, "predicted_seconds": plan.seconds, **step})

    def report(self) -> dict[str, Any]:
        """{"plans": {name: {"steps", "seconds", "tokens", "predicted_seconds"}}, "changes": [{"at", "from", "to",
        "batch", "reason"}], "decision_us"}"""
        return {
            "plans": {
                name: {"steps": int(steps), "seconds": took, "tokens": int(tokens), "predicted_seconds": predicted}
                for name, (steps, took, tokens, predicted) in self._totals.items()
            },
            "changes": list(self._changes),
            "decision_us": 1e6 * self._decision_s / self._num_decisions if self._num_decisions else 0.0,
        }
