"""A sweep: a few steps of every kind, with which an engine's step times are measured."""

from __future__ import annotations

from collections.abc import Sequence

from serving.speculation.goodput import OFF, Plan

SWEEP_STEPS = 8
"""Steps of each choice."""


class Sweep:
    """The steps that are left of the newest sweep. They wait until enough requests decode."""

    def __init__(self, k_max: int, proposers: Sequence[str]) -> None:
        self._k_max, self._has_draft = k_max, "draft" in proposers
        self._plans: list[Plan] = []
        """plans of the next steps, the last first"""
        self._batch = 0
        self.has_begun = False
        """Whether there was ever a sweep."""

    def begin(self, batch: int) -> None:
        """Start anew, for steps of at least this many requests."""
        self._batch, self.has_begun = batch, True
        self._plans = _every_kind(self._k_max) if self._has_draft else [OFF] * SWEEP_STEPS
        self._plans.reverse()

    def end(self) -> None:
        """Leave out the steps that are left."""
        self._plans = []

    @property
    def num_left(self) -> int:
        return len(self._plans)

    def is_due(self, batch: int) -> bool:
        """Whether the next step of this many requests belongs to the sweep."""
        return bool(self._plans) and batch >= self._batch

    def take(self) -> Plan:
        """The plan of the next step."""
        return self._plans.pop()

    def give_back(self, plan: Plan) -> None:
        """The step that was taken with this plan ran nothing."""
        self._plans.append(plan)


def _every_kind(k_max: int) -> list[Plan]:
    # In turns, steps that verify much draft little, and the other way round. Otherwise the cost of
    # drafting and the cost of verifying could not be told apart.
    many, one = Plan("draft", k_max), Plan("draft", 1)
    in_turns = [one, many] * (SWEEP_STEPS // 2)
    return [many] * SWEEP_STEPS + [one] * SWEEP_STEPS + in_turns + [OFF] * SWEEP_STEPS
