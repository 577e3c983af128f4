"""Probes: a draft that is not used shows no acceptance, so it is tried now and then, as often as
costs little time.

    unused for long ──► PROBE_STEPS steps with it ──► accepted far more often than expected?
                                                      yes ──► forget all older evidence
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PROBE_STEPS = 3
PROBE_K = 2
PROBE_SHARE = 0.01
"""Share of the time that probes may take."""
MIN_STEPS_TO_PROBE, MAX_STEPS_TO_PROBE = 50, 2000
FRESH_TESTS = 64
"""First tokens to be tested of a new draft before it is probed as rarely as a known one."""
FRESH_SHARE = 0.1
"""Share of the time that probes may take until then, so that a bad draft is soon found out."""
SURPRISE = 2.5
"""Standard deviations by which a probe must exceed the expected acceptance to be a surprise."""


@dataclass(slots=True)
class _Probe:
    expected: float
    """expected acceptance at the first position"""
    steps_left: int = PROBE_STEPS
    tested: int = 0
    accepted: int = 0

    @property
    def is_surprise(self) -> bool:
        deviation = math.sqrt(self.tested * self.expected * (1 - self.expected))
        return self.accepted - self.tested * self.expected > SURPRISE * deviation


class Probes:
    """Counts steps without the draft, and what probes show."""

    def __init__(self) -> None:
        self.num = 0
        """Probes begun."""
        self._num_untested = 0
        """Steps since a draft token was last tested."""
        self._num_fresh = FRESH_TESTS
        """First tokens still to be tested of a new draft. The first draft is new as well."""
        self._probe: _Probe | None = None

    @property
    def is_under_way(self) -> bool:
        return self._probe is not None

    def is_due(self, off_s: float, probe_s: float) -> bool:
        """Whether to probe now, so that probes take their share of the time. `off_s` and `probe_s`:
        seconds of a step without the draft and of one that tries it."""
        extra_s = (PROBE_STEPS + 1) * (probe_s - off_s)
        every = extra_s / ((FRESH_SHARE if self._num_fresh else PROBE_SHARE) * off_s)
        return self._num_untested >= int(min(max(every, MIN_STEPS_TO_PROBE), MAX_STEPS_TO_PROBE))

    def begin(self, expected: float) -> None:
        """The next steps try the draft. `expected`: acceptance of its first token."""
        self._probe = _Probe(expected)
        self.num += 1

    def stop(self) -> None:
        """Give up the probe under way."""
        self._probe = None

    def renew(self) -> None:
        """Another draft serves from now on."""
        self._probe = None
        self._num_fresh = FRESH_TESTS

    def add_step(self, num_tested: int, num_accepted: int) -> None:
        """A step tested and accepted so many first tokens."""
        self._num_untested = 0 if num_tested else self._num_untested + 1
        self._num_fresh = max(0, self._num_fresh - num_tested)
        if self._probe is not None:
            self._probe.tested += num_tested
            self._probe.accepted += num_accepted

    def end_step(self) -> tuple[bool, float | None]:
        """Whether a probe has just ended; and the acceptance it found, if that is a surprise."""
        if self._probe is None:
            return False, None
        self._probe.steps_left -= 1
        if self._probe.steps_left:
            return False, None
        probe, self._probe = self._probe, None
        self._num_untested = 0
        return True, (probe.accepted + 1) / (probe.tested + 2) if probe.is_surprise else None
