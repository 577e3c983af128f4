"""The cells of the map of where learning pays, from made-up runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import names
from benchmarks.learning import where_it_pays
from benchmarks.learning.online_report import LAST_THIRD
from benchmarks.record import Options, Row
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.recording import Recorded
from benchmarks.replays.step_times import published
from benchmarks.traffic.family import AT_TEMPERATURE, FAMILIES, FIRST_SERVED


def a_curve(late: float, alpha: float = 0.5) -> Curve:
    """100 tokens/s, and `late` in the last third of German."""
    one = StepCounts(
        tokens=100, steps=50, drafts=50, drafted=200, tested=100, accepted=int(100 * alpha)
    )
    seconds = np.full(576, 1.0)
    seconds[352:480] = 100 / late
    return Curve.of([one] * 576, seconds=seconds)


def test_each_cell_is_judged_by_itself(tmp_path: Path) -> None:
    plan = where_it_pays.protocol(Options(directory=tmp_path))
    rows: list[Row] = []
    for temperature in plan.sizes["temperatures"]:
        rows.append({"temperature": temperature, where_it_pays.LIKELIEST: 1 - temperature})
        for arm, alpha in ((names.FROZEN, 0.2), (names.OURS, 0.6)):
            key = {"temperature": temperature, "share": None, "contender": arm}
            rows += [{**key, **a_curve(1.0, alpha).as_row()}] * 3
        for share in plan.sizes["shares"]:
            gain = 1.3 if (temperature, share) == (0.3, 0.05) else 1.05
            late = {
                names.FROZEN_LOOP: 200.0,
                names.SERVED: 200.0 * gain,
                names.MEMORY: 150.0,
                names.DRAFT_LOOP: 110.0,
                names.LEARNING_DRAFT_LOOP: 165.0,
            }
            for arm, speed in late.items():
                key = {"temperature": temperature, "share": share, "contender": arm}
                rows += [{**key, **a_curve(speed).as_row()}] * 3
    result = where_it_pays.summarise(plan, rows)
    met = {figure.group: is_met for goal, figure, is_met in result.verdicts()}
    assert [group for group, is_met in met.items() if is_met] == [
        "T = 0.3, a draft of 5% of a step"
    ]
    assert len(met) == len(plan.sizes["temperatures"]) * len(plan.sizes["shares"])
    found = {(figure.group, figure.name): figure.value for figure in result.figures}
    assert found["T = 0.5: α, last third", names.OURS] == pytest.approx(0.6)
    assert found["T = 0.5", where_it_pays.LIKELIEST] == pytest.approx(0.5)
    over_none = f"T = 0.5, a draft of 30% of a step: {where_it_pays.OVER_NONE}"
    without = published().tokens_per_second_without()
    assert found[over_none, names.MEMORY] == pytest.approx(150 / without, rel=1e-4)
    cell = "T = 0.5, a draft of 30% of a step"
    assert found[cell, LAST_THIRD] == pytest.approx(1.05, rel=1e-4)
    assert found[cell, where_it_pays.WITHOUT_MEMORY] == pytest.approx(1.5, rel=1e-4)


def test_the_price_of_a_draft_is_a_share_of_a_step() -> None:
    plain = published().step(0, drafts=False)
    for share in where_it_pays.SHARES:
        times = where_it_pays.price(share)
        assert times.step(0, drafts=True) == pytest.approx((1 + share) * plain)
    as_published = published().draft_s / plain
    assert min(where_it_pays.SHARES, key=lambda share: abs(share - as_published)) == 0.3
    assert as_published == pytest.approx(0.3, abs=0.01)


def test_a_lower_temperature_makes_the_likeliest_token_likelier() -> None:
    def answered(temperature: float) -> Recorded:
        return Recorded(
            name="one",
            prompt_ids=np.zeros(1, np.int32),
            output_ids=np.zeros(2, np.int32),
            target_ids=np.zeros((2, 2), np.int32),
            target_logprobs=np.log([[0.8, 0.2], [0.5, 0.5]]).astype(np.float16),
            tail_logprob=np.full(2, -np.inf, np.float32),
            temperature=temperature,
        )

    sharp = (0.8**2 / (0.8**2 + 0.2**2) + 0.5) / 2
    assert where_it_pays.likeliest([answered(1.0)]) == pytest.approx(0.65, abs=1e-3)
    assert where_it_pays.likeliest([answered(0.5)]) == pytest.approx(sharp, abs=1e-3)


def test_families_of_other_temperatures_share_models_but_no_recordings() -> None:
    assert len(set(AT_TEMPERATURE.values())) == len(AT_TEMPERATURE) > 2
    for temperature, name in AT_TEMPERATURE.items():
        assert FAMILIES[name].temperature == temperature
        assert FAMILIES[name].recorded_as == ""
        assert FAMILIES[name].models.keywords == FAMILIES["prose"].models.keywords  # type: ignore[attr-defined]


def test_all_that_is_replayed_is_recorded_beforehand(tmp_path: Path) -> None:
    plan = where_it_pays.protocol(Options(directory=tmp_path))
    recorded = where_it_pays._streams(plan)
    assert {(family, block) for family, _, block, _ in recorded} == {
        (name, FIRST_SERVED + seed) for name in AT_TEMPERATURE.values() for seed in (0, 1, 2)
    }
    assert {(domain, num) for _, domain, _, num in recorded} == {("en", 192), ("de", 384)}
    runs = list(where_it_pays._runs(plan))
    assert len(runs) == len(set(runs)) == 3 * 3 * (2 + 3 * 5)
