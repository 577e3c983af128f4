"""How the soak and harm benches judge their rows.

Failures are excused for a reason only, and growth is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harm import forged, harm, report
from benchmarks.record import Options
from benchmarks.result import Result
from benchmarks.service import soak


def request(started: float, ended: float, error: str = "", **more: Any) -> dict[str, Any]:
    row = {"kind": "request", "started": started, "ended": ended, "error": error, "tokens": 9}
    return row | {"is_known": False, "is_changed": False} | more


def fault(
    name: str, at: float, seconds: float = 20.0, cut: tuple[float, ...] = ()
) -> dict[str, Any]:
    return {"kind": "fault", "fault": name, "at": at, "seconds": seconds, "cut": list(cut)}


def looks(slope: float = 0.0, num: int = 120) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {"kind": "look", "at": 5.0 * i}
        | {name: 100 + slope * 5 * i / 3600 + rng.normal() for name in soak.GROWING}
        for i in range(num)
    ]


END = {
    "kind": "end",
    "num_rounds": 9,
    "num_swaps": 4,
    "num_rollbacks": 1,
    "num_stored": 500,
    "lost": {"redis": 3},
}


def summary(
    tmp_path: Path, *rows: dict[str, Any], slope: float = 0.0
) -> tuple[dict[str, float], Result]:
    plan = soak.protocol(Options(directory=tmp_path))
    result = soak.summarise(plan, [*rows, *looks(slope), END])
    return {figure.name: figure.value for figure in result.figures}, result


def test_only_what_met_a_killed_engine_is_excused(tmp_path: Path) -> None:
    found, _ = summary(
        tmp_path,
        request(90, 95),
        request(99, 101, "engine died"),  # under way when it was killed
        request(110, 110, "connection refused"),  # before it was back
        request(130, 131, "boom"),  # later
        request(205, 206, "boom"),  # while only the trainer was away
        fault("engine", 100, 20, cut=(0.4, 0.7)),
        fault("trainer", 200, 10),
    )
    assert found["requests"] == 5
    assert found["requests failed, engine killed"] == 2
    assert found["requests failed, no engine killed"] == 2
    assert found["slowest end of a stream in a killed engine"] == 0.7
    assert found["engine: slowest return"] == 20 and found["trainer: slowest return"] == 10
    assert found["traces lost: redis"] == 3


def test_another_answer_is_a_change(tmp_path: Path) -> None:
    known = request(1, 2, is_known=True)
    found, result = summary(
        tmp_path, known, {**known, "is_changed": True}, {**known, "error": "boom"}
    )
    assert found["answers changed"] == 1
    assert [
        is_met for goal, _, is_met in result.verdicts() if goal.figure == "answers changed"
    ] == [False]


@pytest.mark.parametrize("slope", [0.0, 400.0])
def test_growth_is_told_from_noise(tmp_path: Path, slope: float) -> None:
    _, result = summary(tmp_path, slope=slope)
    memory = next(figure for figure in result.figures if figure.name == "memory, per hour")
    assert memory.low is not None and memory.high is not None
    assert memory.low <= slope <= memory.high
    assert (memory.low > 0) == (slope > 0)


def counts(alphas: list[float]) -> dict[str, list[int]]:
    return {"tested": [100] * len(alphas), "accepted": [round(100 * a) for a in alphas]}


def harmed(scenario: str, learnt: list[float], frozen: list[float], **more: Any) -> dict[str, Any]:
    row = {"scenario": scenario, "seed": 0, "learnt": counts(learnt), "frozen": counts(frozen)}
    return (
        row
        | {
            "rest": [list(range(len(learnt)))],
            "rounds": 5,
            "published_at": [40, 90],
            "train_seconds": 1.0,
        }
        | more
    )


def test_the_worst_window_counts_not_the_mean(tmp_path: Path) -> None:
    plan = harm.protocol(Options(directory=tmp_path, quick=True))
    dip = [0.9] * 100 + [0.4] * 100 + [0.9] * 100
    back = [0.9] * 150 + [0.5] * 200 + [0.85] * 50
    rows = [
        harmed("poisoned", dip, [0.8] * 300),
        harmed("sly", [0.9] * 300, [0.8] * 300, **{report.AVERAGED: counts(dip)}),
        harmed("hostile", [0.8] * 300, [0.8] * 300),
        harmed("return", back, [0.9] * 400, ceiling=counts([1.0] * 400)),
        harmed("steady", [0.9] * 200, [0.9] * 200),
    ]
    result = report.summarise(plan, rows)
    found = {(figure.group, figure.name): figure.value for figure in result.figures}
    worst = "α on the rest, learnt - frozen, worst window"
    assert found["poisoned", worst] == pytest.approx(-0.4)
    assert found["hostile", worst] == 0
    assert found["sly", report.WITH] == pytest.approx(-0.4)
    assert found["sly", "α on the rest, averaged"] == pytest.approx(2.2 / 3)
    gained = found["sly", report.GAINED]
    assert found["sly", worst] == pytest.approx(gained) == pytest.approx(0.1)
    assert found["return", "α at once on return over α before"] == pytest.approx(0.85 / 0.9)
    assert found["return", "α reached on the other domain over its ceiling"] == pytest.approx(0.5)
    assert found["steady", "publications in the second half"] == 0
    met = {
        goal.figure: is_met
        for goal, figure, is_met in result.verdicts()
        if figure.group not in ("sly", "hostile")
    }
    assert met == {
        worst: False,
        report.GAINED: False,
        "α at once on return over α before": True,
        "α reached on the other domain over its ceiling": False,
        "publications in the second half": True,
    }


def test_one_kind_that_pays_for_another_is_seen(tmp_path: Path) -> None:
    learnt, frozen = [0.5, 0.9] * 100, [0.8, 0.1] * 100
    row = harmed("poisoned", learnt, frozen, rest=[list(range(0, 200, 2)), list(range(1, 200, 2))])
    assert min(report.differences(row, "frozen")) == pytest.approx(-0.3)


@pytest.mark.parametrize("sly", [0.0, 0.5])
def test_poison_and_noise_leave_the_served_tokens_alone(sly: float) -> None:
    from benchmarks.replays.recording import Recorded

    rng = np.random.default_rng(2)
    request = Recorded(
        name="r",
        prompt_ids=np.arange(5, dtype=np.int32),
        output_ids=np.arange(300, dtype=np.int32),
        target_ids=np.tile(np.arange(4, dtype=np.int32), (300, 1)),
        target_logprobs=np.full((300, 4), np.log(0.25), np.float16),
        tail_logprob=np.full(300, -20.0, np.float32),
    )
    poisoned = forged.poison(request, 1000, rng, sly)
    assert np.array_equal(poisoned.output_ids, request.output_ids)
    changed = (poisoned.target_ids != request.target_ids).any(1).mean()
    assert changed == pytest.approx(0.5, abs=0.1)
    kept_first = (poisoned.target_ids[:, 0] == request.target_ids[:, 0]) & (
        poisoned.target_logprobs[:, 1] < -0.7
    )
    assert (kept_first & (poisoned.target_logprobs[:, 0] > -0.7)).mean() == pytest.approx(
        sly / 2, abs=0.1 * sly
    )
    mass = np.exp(poisoned.target_logprobs.astype(float)).sum(1) + np.exp(poisoned.tail_logprob)
    assert mass == pytest.approx(1, abs=0.01)
    assert all(len(set(row)) == len(row) for row in poisoned.target_ids.tolist()), (
        "else the trainer leaves it out"
    )
    noise = forged.noise(request, 1000, rng)
    assert all(len(set(row)) == len(row) for row in noise.target_ids.tolist())
    for values in (noise.output_ids, noise.target_ids, noise.tail_logprob):
        assert len(values) == forged.NOISE_TOKENS
    assert np.array_equal(noise.target_ids[:, 0], noise.output_ids)
