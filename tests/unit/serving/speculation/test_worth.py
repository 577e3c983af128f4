"""What a draft, and a better one, are worth, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from osd.records import FAR_FEWER_ERRORS, FEWER_ERRORS
from serving.speculation.goodput import Load, candidates
from serving.speculation.worth import Worth, improved
from tests.unit.serving.speculation.test_goodput import Table

SECONDS = {(1, 0): 1.0, (2, 1): 1.1, (3, 2): 1.2}


def load(survival_G: list[float] | None, memory_M: list[float] | None = None) -> Load:
    memory_BRM = None if memory_M is None else np.array([[memory_M]])
    return Load(
        batch=1,
        context=0,
        draft_BG=None if survival_G is None else np.array([survival_G]),
        memory_BRM=memory_BRM,
        ratio_BR=None if memory_M is None else np.ones((1, 1)),
        allowed_B=np.array([8]),
    )


def add(worth: Worth, given: Load, times: Table, num: int = 4) -> None:
    for _ in range(num):
        worth.add(given, candidates(given, times), times)


def test_a_better_draft_errs_less_at_each_position() -> None:
    survival_BG = np.array([[0.5, 0.25, 0.0], [1.0, 0.9, 0.9]])
    alpha = 1 - 0.5 * (1 - FEWER_ERRORS)
    better_BG = improved(survival_BG, FEWER_ERRORS)
    assert better_BG[0] == pytest.approx([alpha, alpha**2, alpha**2 * FEWER_ERRORS])
    assert better_BG[1] == pytest.approx([1.0, 1 - 0.1 * (1 - FEWER_ERRORS)] + [0.925])


def test_speeds_are_those_of_the_best_plans() -> None:
    times, worth = Table(SECONDS), Worth()
    assert worth.report() is None
    given = load([0.6, 0.36])
    add(worth, given, times, 3)
    assert worth.report() is None, "one request more or less would say something else"
    add(worth, given, times, 1)
    found = worth.report()
    assert found is not None
    now, better = (1 + 0.6 + 0.36) / 1.2, (1 + 0.7 + 0.49) / 1.2
    alpha = 1 - 0.4 * (1 - FAR_FEWER_ERRORS)
    assert found.of_draft == pytest.approx(now)
    assert found.of_better == pytest.approx(better / now)
    assert found.of_far_better == pytest.approx((1 + alpha + alpha**2) / 1.2 / now)
    worth.restart()
    assert worth.report() is None
    add(worth, load(None), times)
    restarted = worth.report()
    assert restarted is not None and restarted.of_draft == 1.0, "of the new draft alone"


def test_a_draft_beside_a_memory_that_knows_it_all_is_worth_nothing() -> None:
    times, worth = Table(SECONDS | {(3, 0): 1.05, (2, 0): 1.02, (3, 1): 1.15}), Worth()
    given = load([0.6, 0.36], memory_M=[0.99, 0.98])
    add(worth, given, times)
    found = worth.report()
    assert found is not None
    assert (found.of_draft, found.of_better) == (1.0, 1.0) and found.of_far_better < 1.01


def test_where_no_draft_may_propose_it_is_worth_nothing() -> None:
    times, worth = Table(SECONDS), Worth()
    given = load(None)
    add(worth, given, times)
    found = worth.report()
    assert found is not None
    assert (found.of_draft, found.of_better, found.of_far_better) == (1.0, 1.0, 1.0)


def test_new_loads_outweigh_old_ones() -> None:
    times, worth = Table(SECONDS), Worth()
    poor, good = load([0.0, 0.0]), load([1.0, 1.0])
    for given in [poor] * 50 + [good] * 12:
        add(worth, given, times)
    found = worth.report()
    assert found is not None and found.of_draft == pytest.approx(3 / 1.2, rel=0.02)
