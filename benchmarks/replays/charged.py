"""A trainer that takes a core which the engine waits for: nothing is served while it works. Whether
a round pays is decided by the service's own meter (`osd/control/payback.py`)."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.replays.closed_loop import ClosedLoop
from osd.config.schema import TrainerConfig
from osd.control.payback import PaybackMeter
from osd.records import ReplicaStatus, RoundOutcome, SpeculationReport

WITHIN_S = 60.0
"""Seconds of serving within which a round is to pay: about as long as the traffic of a replay, and
of one schedule on real engines, lasts."""
STANDSTILL = 1e9
"""Pace of an engine that waits for the trainer."""
STATUS = ReplicaStatus(
    at=0.0,
    replica="recorded",
    url="",
    version=1,
    target_id="",
    k=1,
    pid=0,
    started_at=0.0,
    engine="recorded",
    num_running=1,
)


class ChargedTraining:
    """Keeps the meter's heartbeats, in the modelled time of a replay."""

    def __init__(self, trainer: TrainerConfig, loop: ClosedLoop) -> None:
        trainer = trainer.model_copy(update={"payback_seconds": WITHIN_S})
        self._meter, self._loop = PaybackMeter(trainer), loop
        self._now, self._version, self._num_wakes = 0.0, 1, 0
        self._worked_s = 0.0

    def pays(self, num_wakes: int) -> bool:
        """Whether a round pays now. A request has ended, and the traffic has changed so often."""
        self._beat(is_training=False)
        if num_wakes != self._num_wakes:
            self._meter.renew(self._now)
        self._num_wakes = num_wakes
        return self._meter.decide(self._now).ok

    @property
    def now(self) -> float:
        """Seconds of the replay, those in which the trainer worked included."""
        return self._loop.clock + self._worked_s

    @property
    def is_resting(self) -> bool:
        return self._meter.is_resting

    def may_be_longer(self) -> bool:
        """As of `PaybackMeter`."""
        return self._meter.may_be_longer()

    def add_round(self, outcome: RoundOutcome, cpu_s: float, *, is_published: bool) -> None:
        """A round took so many seconds of the core."""
        for _ in range(3):
            self._beat(is_training=True)
        self._meter.add_round(replace(outcome, seconds=cpu_s), is_published=is_published)
        self._version += is_published
        self._worked_s += cpu_s

    def note_recall(self) -> None:
        """An earlier draft serves."""
        self._version += 1
        self._meter.note_recall()

    def _beat(self, *, is_training: bool) -> None:
        self._now = max(self._loop.clock, self._now + 1.0)
        worth = self._loop.speculation.report().worth
        report = SpeculationReport(pace=STANDSTILL if is_training else 1.0, worth=worth)
        status = replace(STATUS, at=self._now, version=self._version, speculation=report)
        self._meter.look([status], is_training=is_training, now=self._now)
