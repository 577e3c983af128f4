"""The duty cycle of a trainer that shares a machine with engines.

Niceness yields the CPU, but neither memory bandwidth nor a GPU. The trainer therefore rests between
training steps while an engine has work. The evaluation of a candidate takes a few seconds, without
gradients, and is not paced.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from osd.errors import OSDError
from osd.exchange.registry import Registry

SECONDS_BETWEEN_ASKING = 1.0
LONGEST_REST_S = 5.0
"""After a rest of this length it asks again whether an engine has work."""


class Pace:
    """Call it after every training step.

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
        """Seconds of rest that are still to be taken."""

    def begin(self) -> None:
        """A round begins. The time before it does not count as a step."""
        self._began_at = self._clock()

    def __call__(self, *step: object) -> None:
        """Rest so long that the last step took `duty_cycle` of the time."""
        now = self._clock()
        if self._duty_cycle < 1:
            if now - self._asked_at >= SECONDS_BETWEEN_ASKING:
                self._is_busy, self._asked_at = self._ask(), now
            self._owed = (
                (self._owed + (now - self._began_at) * (1 / self._duty_cycle - 1))
                if self._is_busy
                else 0.0
            )
            while self._owed > 0 and self._is_busy:
                rest = min(LONGEST_REST_S, self._owed)
                self._sleep(rest)
                self._owed -= rest
                if self._owed > 0:
                    self._is_busy, self._asked_at = self._ask(), self._clock()
        self._began_at = self._clock()


def busy_replicas(registry: Registry) -> Callable[[], bool]:
    """Whether any living replica has running requests, by its last heartbeat. False when Redis does
    not answer."""

    def is_busy() -> bool:
        try:
            return any(status.num_running for status in registry.replicas())
        except OSDError:
            return False

    return is_busy
