"""Probes: a draft that is not used shows no acceptance, so it is tried now and then, as often as
costs little time.

    unused for long ──► PROBE_STEPS steps with it ──► accepted far more often than expected?
                                                      yes ──► forget all older evidence
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serving.speculation.goodput import Plan

PROBE_STEPS = 3
PROBE_K = 1
"""Whether a first token is right is known after the step, whoever's tokens it verifies."""
PROBE_SHARE, WATCHED_SHARE = 0.01, 0.0025
"""Share of the time that probes may take; and while a memory proposes, which tells of changes."""
MIN_STEPS_TO_PROBE, MAX_STEPS_TO_PROBE = 50, 2000
FRESH_TESTS = 64
"""First tokens to be tested of a new draft before it is probed as rarely as a known one."""
FRESH_SHARE = 0.1
"""Share of the time that probes may take until then, so that a bad draft is soon found out."""
SURPRISE = 2.5
"""Standard deviations by which a probe must exceed the expected acceptance to be a surprise."""


@dataclass(slots=True, eq=False)
class Probe:
    """A few steps that draft, and the steps after them, in which that is tested."""

    plan: Plan
    expected: float
    """expected acceptance at the first position"""
    num_to_draft: int = PROBE_STEPS
    num_to_test: int = PROBE_STEPS
    tested: int = 0
    accepted: int = 0

    @property
    def surprise(self) -> float | None:
        """The acceptance it has found, if that is far more than was expected."""
        deviation = math.sqrt(self.tested * self.expected * (1 - self.expected))
        if self.accepted - self.tested * self.expected <= SURPRISE * deviation:
            return None
        return (self.accepted + 1) / (self.tested + 2)


class Probes:
    """Counts steps without the draft, and what probes show."""

    def __init__(self) -> None:
        self.num = 0
        """Probes begun."""
        self._num_untested = 0
        """Steps since a draft token was last tested."""
        self._num_fresh = FRESH_TESTS
        """First tokens still to be tested of a new draft. The first draft is new as well."""
        self._probe: Probe | None = None

    @property
    def has_steps_left(self) -> bool:
        """Whether the next step belongs to a probe."""
        return self._probe is not None and self._probe.num_to_draft > 0

    def is_due(
        self,
        best_s: float,
        probe_s: float,
        has_changed: bool = False,
        share: float = PROBE_SHARE,
    ) -> bool:
        """Whether to probe now, so that probes take their share of the time. `probe_s`: seconds of
        a step that tries the draft; `best_s`: in which the best plan delivers as many tokens.
        `has_changed`: the traffic has, and a probe is worth more than that."""
        if self._probe is not None:
            return False
        if has_changed and self._num_untested >= MIN_STEPS_TO_PROBE:
            return True
        extra_s = (PROBE_STEPS + 1) * (probe_s - best_s)
        every = extra_s / ((FRESH_SHARE if self._num_fresh else share) * best_s)
        return self._num_untested >= int(min(max(every, MIN_STEPS_TO_PROBE), MAX_STEPS_TO_PROBE))

    def begin(self, plan: Plan, expected: float) -> None:
        """The next steps try the draft. `expected`: acceptance of its first token."""
        self._probe = Probe(plan, expected)
        self.num += 1

    def take(self) -> Probe | None:
        """The probe to which the step about to be scheduled belongs."""
        if self._probe is None or not self._probe.num_to_draft:
            return None
        self._probe.num_to_draft -= 1
        return self._probe

    def give_back(self, probe: Probe | None) -> None:
        """The step that was taken for this probe ran nothing."""
        if probe is not None and probe is self._probe:
            probe.num_to_draft += 1

    def stop(self) -> None:
        """Give up the probe under way."""
        self._probe = None

    def renew(self) -> None:
        """Another draft serves from now on."""
        self._probe = None
        self._num_fresh = FRESH_TESTS

    def add_step(self, num_tested: int, num_accepted: int, probe: Probe | None) -> bool:
        """A step tested and accepted so many first tokens, which this probe had proposed. Returns
        whether that was the probe's last step."""
        self._num_untested = 0 if num_tested else self._num_untested + 1
        self._num_fresh = max(0, self._num_fresh - num_tested)
        if probe is None or probe is not self._probe:
            return False
        probe.tested += num_tested
        probe.accepted += num_accepted
        probe.num_to_test -= 1
        if probe.num_to_test:
            return False
        self._probe = None
        self._num_untested = 0
        return True
