"""The bound of an evaluation's own runs: prices out of made-up steps, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from osd.evaluate.bound import own
from osd.evaluate.bound.costs import DraftCosts
from osd.evaluate.bound.speeds import ALL, NONE
from osd.evaluate.figures import figures_of
from osd.evaluate.plan import Load
from osd.evaluate.report import html
from osd.evaluate.runs import Run, Step
from osd.evaluate.table import table
from tests.support.evaluations import REQUESTS, run_of, served, step

BATCH = 2
ANSWER = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8)
"""It repeats itself, so the memory is right from its second third on."""


def steps(width: int, seconds: float, *, proposing: float, num: int = 4) -> list[Step]:
    """Of full batches; half of what was proposed with, in the control."""
    parts = (proposing / 2, 0.01, 0.0, 0.0)
    return [
        step(BATCH, width, verify=0.01, seconds=seconds, own=proposing / 2, parts=parts)
        for _ in range(num)
    ]


def prefill(seconds: float) -> Step:
    return step(BATCH, 40, verify=0.01, seconds=seconds, is_pure=False)


def run(method: str, k: int, of: list[Step], **fields: Any) -> Run:
    answers = [replace(served(i, [0], 0), token_ids=ANSWER) for i in range(4)]
    return replace(run_of(method, k, answers), engine="memory", steps=tuple(of), **fields)


NONES = run("none", 0, [prefill(0.6), prefill(0.2), *steps(2, 0.1, proposing=0.0)])


def memory(k: int, seconds: float, proposing: float) -> Run:
    return run("memory", k, steps(2 + 2 * k, seconds, proposing=proposing))


def test_prices_are_those_of_the_steps() -> None:
    runs = [NONES, memory(1, 0.13, 0.01), memory(3, 0.17, 0.03)]
    found = own.costs_of(runs, BATCH, own.longest_drafts(runs))
    assert found is not None
    assert found.widths == (0, 1, 3)
    assert found.verify_s == pytest.approx((0.1, 0.12, 0.14))
    assert found.drafts["memory"].per_step_s == pytest.approx(0.02)
    assert found.prefill_s == pytest.approx(BATCH * 0.8 / 4)


def test_each_proposer_has_a_price_of_its_own_and_the_control_none() -> None:
    slow = run("none", 0, [replace(prefill(0.9), own=0.3), prefill(0.2), *NONES.steps[2:]])
    drafting = replace(run("draft", 1, steps(4, 0.13, proposing=0.03)), engine="draft")
    found = own.costs_of([slow, memory(1, 0.13, 0.01), drafting], BATCH, {"memory": 1, "draft": 1})
    assert found is not None
    assert found.drafts["memory"].per_step_s == pytest.approx(0.01)
    assert found.drafts["draft"].per_pass_s == pytest.approx(0.03)
    assert found.prefill_s == pytest.approx(BATCH * 0.8 / 4)


def draft_costs(*by_k: tuple[int, float]) -> DraftCosts:
    runs = [
        replace(run("draft", k, steps(2 + 2 * k, 0.2, proposing=s)), engine="draft")
        for k, s in by_k
    ]
    found = own.costs_of([NONES, *runs], BATCH, own.longest_drafts(runs))
    assert found is not None
    return found.drafts["draft"]


@pytest.mark.parametrize(
    ("by_k", "per_step", "per_pass"),
    [
        (((1, 0.03), (3, 0.07)), 0.01, 0.02),  # a line
        (((3, 0.06),), 0.0, 0.02),  # through nothing
        (((1, 0.02), (3, 0.09)), 0.0, 0.025),  # which would begin below nothing
        (((1, 0.05), (3, 0.03)), 0.04, 0.0),  # which would fall
    ],
)
def test_a_draft_models_price_is_a_line_that_neither_falls_nor_begins_below_nothing(
    by_k: Any, per_step: float, per_pass: float
) -> None:
    found = draft_costs(*by_k)
    assert (found.per_step_s, found.per_pass_s) == pytest.approx((per_step, per_pass))


def test_steps_of_fewer_requests_or_without_parts_are_no_price() -> None:
    runs = [NONES, memory(1, 0.13, 0.01)]
    assert own.costs_of(runs, BATCH, {"memory": 1}) is not None
    assert own.costs_of(runs, 3, {"memory": 1}) is None
    untold = [replace(one, steps=tuple(replace(s, parts=None) for s in one.steps)) for one in runs]
    assert own.costs_of(untold, BATCH, {"memory": 1}) is None
    few = run("memory", 1, steps(4, 0.13, proposing=0.01, num=2))
    assert own.costs_of([NONES, few], BATCH, {"memory": 1}) is None


AUTO = replace(run("auto", 3, steps(8, 0.17, proposing=0.0)), engine="auto", seconds=1.2)
AUTO_NONE = replace(NONES, engine="auto", started="b")


def bound_of(*more: Run) -> tuple[own.Bound, list[Run]]:
    runs = [NONES, memory(1, 0.13, 0.01), replace(memory(3, 0.17, 0.03), seconds=1.6), *more]
    (found,) = own.bounds(runs, REQUESTS, [Load(streams=BATCH), Load(rate=1.0)], None)
    return found, runs


def test_the_oracle_is_as_fast_as_any_and_the_memory_gains_where_answers_repeat() -> None:
    found, _ = bound_of()
    assert (found.load, found.temperature, found.most) == ("batch 2", 0.0, {"memory": 3})
    assert found.speeds[NONE] == 1.0 < found.speeds["memory, k = 3"] <= found.speeds[ALL]
    assert found.speeds[found.best_fixed] <= found.speeds["memory, oracle length"]
    assert found.speeds["memory, oracle length"] == found.speeds[ALL]


def test_a_bound_reads_nones_answers_and_its_own_engines_and_temperature() -> None:
    found, runs = bound_of()
    others = [replace(one, temperature=0.7, steps=one.steps[:2] + one.steps[-3:]) for one in runs]
    slower = [replace(s, seconds=2 * s.seconds) for s in runs[1].steps]
    others[1] = replace(others[1], steps=tuple(slower))
    silent = [replace(one, requests=()) for one in runs[1:]]
    given = [runs[0], *silent, AUTO_NONE, replace(AUTO, started="b"), *others]
    both = own.bounds(given, REQUESTS, [Load(streams=BATCH)], None)
    assert [one.temperature for one in both] == [0.0, 0.7]
    assert both[0].speeds == found.speeds != both[1].speeds


def test_the_control_is_held_against_the_fixed_choice_that_was_measured() -> None:
    """none took 2 s, the best fixed choice 1.6, the control 1.2: 1.67 over 1.25, on the way to the
    oracle over the fixed choice, as computed."""
    auto, nones = replace(AUTO, started="b"), AUTO_NONE
    found, runs = bound_of(nones, auto)
    figures = figures_of(runs, REQUESTS)
    gap = found.speeds[ALL] / found.speeds[found.best_fixed] - 1
    closed = own.closed_by_auto(found, figures)
    assert closed == pytest.approx((2 / 1.2 / (2 / 1.6) - 1) / gap)
    elsewhere = [replace(one, load="batch 4", seconds=3.0) for one in runs]
    assert own.closed_by_auto(found, figures_of([*runs, *elsewhere], REQUESTS)) == closed
    line = f"auto closes {closed:.0%} of the gap"
    assert line in table(figures, [found], [])
    page = html(figures, [found], [], {})
    assert line in page and "What is left to gain" in page and "memory, oracle length" in page
    computed = found.speeds["memory, k = 3"]
    assert f"<td>memory, k = 3</td><td>{computed:.2f}</td><td>1.25</td>" in page
    assert "batch 2, temperature 0: auto 3, 1.67 times as fast as none" in page
    alone, runs = bound_of()
    assert own.closed_by_auto(alone, figures_of(runs, REQUESTS)) is None
    assert "of the gap" not in table(figures_of(runs, REQUESTS), [alone], [])


def test_a_load_without_a_bound_says_why_unless_its_requests_come_by_themselves() -> None:
    _, runs = bound_of()
    line = "upper bound, batch 2, temperature 0: none, as too few steps"
    assert table(figures_of(runs, REQUESTS), [], []).count(line) == 1
    open_loop = [replace(run, load="1/s") for run in runs]
    assert "upper bound" not in table(figures_of(open_loop, REQUESTS), [], [])


def test_where_no_fixed_length_gains_the_control_is_held_against_none() -> None:
    """none took 2 s, the only length 4, the control 1.2."""
    runs = [
        NONES,
        replace(memory(3, 0.17, 0.03), seconds=4.0),
        AUTO_NONE,
        replace(AUTO, started="b"),
    ]
    (found,) = own.bounds(runs, REQUESTS, [Load(streams=BATCH)], None)
    gap = found.speeds[ALL] / found.speeds[found.best_fixed] - 1
    closed = own.closed_by_auto(found, figures_of(runs, REQUESTS))
    assert closed == pytest.approx((2 / 1.2 - 1) / gap)


def test_a_length_that_was_not_measured_does_not_shorten_the_way_to_the_oracle() -> None:
    """none took 2 s, the memory at 1 and 3 tokens 1.6 each, the control 1.2; 2 tokens would have
    been faster, as computed."""
    runs = [
        NONES,
        replace(memory(1, 0.13, 0.01), seconds=1.6),
        replace(memory(3, 0.17, 0.03), seconds=1.6),
        AUTO_NONE,
        replace(AUTO, started="b"),
    ]
    speeds = {NONE: 1.0, "memory, k = 1": 1.2, "memory, k = 2": 1.4, "memory, k = 3": 1.25}
    bound = own.Bound(
        load="batch 2", temperature=0.0, most={"memory": 3}, speeds=speeds | {ALL: 1.5}
    )
    assert bound.best_fixed == "memory, k = 2"
    closed = own.closed_by_auto(bound, figures_of(runs, REQUESTS))
    assert closed == pytest.approx((1.6 / 1.2 - 1) / (1.5 / 1.25 - 1))
