"""How much a round replays: what there is time for, where engines can spare it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osd.config.schema import TrainerConfig
from osd.control.effort import Effort
from osd.records import RoundOutcome, RoundSize
from tests.unit.osd.control.test_controller import make_outcome

CONFIG = TrainerConfig(replay_batches=8, max_replay_growth=4, batch_size=8, max_new_traces=128)
ROUND = replace(make_outcome("/c", 1), num_steps=36, seconds=3.6)
"""A step takes 0.1 s; 32 new traces are 4 steps, and 4 more for every batch that is replayed."""


class Rounds:
    """Rounds that begin so long after one another. `size`: of the newest."""

    def __init__(self, *gaps_s: float, config: TrainerConfig = CONFIG) -> None:
        self.effort, self.now = Effort(config), 100.0
        self.begin(0)
        for gap_s in gaps_s:
            self.effort.end_round(ROUND)
            self.begin(gap_s)

    def begin(self, gap_s: float, num_new: int = 32, *, may_be_longer: bool = True) -> int:
        self.now += gap_s
        self.size = self.effort.begin_round(num_new, now=self.now, may_be_longer=may_be_longer)
        return self.size.replay_batches

    def next(self, gap_s: float, num_new: int = 32, *, may_be_longer: bool = True) -> int:
        """After one that took as long as all."""
        self.effort.end_round(ROUND)
        return self.begin(gap_s, num_new, may_be_longer=may_be_longer)


def test_the_first_round_replays_the_least() -> None:
    size = Effort(CONFIG).begin_round(32, now=1e6, may_be_longer=True)
    assert size == RoundSize(new_traces=128, replay_batches=8)


@pytest.mark.parametrize(
    ("gap_s", "batches"),
    [(7.2, 8), (8.1, 9), (16.1, 19), (26.5, 32), (3600.0, 32), (1.0, 8), (-3600.0, 8)],
)
def test_half_of_the_time_between_two_rounds_is_used(gap_s: float, batches: int) -> None:
    """Four steps of new traces, and four of each batch replayed, 0.1 s each."""
    assert Rounds().next(gap_s) == batches
    assert Rounds().next(gap_s, may_be_longer=False) == 8


@pytest.mark.parametrize(
    ("num_new", "batches"), [(12, 52), (16, 39), (64, 9), (100, 8), (0, 255), (1, 255)]
)
def test_more_new_traces_leave_less_time_to_replay(num_new: int, batches: int) -> None:
    """8 s are 80 steps, less those of the new traces."""
    config = CONFIG.model_copy(update={"max_replay_growth": 255 / 8})
    assert Rounds(config=config).next(16.05, num_new) == batches


def test_of_too_many_new_traces_the_newest_count() -> None:
    """128 of them are 16 steps, and there is time for 320; 500 would be 62."""
    assert Rounds().next(64.1, 500) == 19


def test_a_time_without_traffic_is_no_time_to_spend() -> None:
    """The shorter of the last two times between rounds counts."""
    rounds = Rounds(16.1)
    assert rounds.next(3600.0) == 19
    assert rounds.next(16.1) == 19
    assert rounds.next(7.0) == 8
    assert rounds.next(16.1) == 8, "the last one was short"


def test_the_first_round_after_a_rest_replays_the_least() -> None:
    rounds = Rounds(26.5)
    rounds.effort.rest()
    assert rounds.next(5000.0) == 8
    assert rounds.next(16.1) == 19, "what was before the rest no longer counts"
    rounds.effort.end_round(ROUND)
    rounds.effort.rest()
    assert rounds.begin(26.5) == 8


@pytest.mark.parametrize(("fewest", "new_traces"), [(8, 16), (32, 64), (500, 128)])
def test_the_first_round_after_a_rest_takes_the_newest_traces(fewest: int, new_traces: int) -> None:
    """Hundreds may have come in it, of traffic that there was nothing to learn of."""
    rounds = Rounds(26.5, config=CONFIG.model_copy(update={"min_new_traces": fewest}))
    rounds.effort.rest()
    rounds.effort.pause()
    for _ in range(2):  # the first one fails
        rounds.begin(5000.0, 500)
        assert rounds.size == RoundSize(new_traces=new_traces, replay_batches=8)
    rounds.next(16.1, 500)
    assert rounds.size.new_traces == 128
    rounds.effort.pause()
    rounds.next(16.1, 500)
    assert rounds.size.new_traces == 128, "what came in a pause is all to be learnt"


@pytest.mark.parametrize(
    "outcome",
    [
        None,
        replace(ROUND, num_steps=0),
        replace(ROUND, seconds=0.0),
        replace(ROUND, discarded="held-out loss rose"),
    ],
)
def test_after_a_round_that_failed_or_was_undone_the_least_is_replayed(
    outcome: RoundOutcome | None,
) -> None:
    rounds = Rounds(26.5)
    if outcome is not None:
        rounds.effort.end_round(outcome)
    assert rounds.begin(26.5) == 8
    assert rounds.begin(26.5) == 8, "what one took counts for the next one alone"
    assert rounds.next(26.5) == 32


@pytest.mark.parametrize(("rate", "batches"), [(1.0, 32), (0.99, 8), (0.25, 8)])
def test_averaged_candidates_which_are_to_learn_less_replay_the_least(
    rate: float, batches: int
) -> None:
    config = CONFIG.model_copy(update={"averaging_rate": rate})
    assert Rounds(config=config).next(3600.0) == batches


@pytest.mark.parametrize(
    ("least", "growth", "batches"), [(8, 1.0, 8), (0, 4.0, 0), (2, 2.5, 5), (40, 2.0, 80)]
)
def test_how_far_it_may_grow(least: int, growth: float, batches: int) -> None:
    given = {"replay_batches": least, "max_replay_growth": growth}
    assert Rounds(config=CONFIG.model_copy(update=given)).next(3600.0) == batches
