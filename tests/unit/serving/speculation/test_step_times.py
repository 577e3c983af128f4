"""Step times learnt from an engine whose true cost is a formula with a knee."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from serving.speculation.step_times import (
    CELL_SIZE,
    MAX_CELLS,
    STALE_SIZE,
    STALE_STEPS,
    STEPS_PER_FIT,
    Shape,
    StepTimes,
    key_of,
)

BATCHES, WIDTHS = (1, 2, 4, 8, 16, 32), (0, 1, 3, 5)


def true_seconds(shape: Shape) -> float:
    """Linear, but for a knee at 32 verified tokens, from which each costs five times as much."""
    passes = (
        0.002 + 0.0015 * shape.drafted + 0.0001 * shape.drafted * shape.batch
        if shape.drafted
        else 0.0
    )
    verified = 0.0003 * shape.tokens + 0.0012 * max(shape.tokens - 32, 0)
    return 0.010 + 0.0002 * shape.batch + verified + 1e-6 * shape.context + passes


def a_shape(batch: int, k: int, *, context: int = 100) -> Shape:
    return Shape(batch, batch * (1 + k), context * batch, k)


GRID = [a_shape(batch, k) for batch in BATCHES for k in WIDTHS]


def settle(times: StepTimes) -> StepTimes:
    """Fitted to all it was shown; a fit that still runs would replace ours."""
    if times._fitting is not None:
        times._fitting.join()
    times.fit()
    return times


def learnt(
    shapes: Sequence[Shape] = GRID,
    *,
    steps: int = 10,
    noise: float = 0.0,
    padded: Sequence[int] = (),
) -> StepTimes:
    rng = np.random.default_rng(0)
    times = StepTimes(padded)
    for _ in range(steps):
        for shape in shapes:
            times.add(shape, true_seconds(shape) * float(np.exp(rng.normal(0, noise))))
    return settle(times)


def errors(times: StepTimes, shapes: Sequence[Shape]) -> np.ndarray:
    """Relative."""
    return times.predict(shapes) / np.array([true_seconds(shape) for shape in shapes]) - 1


# -- the fit --------------------------------------------------------------------------------------


def test_a_cost_with_a_knee_is_recovered() -> None:
    assert np.abs(errors(learnt(), GRID)).max() < 0.001
    assert np.abs(errors(learnt(noise=0.03), GRID)).max() < 0.04


def test_shapes_never_seen_are_predicted() -> None:
    times = learnt(noise=0.03)
    unseen = [a_shape(batch, k) for batch in (3, 6, 12, 24) for k in (0, 2, 4)]
    assert not {key_of(shape) for shape in unseen} & {key_of(shape) for shape in GRID}
    assert np.abs(errors(times, unseen)).max() < 0.04


def test_what_lies_beyond_all_that_was_seen_is_predicted_sanely() -> None:
    times = learnt(noise=0.03)
    beyond = [a_shape(batch, k) for batch in (48, 64) for k in (0, 2)]
    assert np.abs(errors(times, beyond)).max() < 0.15


@pytest.mark.parametrize("batch", [3, 5, 7, 11, 24, 50])
def test_unseen_batches_cost_something_and_more_tokens_never_less(batch: int) -> None:
    seconds = learnt(noise=0.05).predict(
        [Shape(batch, tokens, 100 * batch, 2) for tokens in range(batch, 12 * batch)]
    )
    assert seconds.min() > 0.01
    assert np.diff(seconds).min() >= 0
    assert seconds[-1] > seconds[0]


def uneven() -> list[Shape]:
    """Steps whose width, context and passes vary each for itself, as where the memory or
    changes of k are among them."""
    rng = np.random.default_rng(2)
    return [
        Shape(
            batch, batch * (1 + k), int(rng.integers(50, 4000)) * batch, int(rng.choice([0, k, 2]))
        )
        for batch in BATCHES
        for k in range(6)
    ]


def test_each_term_of_the_cost_is_told_apart() -> None:
    times = learnt(uneven())
    base = Shape(6, 24, 6000, 3)
    for changed in (
        base._replace(batch=12),
        base._replace(tokens=30),
        base._replace(context=40_000),
    ):
        expected = true_seconds(changed) - true_seconds(base)
        assert float(np.diff(times.predict([base, changed]))[0]) == pytest.approx(
            expected, rel=0.05
        )
    with_passes = times.predict([base._replace(drafted=0), base, base._replace(drafted=5)])
    expected_passes = [true_seconds(base._replace(drafted=passes)) for passes in (0, 3, 5)]
    assert with_passes.tolist() == pytest.approx(expected_passes, rel=0.02)


def test_before_the_first_fit_all_steps_cost_the_same() -> None:
    times = StepTimes()
    times.add(a_shape(1, 0), 0.01)
    assert not times.is_fitted
    assert times.predict([a_shape(1, 0), a_shape(32, 5)]).tolist() == [1, 1]


def test_one_more_token_costs_what_the_knee_says() -> None:
    times = learnt(uneven())
    assert times.seconds_per_token(a_shape(4, 3)) == pytest.approx(0.0003, rel=0.05)
    assert times.seconds_per_token(a_shape(16, 3)) == pytest.approx(0.0015, rel=0.05)
    assert StepTimes().seconds_per_token(a_shape(16, 3)) == 0


# -- cells ----------------------------------------------------------------------------------------


def test_a_cell_that_was_seen_often_overrules_the_fit() -> None:
    odd, neighbour = a_shape(8, 3), a_shape(8, 2)

    def ratio(num_steps: int, shape: Shape) -> float:
        times = learnt([shape for shape in GRID if shape != odd], steps=CELL_SIZE)
        for _ in range(num_steps):
            times.add(odd, 1.5 * true_seconds(odd))
        return 1 + float(errors(settle(times), [shape])[0])

    assert ratio(0, odd) == pytest.approx(1, abs=0.02)
    assert ratio(1, odd) < 1.25
    assert 1.38 < ratio(CELL_SIZE, odd) < 1.52
    assert ratio(CELL_SIZE, neighbour) < 1.1, "the fit was right elsewhere"


def test_spikes_do_not_move_a_prediction() -> None:
    times = StepTimes()
    for i in range(CELL_SIZE):
        for shape in GRID:
            times.add(shape, true_seconds(shape) * (50 if i % 3 == 0 else 1))
    assert np.abs(errors(settle(times), GRID)).max() < 0.01


def test_the_newest_steps_replace_the_old() -> None:
    times = learnt(steps=3 * CELL_SIZE)
    for shape in GRID * CELL_SIZE:
        times.add(shape, 2 * true_seconds(shape))
    assert errors(settle(times), GRID) == pytest.approx(np.ones(len(GRID)), rel=0.01)
    assert {times.num_steps(shape) for shape in GRID} == {CELL_SIZE}


def test_cells_are_bounded_and_those_in_use_stay() -> None:
    times = StepTimes()
    old, used = a_shape(1, 2), a_shape(1, 1)
    for shape in [old, used] * 5 + [a_shape(batch, 0) for batch in range(1, 300)] + [used]:
        times.add(shape, 0.01)
    for batch in range(300, MAX_CELLS + 1):
        times.add(a_shape(batch, 0), 0.01)
    assert times.num_cells == MAX_CELLS
    assert [times.num_steps(shape) for shape in (old, a_shape(1, 0), used)] == [0, 0, 6]
    assert times.num_steps(a_shape(MAX_CELLS, 0)) == 1


def test_a_cell_holds_one_batch_and_one_number_of_passes_and_nearly_one_width() -> None:
    assert key_of(Shape(8, 32, 100, 3)) == key_of(Shape(8, 33, 9000, 3))
    assert len({key_of(Shape(8, tokens, 100, 3)) for tokens in (16, 24, 32, 40, 48)}) == 5
    assert key_of(Shape(8, 32, 100, 3)) != key_of(Shape(7, 32, 100, 3))
    assert key_of(Shape(8, 32, 100, 3)) != key_of(Shape(8, 32, 100, 0))


# -- CUDA graphs ----------------------------------------------------------------------------------


def test_padded_sizes_make_a_step_function() -> None:
    padded = (8, 16, 32, 64)
    times = StepTimes(padded)
    for shape in GRID * 5:
        size = next((size for size in padded if size >= shape.tokens), shape.tokens)
        times.add(shape, true_seconds(shape._replace(tokens=size)))
    settle(times)
    at = {tokens: float(times.predict([Shape(7, tokens, 700, 2)])[0]) for tokens in range(9, 80)}
    assert len({at[tokens] for tokens in range(9, 17)}) == 1
    assert len({at[tokens] for tokens in range(17, 33)}) == 1
    assert at[17] - at[16] == pytest.approx(16 * 0.0003, rel=0.05)
    assert at[33] - at[32] == pytest.approx(32 * 0.0015, rel=0.05)
    assert at[66] > at[65] > at[64], "beyond the largest graph each token counts"
    assert times.seconds_per_token(Shape(7, 21, 700, 2)) == pytest.approx(0.0003, rel=0.05), (
        "a token's share of a larger graph; whether cutting a draft saves one, the steps say"
    )


# -- the profile ----------------------------------------------------------------------------------


def test_a_profile_survives_as_json() -> None:
    times = learnt(noise=0.03)
    rows = json.loads(json.dumps(times.to_rows()))
    assert {tuple(row) for row in rows} == {
        ("batch", "tokens", "context", "drafted", "seconds", "steps")
    }
    loaded = StepTimes()
    loaded.load_rows(rows)
    assert loaded.is_fitted
    assert loaded.num_cells == times.num_cells
    unseen = [a_shape(batch, 2) for batch in (3, 6, 12, 24)]
    for shapes in (GRID, unseen):
        assert loaded.predict(shapes) == pytest.approx(times.predict(shapes), rel=0.02)
    assert sorted(map(str, loaded.to_rows())) == sorted(
        str({**row, "steps": CELL_SIZE // 2}) for row in rows
    )


def test_own_steps_soon_outweigh_the_profile() -> None:
    times = StepTimes()
    times.load_rows(
        {**shape._asdict(), "seconds": 3 * true_seconds(shape), "steps": 15} for shape in GRID
    )
    assert errors(times, GRID) == pytest.approx(2 * np.ones(len(GRID)), rel=0.01)
    for shape in GRID * (CELL_SIZE // 2 + 1):
        times.add(shape, true_seconds(shape))
    assert np.abs(errors(settle(times), GRID)).max() < 0.01


def test_a_profile_of_nothing_fits_nothing() -> None:
    times = StepTimes()
    times.load_rows([])
    assert not times.is_fitted


GOOD_ROW = {"batch": 1, "tokens": 2, "context": 10, "drafted": 1, "seconds": 0.01, "steps": 5}


@pytest.mark.parametrize(
    "row, error",
    [
        ({key: value for key, value in GOOD_ROW.items() if key != "tokens"}, KeyError),
        ({key: value for key, value in GOOD_ROW.items() if key != "seconds"}, KeyError),
        ({**GOOD_ROW, "batch": "many"}, ValueError),
        ({**GOOD_ROW, "seconds": "long"}, ValueError),
        ({**GOOD_ROW, "seconds": None}, TypeError),
        ({**GOOD_ROW, "steps": None}, TypeError),
        ([1, 2, 10, 1, 0.01, 5], TypeError),
        (None, TypeError),
    ],
)
def test_rows_of_another_form_are_refused(row: Any, error: type[Exception]) -> None:
    times = StepTimes()
    with pytest.raises(error):
        times.load_rows([GOOD_ROW, row])
    assert times.num_cells == 0, "all of a profile is taken, or nothing"


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": 0.0}, {"seconds": -1.0}, {"seconds": math.nan}, {"seconds": math.inf}]
    + [{"tokens": 0}, {"batch": -1}, {"drafted": -1}],
)
def test_times_and_shapes_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    times = StepTimes()
    with pytest.raises(ValueError, match="no step takes such time"):
        times.load_rows([GOOD_ROW, {**GOOD_ROW, **wrong}])
    assert times.num_cells == 0


# -- the thread -----------------------------------------------------------------------------------


class SlowToFit(StepTimes):
    """Its fits wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.may_fit = threading.Event()
        self.num_fits = 0

    def _refit(self, *args: Any) -> None:
        assert self.may_fit.wait(30)
        self.num_fits += 1
        super()._refit(*args)


