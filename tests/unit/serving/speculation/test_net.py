"""Net windows on made-up rates: what speculation gains, and which windows do not count."""

from __future__ import annotations

import math
import random

import pytest

from osd.records import NetGain
from serving.speculation.net import SETTLING_STEPS, NetWindows, Window

OFF_RATE = 100.0


class Engine:
    """Steps of 10 ms whose tokens are set by a rate with and one without speculation."""

    def __init__(
        self, *, interval_s: float = 5.0, window_s: float = 0.5, step_s: float = 0.01, seed: int = 0
    ) -> None:
        self.now, self.step_s, self.batch = 0.0, step_s, 4
        self.gain = 1.5
        self.num_steps = self.num_off = 0
        self.lengths = [0]
        """steps of each window without speculation"""
        self.net = NetWindows(interval_s, window_s, seed, lambda: self.now)
        self.ahead = 0
        """steps that are planned ahead of the one that ends"""
        self.planned: list[tuple[Window | None, bool]] = []

    def step(self, tokens: float | None = None) -> None:
        self.planned.append((self.net.newest, self.net.is_off()))
        if len(self.planned) > self.ahead:
            self._end_step(*self.planned.pop(0), tokens)

    def _end_step(self, window: Window | None, is_off: bool, tokens: float | None) -> None:
        self.now += self.step_s
        self.num_steps += 1
        self.num_off += is_off
        if is_off:
            self.lengths[-1] += 1
        elif self.lengths[-1]:
            self.lengths.append(0)
        made = (
            1000 * OFF_RATE * (1 if is_off else self.gain) * self.step_s
            if tokens is None
            else tokens
        )
        self.net.add_step(window, self.step_s, round(made), self.batch)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def until(self, is_off: bool) -> None:
        while self.net.is_off() != is_off:
            self.step()


def test_the_ratio_is_that_of_the_rates() -> None:
    engine = Engine()
    engine.run(60)
    report = engine.net.report()
    assert report.windows >= 5
    assert report.discarded == 0
    assert report.ratio == pytest.approx(1.5)
    assert report.low == pytest.approx(1.5) == report.high


def test_the_interval_is_students_of_the_logarithms() -> None:
    engine = Engine()
    for gain in (1.2, 1.5, 1.8):
        engine.gain = gain
        before = engine.net.report().windows
        while engine.net.report().windows == before:
            engine.step()
    logs = [math.log(gain) for gain in (1.2, 1.5, 1.8)]
    mean = sum(logs) / 3
    half = 4.302653 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    report = engine.net.report()
    assert report.ratio == pytest.approx(math.exp(mean))
    assert (report.low, report.high) == pytest.approx(
        (math.exp(mean - half), math.exp(mean + half))
    )


def test_two_windows_give_a_ratio_but_no_interval() -> None:
    engine = Engine()
    assert engine.net.report() == NetGain(ratio=None, low=None, high=None, windows=0, discarded=0)
    while engine.net.report().windows < 2:
        engine.step()
    report = engine.net.report()
    assert report.ratio == pytest.approx(1.5)
    assert report.low is report.high is None


def test_the_interval_of_noisy_windows_holds_the_true_ratio() -> None:
    rng = random.Random(1)
    engine = Engine(seed=3)
    while engine.now < 300:
        rate = OFF_RATE * (1.0 if engine.net.is_off() else 1.3)
        engine.step(tokens=rate * 10 * math.exp(rng.gauss(0, 0.4)))
    report = engine.net.report()
    assert report.low < 1.3 < report.high
    assert report.high / report.low < 1.2


def test_a_slower_engine_shows_as_a_loss() -> None:
    engine = Engine()
    engine.gain = 0.8
    engine.run(60)
    report = engine.net.report()
    assert report.ratio == pytest.approx(0.8)
    assert report.high < 1


def test_a_window_with_another_batch_is_thrown_away() -> None:
    engine = Engine()
    engine.until(is_off=True)
    engine.batch = 8  # many requests came while nothing was speculated
    engine.until(is_off=False)
    engine.batch = 4
    engine.run(1.0)
    assert (engine.net.report().windows, engine.net.report().discarded) == (0, 1)
    engine.run(30)
    assert engine.net.report().windows > 0
    assert engine.net.report().discarded == 1


