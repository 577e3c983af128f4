"""Probes of an unused draft: how often they come, how long they last, what they show."""

from __future__ import annotations

import pytest

from serving.speculation.goodput import Plan
from serving.speculation.probes import PROBE_K, PROBE_STEPS, WATCHED_SHARE, Probe, Probes

ONE = Plan("draft", PROBE_K)


def known() -> Probes:
    """Of a draft of which enough was tested."""
    probes = Probes()
    probes.add_step(64, 32, None)
    return probes


def steps_until_due(best_s: float, probe_s: float, probes: Probes) -> int:
    num = 0
    while not probes.is_due(best_s, probe_s):
        probes.add_step(0, 0, None)
        num += 1
    return num


@pytest.mark.parametrize(
    ("best_s", "probe_s", "steps"),
    [
        # 4 steps (one more catches up) of 2.0125 ms: 1 % of 80.5 times 10 ms.
        (0.010, 0.0120125, 80),
        (0.010, 0.0220125, 480),
        (0.020, 0.0220125, 50),  # 40.25 would do
        (0.010, 0.010, 50),  # it costs nothing
        (0.010, 0.009, 50),
        (0.010, 1.000, 2000),
    ],
)
def test_probes_take_one_percent_of_the_time(best_s: float, probe_s: float, steps: int) -> None:
    assert steps_until_due(best_s, probe_s, known()) == steps


def test_while_a_memory_proposes_probes_take_a_quarter_of_that() -> None:
    probes, num = known(), 0
    while not probes.is_due(0.010, 0.0120125, share=WATCHED_SHARE):
        probes.add_step(0, 0, None)
        num += 1
    assert num == 322


@pytest.mark.parametrize("last", [1, 40])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_new_draft_may_take_a_tenth_of_the_time_until_64_of_its_tokens_were_tested(
    is_first: bool, last: int
) -> None:
    probes = Probes() if is_first else known()
    if not is_first:
        probes.renew()
    probes.add_step(63, 0, None)
    # 4 steps of 20.1 ms are 80.4 times a tenth of 10 ms.
    assert steps_until_due(0.010, 0.0301, probes) == 80
    probes.add_step(last, 0, None)
    assert steps_until_due(0.010, 0.0301, probes) == 804


def begun(probes: Probes, expected: float) -> Probe:
    """A probe all of whose steps have drafted."""
    num_before = probes.num
    probes.begin(ONE, expected)
    assert (probes.num, probes.has_steps_left) == (num_before + 1, True)
    taken = [probes.take() for _ in range(PROBE_STEPS)]
    assert taken[0] is not None and taken == [taken[0]] * PROBE_STEPS
    assert (probes.take(), probes.has_steps_left) == (None, False)
    assert taken[0].plan == ONE
    return taken[0]


def test_a_step_that_ran_nothing_is_taken_again() -> None:
    probes = known()
    probes.begin(ONE, 0.5)
    probe = probes.take()
    probes.give_back(probe)
    assert [probes.take() for _ in range(PROBE_STEPS + 1)] == [probe] * PROBE_STEPS + [None]
    probes.renew()
    probes.give_back(probe)
    assert not probes.has_steps_left


def test_a_new_draft_ends_the_probe_of_the_one_before_it() -> None:
    probes = Probes()
    old = begun(probes, 0.05)
    probes.add_step(4, 4, old)
    probes.renew()
    new = begun(probes, 0.9)
    assert [probes.add_step(4, 4, old) for _ in range(5)] == [False] * 5
    assert (new.tested, old.tested) == (0, 4), "nothing of it counts for the next"
    assert [probes.add_step(4, 0, new) for _ in range(3)] == [False, False, True]


def test_a_probe_is_three_steps_of_one_token() -> None:
    assert (PROBE_K, PROBE_STEPS) == (1, 3)
    probes = Probes()
    assert probes.take() is None
    probe = begun(probes, 0.5)
    assert [probes.add_step(1, 1, probe) for _ in range(4)] == [False, False, True, False]
    assert (probe.tested, probe.accepted) == (3, 3)