def test_every_so_many_steps_are_fitted_without_being_asked() -> None:
    times = SlowToFit()
    times.may_fit.set()
    shapes = (GRID * 20)[: STEPS_PER_FIT - 1]
    for shape in shapes:
        times.add(shape, true_seconds(shape))
    assert times._fitting is None
    times.add(GRID[0], true_seconds(GRID[0]))
    assert times._fitting is not None
    times._fitting.join()
    for shape in shapes[: STEPS_PER_FIT // 2]:
        times.add(shape, true_seconds(shape))
    assert (times.is_fitted, times.num_fits) == (True, 1)
    assert np.abs(errors(times, GRID)).max() < 0.01


def test_steps_that_come_during_a_fit_are_not_lost() -> None:
    times = SlowToFit()
    for shape in (GRID * 20)[:STEPS_PER_FIT]:
        times.add(shape, true_seconds(shape))
    late = [a_shape(batch, 5) for batch in (3, 6, 12)]
    for shape in late * STEPS_PER_FIT:
        times.add(shape, 2 * true_seconds(shape))
    first = times._fitting
    assert first is not None
    assert times.num_fits == 0, "one fit at a time, and none of them in the way of the engine"
    assert not times.is_fitted
    times.may_fit.set()
    first.join()
    assert sum(times.num_steps(shape) for shape in GRID + late) == STEPS_PER_FIT + 3 * CELL_SIZE
    assert np.abs(errors(times, late)).max() < 0.05, (
        "the first fit knows nothing of what came during it"
    )
    times.add(GRID[0], true_seconds(GRID[0]))
    assert times._fitting is not None
    assert times._fitting is not first, "the next step starts the fit that was due meanwhile"
    times._fitting.join()
    assert times.num_fits == 2
    assert errors(times, late) == pytest.approx(np.ones(3), rel=0.2)


def test_context_given_apart_counts_as_context_of_the_shapes() -> None:
    times = learnt()
    bare = [Shape(4, 4 * (1 + k), 0, k) for k in range(6)]
    for context in (0, 700, 3000):
        whole = times.predict([shape._replace(context=context) for shape in bare])
        assert times.predict(bare, context) == pytest.approx(whole)
    before = times.predict(bare)
    for _ in range(60):
        times.add(bare[5], 10 * float(before[5]))
    times.fit()
    assert times.predict(bare)[5] > 3 * before[5], "what is kept of the shapes is not their time"


def test_an_engine_that_knows_hundreds_of_shapes_does_not_wait_for_their_medians() -> None:
    """Each fit needs those of all, and few have changed since the fit before."""
    shapes = [a_shape(batch, k) for batch in range(1, MAX_CELLS // len(WIDTHS) + 1) for k in WIDTHS]
    times = StepTimes()
    times.load_rows(
        {**shape._asdict(), "seconds": true_seconds(shape), "steps": CELL_SIZE} for shape in shapes
    )
    assert times.num_cells > MAX_CELLS / 2
    spent: list[float] = []
    for shape in shapes[: 2 * STEPS_PER_FIT]:
        began = time.thread_time()
        times.add(shape, true_seconds(shape))
        spent.append(time.thread_time() - began)
        times.settle()
    assert max(spent) < 0.02


# -- a machine that is not always as fast ---------------------------------------------------------


def test_a_slower_machine_makes_every_step_dearer_and_none_beside_the_others() -> None:
    """Half as fast from one moment on, and only one shape is still run: the others are known to be
    slower as well."""
    times = learnt(steps=CELL_SIZE)
    before = times.predict(GRID)
    for _ in range(60):
        times.add(GRID[5], 2 * true_seconds(GRID[5]))
    times.fit()
    assert times.predict(GRID) / before == pytest.approx(np.full(len(GRID), 2.0), rel=0.1)
    for row in times.to_rows():
        shape = Shape(*(row[name] for name in Shape._fields))
        assert row["seconds"] == pytest.approx(2 * true_seconds(shape), rel=0.1)


def test_what_was_seen_while_the_machine_was_slow_is_compared_as_if_it_had_not_been() -> None:
    known, new = a_shape(4, 3), a_shape(4, 2)
    times = learnt([shape for shape in GRID if shape != new], steps=CELL_SIZE)
    for _ in range(40):
        times.add(known, 2 * true_seconds(known))
    for _ in range(8):
        times.add(new, 2 * true_seconds(new))
    settle(times)
    seconds_new, seconds_known = times.predict([new, known])
    assert seconds_new / seconds_known == pytest.approx(
        true_seconds(new) / true_seconds(known), rel=0.05
    )


def test_a_shape_not_seen_for_long_is_learnt_anew() -> None:
    """It costs less than it did, beside all others: a few steps say so, however many said otherwise
    once."""
    times = learnt(steps=CELL_SIZE)
    cheaper, other = GRID[6], GRID[5]
    for _ in range(STALE_STEPS + 10):
        times.add(other, true_seconds(other))
    for _ in range(STALE_SIZE + 2):
        times.add(cheaper, true_seconds(cheaper) / 2)
    settle(times)
    assert float(times.predict([cheaper])[0]) < 0.7 * true_seconds(cheaper)
    assert float(times.predict([other])[0]) == pytest.approx(true_seconds(other), rel=0.1)


@pytest.mark.parametrize("share, factor", [(0.1, 1.5), (0.02, 10.0), (0.2, 0.7), (0.0, 1.0)])
def test_steps_that_now_and_then_take_longer_make_no_slower_machine(
    share: float, factor: float
) -> None:
    """Two shapes are run, and learnt anew meanwhile; those that are not would seem too dear to be
    tried."""
    known, rng, paces = [a_shape(4, k) for k in range(6)], np.random.default_rng(1), []
    times = learnt(known, steps=CELL_SIZE)
    before = times.predict(known)
    for i in range(8000):
        shape = known[3] if rng.random() < 0.9 else known[0]
        odd = factor if rng.random() < share else 1.0
        times.add(shape, true_seconds(shape) * float(np.exp(rng.normal(0, 0.05))) * odd)
        times.settle()
        if i >= 4000 and times.pace is not None:
            paces.append(times.pace)
    assert np.mean(paces) == pytest.approx(1, abs=0.1)
    assert times.predict(known) == pytest.approx(before, rel=0.15)


def test_one_long_pause_hardly_changes_the_pace() -> None:
    times = learnt(steps=CELL_SIZE)
    before = times.predict(GRID)
    times.add(GRID[5], 100 * true_seconds(GRID[5]))
    assert (times.predict(GRID) / before).max() < 1.07
