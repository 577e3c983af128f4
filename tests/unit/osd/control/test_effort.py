"""How much a round replays: what there is time for, and what the engines can spare."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from osd.config.schema import TrainerConfig
from osd.control.effort import Effort
from osd.records import RoundOutcome
from tests.unit.osd.control.test_controller import make_outcome

CONFIG = TrainerConfig(replay_batches=8, max_replay_batches=32, batch_size=8, max_new_traces=128)
ROUND = replace(make_outcome("/c", 1), num_steps=36, seconds=3.6)
"""A step takes 0.1 s; 32 new traces are 4 steps, and 4 more for every batch that is replayed."""


def effort_after(outcome: RoundOutcome | None = ROUND, config: TrainerConfig = CONFIG) -> Effort:
    """Of a deployment whose first round began at 100."""
    effort = Effort(config)
    effort.begin_round(32, now=100.0, affordable_s=math.inf)
    if outcome is not None:
        effort.end_round(outcome)
    return effort


def test_the_first_round_replays_no_more_than_it_must() -> None:
    assert Effort(CONFIG).begin_round(32, now=1e6, affordable_s=math.inf) == 8


@pytest.mark.parametrize(
    ("gap_s", "batches"),
    [(7.2, 8), (8.0, 9), (16.0, 19), (26.6, 32), (3600.0, 32), (1.0, 8), (-3600.0, 8)],
)
def test_half_of_the_time_between_two_rounds_is_used(gap_s: float, batches: int) -> None:
    """Four steps of new traces, and four of each batch replayed, 0.1 s each."""
    effort = effort_after()
    assert effort.begin_round(32, now=100 + gap_s, affordable_s=math.inf) == batches


@pytest.mark.parametrize(
    ("affordable_s", "batches"), [(0.0, 8), (3.6, 8), (8.0, 19), (13.3, 32), (math.inf, 32)]
)
def test_it_takes_no_more_than_the_engines_can_spare(affordable_s: float, batches: int) -> None:
    assert effort_after().begin_round(32, now=1e6, affordable_s=affordable_s) == batches


@pytest.mark.parametrize(("num_new", "batches"), [(16, 39), (64, 9), (100, 8), (0, 64), (500, 8)])
def test_more_new_traces_leave_less_time_to_replay(num_new: int, batches: int) -> None:
    """8 s are 80 steps, less those of the new traces; of 500 the newest 128 are trained on."""
    config = CONFIG.model_copy(update={"max_replay_batches": 64})
    effort = effort_after(config=config)
    assert effort.begin_round(num_new, now=116.0, affordable_s=math.inf) == batches


def test_a_trainer_that_takes_no_time_replays_as_much_as_it_may() -> None:
    effort = effort_after(replace(ROUND, seconds=0.0))
    assert effort.begin_round(32, now=100.0, affordable_s=math.inf) == 32


def test_the_first_round_after_a_rest_replays_no_more_than_it_must() -> None:
    effort = effort_after()
    effort.rest()
    assert effort.begin_round(32, now=5000.0, affordable_s=math.inf) == 8
    effort.end_round(ROUND)
    assert effort.begin_round(32, now=5016.0, affordable_s=math.inf) == 19


@pytest.mark.parametrize("outcome", [None, replace(ROUND, num_steps=0)])
def test_after_a_round_that_failed_or_had_no_step_nothing_is_known(
    outcome: RoundOutcome | None,
) -> None:
    effort = effort_after(outcome)
    assert effort.begin_round(32, now=1e6, affordable_s=math.inf) == 8


def test_what_a_round_took_counts_for_the_next_one_alone() -> None:
    effort = effort_after()
    effort.begin_round(32, now=200.0, affordable_s=math.inf)  # which fails
    assert effort.begin_round(32, now=300.0, affordable_s=math.inf) == 8


@pytest.mark.parametrize(("least", "most", "batches"), [(40, 32, 40), (0, 0, 0), (0, 5, 5)])
def test_the_least_always_counts(least: int, most: int, batches: int) -> None:
    config = CONFIG.model_copy(update={"replay_batches": least, "max_replay_batches": most})
    effort = effort_after(config=config)
    assert effort.begin_round(32, now=1e6, affordable_s=math.inf) == batches
