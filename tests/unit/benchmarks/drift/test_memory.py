"""What the benchmarks of the memory and of payback say, from made-up runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import memory, names
from benchmarks.learning import payback
from benchmarks.parts import narrowed
from benchmarks.record import Options, Row
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.step_times import DRAFT, STREAMS, WIDTHS
from benchmarks.result import Figure, Result
from benchmarks.traffic.schedule import read_all

SHARP = read_all()["sharp"]
SHIFT, END = SHARP.bounds[1], SHARP.num_requests
THIRD = SHIFT + (END - SHIFT) * 2 // 3
TIMED: list[Row] = [
    {"batch": STREAMS, "arm": arm, "step_s": 0.1} for arm in (*map(str, WIDTHS), DRAFT)
]
NONE = STREAMS / 0.1
"""Tokens per second without speculation."""


def a_curve(before: float, after: float, late: float, cpu_s: float = 0.0) -> Curve:
    """Tokens per second over those without speculation: before the shift, after, and in the last
    third after it."""
    one = StepCounts(tokens=100, steps=50, drafts=50, drafted=200, tested=100, accepted=50)
    speed = np.full(END, before)
    speed[SHIFT:], speed[THIRD:] = after, late
    spent = np.linspace(0, cpu_s, END).tolist()
    return Curve.of([one] * END, spent, seconds=100 / (NONE * speed))


def rows_of(curves: Mapping[str, Curve], num_seeds: int = 3) -> list[Row]:
    return [
        {"schedule": "sharp", "seed": seed, "contender": arm, **curve.as_row()}
        for arm, curve in curves.items()
        for seed in range(num_seeds)
    ]


def by_name(result: Result) -> dict[tuple[str, str], Figure]:
    return {(figure.group, figure.name): figure for figure in result.figures}


CURVES = {
    names.MEMORY: a_curve(1.4, 2.0, 2.2),
    names.DRAFT_LOOP: a_curve(2.5, 0.9, 0.9),
    names.SUFFIX_LOOP: a_curve(1.2, 1.6, 1.9),
    names.FROZEN_LOOP: a_curve(2.5, 1.9, 2.2),
    names.SERVED: a_curve(2.5, 1.9, 2.64),
    names.LEARNING_DRAFT_LOOP: a_curve(2.5, 1.0, 2.4),
}


def test_what_both_are_worth_is_held_against_the_better_one(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, only=("schedules=sharp",))
    plan = replace(narrowed(memory.protocol(options), options), arms=tuple(CURVES))
    found = by_name(memory.summarise(plan, [*TIMED, *rows_of(CURVES)]))
    third = "sharp: compared, sql, third {}"
    assert found[third.format(1), memory.OVER_SINGLE].value == pytest.approx(0.95)
    assert found[third.format(3), memory.OVER_SINGLE].value == pytest.approx(1.0)
    assert found[third.format(3), memory.LATE].value == pytest.approx(1.1), "of one that learns"
    assert (third.format(2), memory.LATE) not in found
    first = found["sharp: compared, sql", memory.FIRST_OVER_SUFFIX]
    assert (first.value, first.n) == (pytest.approx(1.25), 3)
    assert found["sharp: compared, home, third 2", memory.OVER_SINGLE].value == pytest.approx(1.0)


def test_the_learning_draft_is_replayed_on_one_schedule_alone(tmp_path: Path) -> None:
    played = {
        (name, arm)
        for name in read_all()
        for arm in memory.protocol(Options(directory=tmp_path)).arms
        if memory._plays(name, arm)
    }
    assert {name for name, arm in played if arm == names.SERVED} == {"sharp"}
    assert {name for name, arm in played if arm == names.MEMORY} == set(read_all())


def test_arms_that_did_not_run_leave_their_figures_out(tmp_path: Path) -> None:
    options = Options(
        directory=tmp_path, only=("schedules=sharp", f"arms={names.MEMORY}", "seeds=0")
    )
    plan = narrowed(memory.protocol(options), options)
    some = {names.MEMORY: CURVES[names.MEMORY]}
    result = memory.summarise(plan, [*TIMED, *rows_of(some, 1)])
    assert {name for _, name in by_name(result)} == {names.MEMORY}
    assert len(result.unjudged()) == len(plan.goals)


def test_a_trainer_that_takes_the_engines_core_is_charged(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, only=("schedules=sharp",))
    plan = narrowed(payback.protocol(options), options)
    seconds = END * 100 / NONE / 2
    curves = {
        payback.OFF: a_curve(2, 2, 2),
        names.SERVED: a_curve(2.2, 2.2, 2.2, cpu_s=seconds / 2),
        names.CHARGED: a_curve(2, 2, 2, cpu_s=seconds / 100),
        **dict.fromkeys(names.STOPPED, a_curve(2.2, 2.2, 2.2, cpu_s=seconds / 5)),
    }
    found = by_name(payback.summarise(plan, [*TIMED, *rows_of(curves)]))
    group = "sharp: compared"
    assert found[group, payback.FREE].value == pytest.approx(1.1)
    assert found[group, payback.ADDED].value == pytest.approx(1 / (1 / 1.1 + 0.5))
    assert found[group, payback.CHARGED].value == pytest.approx(1 / 1.01)
    assert found[group, payback.HINDSIGHT].value == pytest.approx(1 / 1.01), "no training was best"
    del curves[next(iter(names.STOPPED))]
    part = by_name(payback.summarise(plan, [*TIMED, *rows_of(curves)]))
    assert found.keys() - part.keys() >= {(group, payback.HINDSIGHT)}, "the best may be missing"
    assert (group, payback.CHARGED) in part
