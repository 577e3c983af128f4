"""What learning brings to drafts of several sizes and starts, from made-up runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import names
from benchmarks.learning import drafts
from benchmarks.learning.drafts import GREEDY, SAMPLED, Drafting, draft_of
from benchmarks.parts import narrowed
from benchmarks.prose.recipe import FOREIGN, SIZES
from benchmarks.record import Options, Row
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.traffic.family import FAMILIES, PROSE

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


MODELS = PROSE[:2]
SMALL, LARGE = draft_of(PROSE[0], drafts.SMALL), draft_of(PROSE[0], drafts.LARGE)
MOST = draft_of(PROSE[0], foreign=drafts.MOST)


def curves(way: Drafting, frozen: float, learnt: float, since: int = 200) -> dict[str, Curve]:
    alone, beside = way.speed.values()
    return {
        way.frozen: climbing(frozen, frozen),
        way.learning: climbing(frozen, learnt, since),
        way.offline: climbing(0.5, 0.5),
        alone[1]: climbing(0, 0, late=100),
        alone[0]: climbing(0, 0, late=160),
        beside[1]: climbing(0, 0, late=200),
        beside[0]: climbing(0, 0, late=190),
    }


@pytest.mark.parametrize("way", [GREEDY, SAMPLED])
def test_what_larger_drafts_gain_more(tmp_path: Path, way: Drafting) -> None:
    plan = drafts.protocol(Options(directory=tmp_path))
    families = [family for model in MODELS for family in drafts.DRAFTS[model]]
    learnt = dict.fromkeys(families, (0.1, 0.48))
    learnt[SMALL] = (0.1, 0.4)  # never 90 % of 0.5
    learnt[MOST] = (0.3, 0.48)
    rows = [row for one, pair in learnt.items() for row in rows_of(one, curves(way, *pair))]
    result = drafts.summarise(plan, rows)
    found = {(figure.group, figure.name): figure for figure in result.figures}
    by_size = found["compared", way.said + drafts.BY_SIZE_GAINED]
    assert by_size.value == pytest.approx(0.04) and by_size.n == 6, (
        "0.08 of the first, 0 of the other"
    )
    assert by_size.low is not None and by_size.low < 0.04
    by_foreign = found["compared", way.said + drafts.BY_FOREIGN_GAINED]
    assert by_foreign.value == pytest.approx(0.1)
    large = f"{LARGE}: compared"
    assert found[large, way.said + drafts.GAINED].value == pytest.approx(0.38)
    assert found[large, way.said + drafts.OF_OFFLINE].value == pytest.approx(0.96)
    assert found[large, way.said + drafts.ALONE].value == pytest.approx(1.6)
    assert found[large, way.said + drafts.BESIDE].value == pytest.approx(0.95)
    reached = way.said + drafts.REACHED
    assert {f.group: is_met for goal, f, is_met in result.verdicts() if f.name == reached} == {
        f"{family}: compared": family != SMALL for family in families
    }
    to_reach = f"{LARGE}: to 90% of the α trained offline, where it is reached"
    requests = found[to_reach, way.said + "requests"].value
    # The mean of the window comes to 0.9 of 0.5 a little before all of it has learnt.
    assert 200 - GERMAN - 48 < requests <= 200 - GERMAN
    assert found[to_reach, way.said + "served tokens"].value == pytest.approx(100 * requests)
    nowhere = f"{SMALL}: to 90% of the α trained offline, where it is reached"
    assert (nowhere, way.said + "requests") not in found


def test_arms_that_did_not_run_are_left_out(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, only=(f"arms={names.FROZEN}", f"families={LARGE}"))
    plan = narrowed(drafts.protocol(options), options)
    some = {names.FROZEN: climbing(0.1, 0.1)}
    result = drafts.summarise(plan, rows_of(LARGE, some))
    (figure,) = result.figures
    assert (figure.value, figure.n) == (pytest.approx(0.1), 3)
    assert len(result.unjudged()) == 6


def test_the_drafts_differ_in_one_thing_at_a_time() -> None:
    assert tuple(drafts.DRAFTS) == PROSE
    for model, names_of in drafts.DRAFTS.items():
        assert all(name in FAMILIES for name in names_of)
        assert len(set(names_of)) == len(SIZES) + len(FOREIGN) - 1
        for name in names_of:
            assert FAMILIES[name].recorded_as == (model if name != model else "")
    assert SMALL == "prose-0.4M-0%" and LARGE == "prose-2M-0%" and MOST == "prose-1M-20%"
    assert draft_of("prose-1", drafts.LARGE) == "prose-1-2M-0%"


def test_what_is_recorded_is_of_the_models_that_are_asked_for(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, only=("families=prose-2-2M-0%", "families=prose-2"))
    plan = narrowed(drafts.protocol(options), options)
    assert {family for family, *_ in drafts._streams(plan)} == {"prose-2"}
