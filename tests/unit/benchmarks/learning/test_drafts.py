"""What learning brings to drafts of several sizes and starts, from made-up runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import names
from benchmarks.learning import drafts
from benchmarks.parts import narrowed
from benchmarks.record import Options, Row
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.traffic.family import FAMILIES

END, GERMAN, THIRD, AGAIN = 576, 96, 352, 480


def climbing(first: float, last: float, since: int = GERMAN, late: float = 100.0) -> Curve:
    """α `first`, and `last` from the request `since` to the end of German; `late` tokens/s in its
    last third."""
    counts = [
        StepCounts(
            tokens=100,
            steps=50,
            drafts=50,
            drafted=200,
            tested=100,
            accepted=int(100 * (last if since <= i < AGAIN else first)),
        )
        for i in range(END)
    ]
    seconds = np.full(END, 1.0)
    seconds[THIRD:AGAIN] = 100 / late
    return Curve.of(counts, seconds=seconds)


def rows_of(family: str, curves: dict[str, Curve], num_seeds: int = 3) -> list[Row]:
    return [
        {"family": family, "seed": seed, "contender": arm, **curve.as_row()}
        for seed in range(num_seeds)
        for arm, curve in curves.items()
    ]


def curves(frozen: float, learnt: float, since: int = 200) -> dict[str, Curve]:
    return {
        names.FROZEN: climbing(frozen, frozen),
        names.OURS: climbing(frozen, learnt, since),
        names.CEILING: climbing(0.5, 0.5),
        names.DRAFT_LOOP: climbing(0, 0, late=100),
        names.LEARNING_DRAFT_LOOP: climbing(0, 0, late=160),
        names.FROZEN_LOOP: climbing(0, 0, late=200),
        names.SERVED: climbing(0, 0, late=190),
    }


def test_what_larger_drafts_gain_more(tmp_path: Path) -> None:
    plan = drafts.protocol(Options(directory=tmp_path))
    learnt = dict.fromkeys(drafts.DRAFTS, (0.1, 0.48))
    learnt[drafts.SMALL] = (0.1, 0.4)  # never 90 % of 0.5
    learnt[drafts.MOST] = (0.3, 0.48)
    rows = [row for one, pair in learnt.items() for row in rows_of(one, curves(*pair))]
    result = drafts.summarise(plan, rows)
    found = {(figure.group, figure.name): figure for figure in result.figures}
    assert found["compared", drafts.BY_SIZE_GAINED].value == pytest.approx(0.08)
    assert found["compared", drafts.BY_FOREIGN_GAINED].value == pytest.approx(0.2)
    large = f"{drafts.LARGE}: compared"
    assert found[large, drafts.GAINED].value == pytest.approx(0.38)
    assert found[large, drafts.OF_OFFLINE].value == pytest.approx(0.96)
    without, beside = drafts.SPEED
    assert found[large, without].value == pytest.approx(1.6)
    assert found[large, beside].value == pytest.approx(0.95)
    assert {
        f.group: is_met for goal, f, is_met in result.verdicts() if f.name == drafts.REACHED
    } == {f"{family}: compared": family != drafts.SMALL for family in drafts.DRAFTS}
    to_reach = f"{drafts.LARGE}: to 90% of the α trained offline, where it is reached"
    requests = found[to_reach, "requests"].value
    # The mean of the window comes to 0.9 of 0.5 a little before all of it has learnt.
    assert 200 - GERMAN - 48 < requests <= 200 - GERMAN
    assert found[to_reach, "served tokens"].value == pytest.approx(100 * requests)
    assert (
        f"{drafts.SMALL}: to 90% of the α trained offline, where it is reached",
        "requests",
    ) not in (found)


def test_arms_that_did_not_run_are_left_out(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, only=(f"arms={names.FROZEN}", f"families={drafts.LARGE}"))
    plan = narrowed(drafts.protocol(options), options)
    some = {names.FROZEN: climbing(0.1, 0.1)}
    result = drafts.summarise(plan, rows_of(drafts.LARGE, some))
    (figure,) = result.figures
    assert (figure.value, figure.n) == (pytest.approx(0.1), 3)
    assert len(result.unjudged()) == 3


def test_the_drafts_differ_in_one_thing_at_a_time() -> None:
    assert all(name in FAMILIES for name in drafts.DRAFTS)
    assert len(set(drafts.DRAFTS)) == len(drafts.BY_SIZE) + len(drafts.BY_FOREIGN) - 1
    assert drafts.SMALL == "prose-0.4M-0%" and drafts.LARGE == "prose-2M-0%"
    assert drafts.NONE == "prose" and drafts.MOST == "prose-1M-20%"
    for name in drafts.DRAFTS:
        assert FAMILIES[name].recorded_as == ("prose" if name != "prose" else "")
