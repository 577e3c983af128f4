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
BEAT_S, BEATS_OF_A_ROUND = 1.0, 3
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
        self._version, self._num_wakes = 1, 0
        self._beat_at = -BEAT_S
        self._worked_s = 0.0
        self._stretched_s = 0.0
        """By which rounds were made longer for the meter, so that each has its heartbeats."""

    def pays(self, num_wakes: int, *, has_rested: bool) -> bool:
        """Whether a round pays now. A request has ended, and the traffic has changed so often.
        `has_rested`: whether training did before it."""
        now = self.now + self._stretched_s
        if now - self._beat_at >= BEAT_S:
            self._beat(now, is_training=False)
        if num_wakes != self._num_wakes:
            self._meter.renew(now, has_rested=has_rested)
        self._num_wakes = num_wakes
        return self._meter.decide(now).ok

    @property
    def now(self) -> float:
        """Seconds of the replay, those in which the trainer worked included."""
        return self._loop.clock + self._worked_s

    @property
    def rests_for_price(self) -> bool:
        """As of `PaybackMeter.is_resting`."""
        return self._meter.is_resting

    @property
    def is_resting(self) -> bool:
        """Whether rounds rest or wait, as they do not pay."""
        return self._meter.is_resting or self._meter.is_waiting(self.now + self._stretched_s)

    def may_be_longer(self) -> bool:
        """As of `PaybackMeter`."""
        return self._meter.may_be_longer()

    def add_round(self, outcome: RoundOutcome, cpu_s: float, *, is_published: bool) -> None:
        """A round took so many seconds of the core."""
        began, seconds = self.now + self._stretched_s, max(cpu_s, BEATS_OF_A_ROUND * BEAT_S)
        for number in range(BEATS_OF_A_ROUND):
            self._beat(began + (number + 1) * seconds / BEATS_OF_A_ROUND, is_training=True)
        self._worked_s += cpu_s
        self._stretched_s += seconds - cpu_s
        outcome = replace(outcome, seconds=cpu_s)
        self._meter.add_round(outcome, began + seconds, is_published=is_published)
        self._version += is_published

    def note_recall(self) -> None:
        """An earlier draft serves."""
        self._version += 1
        self._meter.note_recall()

    def _beat(self, at: float, *, is_training: bool) -> None:
        self._beat_at = at
        worth = self._loop.speculation.report().worth
        report = SpeculationReport(pace=STANDSTILL if is_training else 1.0, worth=worth)
        status = replace(STATUS, at=at, version=self._version, speculation=report)
        self._meter.look([status], is_training=is_training, now=at)
