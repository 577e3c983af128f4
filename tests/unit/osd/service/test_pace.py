"""The trainer's duty cycle, by a clock of its own."""

from __future__ import annotations

import pytest

from osd.errors import ReplayBufferError
from osd.service.pace import LONGEST_REST_S, Pace, busy_replicas


class Day:
    """A clock that passes when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now, self.rested, self.worked, self.num_asked = 100.0, 0.0, 0.0, 0
        self.is_busy = True

    def ask(self) -> bool:
        self.num_asked += 1
        return self.is_busy

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rested += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds


@pytest.fixture
def day() -> Day:
    return Day()


def run(day: Day, duty_cycle: float, num_steps: int = 40, seconds: float = 0.2) -> None:
    pace = Pace(duty_cycle, day.ask, lambda: day.now, day.sleep)
    day.now += 50.0
    pace.begin()
    for _ in range(num_steps):
        day.work(seconds)
        pace(1, 2, 0.5)


@pytest.mark.parametrize("duty_cycle", [0.1, 0.25, 0.5, 0.9])
def test_it_works_its_share_of_the_time(day: Day, duty_cycle: float) -> None:
    run(day, duty_cycle)
    assert day.worked / (day.worked + day.rested) == pytest.approx(duty_cycle)


def test_it_never_rests_while_nobody_asks_for_the_engine(day: Day) -> None:
    day.is_busy = False
    run(day, 0.25)
    assert day.rested == 0


def test_a_full_share_asks_nobody(day: Day) -> None:
    run(day, 1.0)
    assert (day.rested, day.num_asked) == (0, 0)


def test_it_asks_at_most_once_a_second(day: Day) -> None:
    run(day, 0.5, num_steps=100, seconds=0.05)
    assert day.num_asked <= day.worked + day.rested + 1


def test_long_steps_rest_their_share_too(day: Day) -> None:
    run(day, 0.25, num_steps=4, seconds=4.0)
    assert day.worked / (day.worked + day.rested) == pytest.approx(0.25)


def test_a_long_rest_ends_when_the_engine_has_nothing_to_do(day: Day) -> None:
    def sleep(seconds: float) -> None:
        day.sleep(seconds)
        day.is_busy = day.rested < 2 * LONGEST_REST_S

    pace = Pace(0.1, day.ask, lambda: day.now, sleep)
    day.work(60)
    pace()
    assert day.rested == 2 * LONGEST_REST_S


def test_without_redis_nobody_is_busy() -> None:
    class Away:
        def replicas(self) -> list[object]:
            raise ReplayBufferError("away")

    assert not busy_replicas(Away())()  # type: ignore[arg-type]
