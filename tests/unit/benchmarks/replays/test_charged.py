"""A trainer whose seconds are charged, in the time of a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.replays.charged import ChargedTraining
from osd.config.schema import TrainerConfig
from osd.records import DraftWorth
from tests.unit.osd.control.test_controller import make_outcome


def test_time_goes_on_while_the_trainer_works_and_a_dear_one_replays_the_least() -> None:
    worth = DraftWorth(of_draft=1.5, of_better=1.001, of_far_better=1.001)
    report = SimpleNamespace(worth=worth)
    loop: Any = SimpleNamespace(clock=5.0, speculation=SimpleNamespace(report=lambda: report))
    charged = ChargedTraining(TrainerConfig(), loop)
    assert (charged.now, charged.is_resting, charged.may_be_longer()) == (5.0, False, False)
    for clock in range(10, 40):
        loop.clock = float(clock)
        if charged.pays(0):
            charged.add_round(make_outcome("", 1), 30.0, is_published=False)
            assert not charged.may_be_longer()
    assert charged.is_resting, "it takes far more than it brings"
    assert charged.now >= 39 + 30