@pytest.mark.parametrize(
    "around, batch, counts",
    [(8, 6, True), (8, 5, False), (6, 8, True), (6, 9, False), (10, 8, True)],
)
def test_batches_may_differ_by_a_quarter_of_the_larger(
    around: int, batch: int, counts: bool
) -> None:
    engine = Engine()
    engine.batch = around
    engine.until(is_off=True)
    engine.batch = batch
    engine.until(is_off=False)
    engine.batch = around
    engine.run(1.0)
    assert (engine.net.report().windows, engine.net.report().discarded) == (
        int(counts),
        int(not counts),
    )


@pytest.mark.parametrize("steps, counts", [(9, False), (10, True)])
def test_windows_of_a_few_long_steps_are_thrown_away(steps: int, counts: bool) -> None:
    engine = Engine(step_s=0.0625, window_s=0.0625 * steps)
    engine.run(100)
    assert (engine.net.report().windows > 3, engine.net.report().discarded > 3) == (
        counts,
        not counts,
    )


def test_a_window_that_brought_nothing_is_thrown_away() -> None:
    """A rate of nothing is none to compare with."""
    engine = Engine()
    while not engine.net.report().discarded:
        engine.step(tokens=0 if engine.net.is_off() else None)
    engine.run(30)
    assert engine.net.report().ratio == pytest.approx(1.5)
    assert engine.net.report().discarded == 1


def test_the_newest_200_windows_count() -> None:
    engine = Engine(interval_s=0.001, window_s=0.1)
    while engine.net.report().windows < 3:
        engine.step()
    engine.gain = 3.0
    for _ in range(205 * 3 * (11 + SETTLING_STEPS)):
        engine.step()
    report = engine.net.report()
    assert report.windows == 200
    assert report.ratio == pytest.approx(3.0)


def test_the_first_steps_of_a_window_do_not_count() -> None:
    """Their tokens come from drafts made in the window before."""
    engine = Engine()
    since, was_off = 0, False
    while engine.net.report().windows < 3:
        since = since + 1 if engine.net.is_off() == was_off else 0
        was_off = engine.net.is_off()
        engine.step(tokens=10**6 if was_off and since < SETTLING_STEPS else None)
    assert engine.net.report().ratio == pytest.approx(1.5)


@pytest.mark.parametrize("ahead", [1, 2, 20])
def test_steps_count_in_the_window_they_were_planned_in(ahead: int) -> None:
    """An asynchronous engine plans ahead: what ends in a window may belong to the one before."""
    engine = Engine()
    engine.ahead = ahead
    engine.run(60)
    report = engine.net.report()
    assert report.windows >= 5
    assert report.low == pytest.approx(1.5) == report.high


def test_interval_0_is_never() -> None:
    engine = Engine(interval_s=0)
    engine.run(500)
    assert engine.num_off == 0
    assert engine.net.report().windows == engine.net.report().discarded == 0


def test_windows_are_as_long_and_as_rare_as_asked() -> None:
    engine = Engine(interval_s=20, window_s=0.5)
    engine.run(3000)
    # One round waits 20 s on average and lasts three windows; the steps that settle come on top.
    assert engine.num_off / engine.num_steps == pytest.approx(0.53 / 21.6, rel=0.25)
    assert set(engine.lengths[:-1]) <= {50 + SETTLING_STEPS, 51 + SETTLING_STEPS}


def test_windows_come_at_other_times_with_another_seed() -> None:
    def first(seed: int) -> int:
        engine = Engine(seed=seed)
        engine.until(is_off=True)
        return engine.num_steps

    assert first(1) == first(1)
    assert len({first(seed) for seed in range(5)}) == 5


def test_a_load_that_grows_through_the_windows_is_no_comparison() -> None:
    """The mean of before and after would be that of the window between them."""
    engine = Engine()
    for _ in range(20):
        engine.batch = 2
        engine.until(True)
        engine.batch = 7
        engine.until(False)
        engine.batch = 12
        engine.run(1)
    assert engine.net.report().windows == 0
    assert engine.net.report().discarded >= 15
