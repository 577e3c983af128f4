"""The trainer's share of a machine it has in common with engines: it computes less of the time while requests run.

Niceness yields a CPU, but neither memory bandwidth nor a GPU. Between two training steps the trainer therefore rests
as long as its duty cycle asks, though only while an engine has work. Judging a candidate, a few seconds without
gradients, is not paced.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from osd.errors import OSDError
from osd.exchange.registry import Registry

SECONDS_BETWEEN_ASKING = 1.0
LONGEST_REST_S = 5.0
"""After so long it looks whether there is still anything to rest for."""


class Pace:
    """To be called after every training step.

    Example:
        pace = Pace(0.5, busy_replicas(registry))
        trainer.run_round(base, on_step=pace)
    """

    def __init__(
        self,
        duty_cycle: float,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._duty_cycle, self._ask, self._clock, self._sleep = duty_cycle, is_busy, clock, sleep
        self._is_busy, self._asked_at = False, -SECONDS_BETWEEN_ASKING
        self._began_at = clock()
        self._owed = 0.0
        """Seconds of rest that were too long for one pause."""

    def begin(self) -> None:
        """A round begins: what went before it was no step."""
        self._began_at = self._clock()

    def __call__(self, *step: object) -> None:
        """Rest for so long that the step just done was `duty_cycle` of the time."""
        now = self._clock()
        if self._duty_cycle < 1:
            if now - self._asked_at >= SECONDS_BETWEEN_ASKING:
                self._is_busy, self._asked_at = self._ask(), now
            self._owed = (self._owed + (now - self._began_at) * (1 / self._duty_cycle - 1)) if self._is_busy else 0.0
            while self._owed > 0 and self._is_busy:
                rest = min(LONGEST_REST_S, self._owed)
                self._sleep(rest)
                self._owed -= rest
                if self._owed > 0:
                    self._is_busy, self._asked_at = self._ask(), self._clock()
        self._began_at = self._clock()


def busy_replicas(registry: Registry) -> Callable[[], bool]:
    """Whether any living replica has requests running, by its last heartbeat; no when Redis does not answer."""

    def is_busy() -> bool:
        try:
            return any(status.num_running for status in registry.replicas())
        except OSDError:
            return False

    return is_busy