def test_steps_of_others_are_none_of_the_probe() -> None:
    """The first step that drafts for it verifies what was proposed before."""
    probes = Probes()
    probe = begun(probes, 0.5)
    assert not any(probes.add_step(4, 4, None) for _ in range(10))
    assert (probe.tested, probe.num_to_test) == (0, PROBE_STEPS)


def test_no_probe_is_due_before_the_last_one_is_judged() -> None:
    probes = Probes()
    steps_until_due(1.0, 1.0, probes)
    probe = begun(probes, 0.5)
    for _ in range(200):
        probes.add_step(0, 0, None)
        assert not probes.is_due(1.0, 1.0)
    for _ in range(PROBE_STEPS):
        probes.add_step(0, 0, probe)
    assert steps_until_due(1.0, 1.0, probes) == 50


def test_a_step_that_tests_the_draft_puts_the_next_probe_off() -> None:
    probes = Probes()
    assert steps_until_due(1.0, 1.0, probes) == 50
    assert steps_until_due(1.0, 1.0, probes) == 0, "it stays due"
    probes.add_step(1, 0, None)
    assert steps_until_due(1.0, 1.0, probes) == 50


def test_a_probe_that_tested_nothing_puts_the_next_one_off_too() -> None:
    """Its requests have ended: else the draft would be tried all the time."""
    probes = Probes()
    assert steps_until_due(1.0, 1.0, probes) == 50
    assert run_of(probes, 0.5, [(0, 0)] * 3) is None
    assert steps_until_due(1.0, 1.0, probes) == 50


def run_of(probes: Probes, expected: float, steps: list[tuple[int, int]]) -> float | None:
    """What a probe finds in steps of (tested, accepted); it must end with the last of them."""
    probe = begun(probes, expected)
    is_over = [probes.add_step(*step, probe) for step in steps]
    assert is_over == [False] * (PROBE_STEPS - 1) + [True]
    return probe.surprise


@pytest.mark.parametrize(
    ("expected", "steps", "found"),
    [
        (0.05, [(0, 0), (4, 4), (4, 3)], 8 / 10),  # (accepted + 1) / (tested + 2)
        (0.05, [(0, 0), (1, 1), (1, 1)], 3 / 4),
        (0.05, [(0, 0), (4, 0), (4, 1)], None),
        (0.90, [(0, 0), (4, 4), (4, 4)], None),  # as good as it was thought to be
        (0.90, [(0, 0), (4, 0), (4, 0)], None),  # worse than thought: it stays unused
        (0.50, [(0, 0), (40, 28), (0, 0)], 29 / 42),  # 8 more than 20; chance makes 2.5 times 3.16
        (0.50, [(0, 0), (40, 27), (0, 0)], None),
        (0.50, [(0, 0), (64, 42), (0, 0)], None),  # exactly 2.5 times 4
        (0.20, [(0, 0), (100, 31), (0, 0)], 32 / 102),  # 11 more than 20, and 10 are 2.5 times 4
        (0.20, [(0, 0), (100, 30), (0, 0)], None),
        (0.00, [(0, 0), (0, 0), (1, 1)], 2 / 3),  # what was thought impossible
        (0.00, [(0, 0), (0, 0), (9, 0)], None),
        (1.00, [(0, 0), (0, 0), (9, 9)], None),
        (0.50, [(0, 0), (0, 0), (0, 0)], None),
    ],
)
def test_only_far_more_than_was_thought_is_a_surprise(
    expected: float, steps: list[tuple[int, int]], found: float | None
) -> None:
    assert run_of(Probes(), expected, steps) == (found if found is None else pytest.approx(found))


def test_a_probe_that_was_stopped_shows_nothing() -> None:
    probes = Probes()
    probe = begun(probes, 0.05)
    probes.add_step(4, 4, probe)
    probes.stop()
    assert not probes.has_steps_left
    assert [probes.add_step(4, 4, probe) for _ in range(3)] == [False] * 3
