"""Probes of an unused draft: how often they may come, how long they last, what they show."""

from __future__ import annotations

import pytest

from serving.probes import (
    FRESH_SHARE,
    FRESH_TESTS,
    MAX_STEPS_TO_PROBE,
    MIN_STEPS_TO_PROBE,
    PROBE_SHARE,
    PROBE_STEPS,
    Probes,
)


def steps_until_due(off_s: float, probe_s: float, probes: Probes | None = None) -> int:
    probes = probes or Probes()
    num = 0
    while not probes.is_due(off_s, probe_s):
        probes.add_step(0, 0)
        num += 1
    return num


@pytest.mark.parametrize(
    ("off_s", "probe_s", "steps"),
    [
        (0.010, 0.012, round((PROBE_STEPS + 1) * 0.002 / (PROBE_SHARE * 0.010))),  # 80: one step more catches up
        (0.010, 0.010, MIN_STEPS_TO_PROBE),  # it costs nothing
        (0.010, 0.009, MIN_STEPS_TO_PROBE),
        (0.010, 1.000, MAX_STEPS_TO_PROBE),
    ],
)
def test_probes_take_their_share_of_the_time(off_s: float, probe_s: float, steps: int) -> None:
    assert steps_until_due(off_s, probe_s) == pytest.approx(steps, abs=1)


def test_a_new_draft_is_probed_more_often_until_enough_of_it_was_tested() -> None:
    known, fresh = (round((PROBE_STEPS + 1) * 0.020 / (share * 0.010)) for share in (PROBE_SHARE, FRESH_SHARE))
    assert (known, fresh) == (800, 80)
    probes = Probes()
    probes.renew()
    probes.add_step(FRESH_TESTS - 1, 0)
    assert steps_until_due(0.010, 0.030, probes) == pytest.approx(fresh, abs=1)
    probes.add_step(1, 0)
    assert steps_until_due(0.010, 0.030, probes) == pytest.approx(known, abs=1)


def test_a_new_draft_ends_the_probe_of_the_one_before_it() -> None:
    probes = Probes()
    probes.begin(0.05)
    probes.renew()
    assert not probes.is_under_way


def test_a_step_that_tests_the_draft_puts_the_next_probe_off() -> None:
    probes = Probes()
    for _ in range(MIN_STEPS_TO_PROBE):
        probes.add_step(0, 0)
    assert probes.is_due(1.0, 1.0)
    probes.add_step(1, 0)
    assert not probes.is_due(1.0, 1.0)


def run(expected: float, steps: list[tuple[int, int]]) -> float | None:
    """What a probe finds in steps of (tested, accepted); it must end with the last of them."""
    probes = Probes()
    probes.begin(expected)
    assert (probes.num, probes.is_under_way) == (1, True)
    ends = []
    for tested, accepted in steps:
        probes.add_step(tested, accepted)
        ends.append(probes.end_step())
    assert [has_ended for has_ended, _ in ends] == [False] * (PROBE_STEPS - 1) + [True]
    assert not probes.is_under_way
    return ends[-1][1]


@pytest.mark.parametrize(
    ("expected", "steps", "found"),
    [
        (0.05, [(0, 0), (4, 4), (4, 3)], 8 / 10),  # (accepted + 1) / (tested + 2)
        (0.05, [(0, 0), (1, 1), (1, 1)], 3 / 4),
        (0.05, [(0, 0), (4, 0), (4, 1)], None),
        (0.90, [(0, 0), (4, 4), (4, 4)], None),  # as good as it was thought to be
        (0.90, [(0, 0), (4, 0), (4, 0)], None),  # worse than thought: it stays unused
        (0.50, [(0, 0), (40, 30), (0, 0)], 31 / 42),
        (0.50, [(0, 0), (40, 27), (0, 0)], None),  # 7 more than 20, where chance makes 2.5 times 3.2
    ],
)
def test_only_far_more_than_was_thought_is_a_surprise(
    expected: float, steps: list[tuple[int, int]], found: float | None
) -> None:
    assert run(expected, steps) == (found if found is None else pytest.approx(found))


def test_a_probe_that_was_stopped_shows_nothing() -> None:
    probes = Probes()
    probes.begin(0.05)
    probes.add_step(4, 4)
    probes.stop()
    assert [probes.end_step() for _ in range(PROBE_STEPS)] == [(False, None)] * PROBE_STEPS
