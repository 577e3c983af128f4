"""A trainer whose seconds are charged, in the time of a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replays.charged import ChargedTraining
from osd.config.schema import TrainerConfig
from osd.records import DraftWorth
from tests.unit.osd.control.test_controller import make_outcome


def a_loop(better: float) -> Any:
    """`better`: how much faster better drafts are to make the engine."""
    worth = DraftWorth(of_draft=1.5, of_better=better, of_far_better=better)
    report = SimpleNamespace(worth=worth)
    return SimpleNamespace(clock=5.0, speculation=SimpleNamespace(report=lambda: report))


def test_time_goes_on_while_the_trainer_works_and_a_dear_one_replays_the_least() -> None:
    loop = a_loop(1.001)
    charged = ChargedTraining(TrainerConfig(), loop)
    assert (charged.now, charged.is_resting, charged.may_be_longer()) == (5.0, False, False)
    for clock in range(10, 40):
        loop.clock = float(clock)
        if charged.pays(0, has_rested=False):
            charged.add_round(make_outcome("", 1), 30.0, is_published=False)
            assert not charged.may_be_longer()
    assert charged.is_resting, "it takes far more than it brings"
    assert charged.now >= 39 + 30


@pytest.mark.parametrize("seconds", [0.25, 1.0, 4.0])
def test_rounds_that_try_traffic_which_turns_take_a_fiftieth_of_the_modelled_time(
    seconds: float,
) -> None:
    """However long requests are, which come one after the other."""
    loop = a_loop(1.1)
    charged = ChargedTraining(TrainerConfig(), loop)
    num_wakes, num_rounds, waited = 0, 0, False
    while loop.clock < 4000:
        loop.clock += seconds
        if loop.clock >= 45 * (num_wakes + 1) and charged.rests_for_price:
            num_wakes += 1
        if charged.pays(num_wakes, has_rested=charged.is_resting):
            charged.add_round(make_outcome("", 1), 2.0, is_published=False)
            num_rounds += 1
        waited |= charged.is_resting and not charged.rests_for_price
    assert waited and 0.01 < 2 * num_rounds / loop.clock < 0.025
