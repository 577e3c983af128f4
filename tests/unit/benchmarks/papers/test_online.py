"""What replayed curves say of the published ones, on known counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import online
from benchmarks.papers.online import CURVE, FROZEN, OFFLINE, ONLINE, SMOOTH, TENTH, TWO
from benchmarks.record import Options, Protocol, Row
from benchmarks.traffic.schedule import Schedule

TESTED = 20


def a_protocol(directory: Path) -> Protocol:
    return online.protocol(Options(directory=directory, quick=True))


def schedule(name: str, directory: Path) -> Schedule:
    return Schedule.model_validate(a_protocol(directory).sizes["schedules"][name])


def a_row(name: str, arm: str, alphas: list[float]) -> Row:
    """A curve with these α, each over as many requests; a little uneven from request to request."""
    accepted = np.array([round(alpha * TESTED) for alpha in alphas]) + np.arange(len(alphas)) % 2
    counts = {"accepted": accepted.tolist(), "tested": [TESTED] * len(alphas)}
    return {"schedule": name, "seed": 0, "arm": arm, "counts": counts}


def level(alpha: float, num: int) -> list[float]:
    return [alpha] * num


def climb(first: float, last: float, num: int) -> list[float]:
    return np.linspace(first, last, num).tolist()


def all_rows(
    *,
    last: float = 0.9,
    tenth: float = 0.5,
    frozen: float = 0.2,
    shifted: float = 0.8,
    second: float = 0.8,
    again: float = 0.85,
) -> list[Row]:
    """Of the quick protocol: 288 requests; 192; 192, 96 and 24 of two kinds."""
    return [
        a_row(CURVE, ONLINE, climb(0.1, last, 288)),
        a_row(CURVE, OFFLINE, level(0.8, 288)),
        a_row(CURVE, TENTH, level(tenth, 288)),
        a_row(SMOOTH, ONLINE, climb(0.8, shifted, 192)),
        a_row(SMOOTH, FROZEN, climb(0.8, frozen, 192)),
        a_row(TWO, ONLINE, climb(0.1, 0.9, 192) + climb(0.1, second, 96) + level(again, 24)),
    ]


def verdicts(rows: list[Row], directory: Path) -> dict[str, str]:
    result = online.summarise(a_protocol(directory), rows)
    return {shape["figure"]: shape["verdict"] for shape in result.as_dict()["shapes"]}


def test_every_published_curve_is_seen_where_it_is(tmp_path: Path) -> None:
    found = verdicts(all_rows(), tmp_path)
    assert len(found) == 7
    assert set(found.values()) == {"seen"}


@pytest.mark.parametrize(
    ("changed", "figure"),
    [
        ({"last": 0.1}, online.CLIMBS),
        ({"last": 0.7}, online.REACHES),
        ({"tenth": 0.95}, online.STAYS_BELOW),
        ({"frozen": 0.9}, online.FOLLOWS),
        ({"shifted": 0.5}, online.LEVEL),
        ({"second": 0.1}, online.LEARNS_SECOND),
        ({"again": 0.5}, online.KEEPS_FIRST),
    ],
)
def test_it_is_not_seen_where_it_is_not(
    changed: dict[str, float], figure: str, tmp_path: Path
) -> None:
    assert verdicts(all_rows(**changed), tmp_path)[figure] == "not seen"


def test_what_was_cut_off_says_nothing(tmp_path: Path) -> None:
    found = verdicts(all_rows()[:2], tmp_path)
    assert set(found.values()) == {"inconclusive"}


def test_a_quarter_is_of_its_phase(tmp_path: Path) -> None:
    two = schedule(TWO, tmp_path)
    assert two.bounds == (0, 192, 288, 312)
    assert online.quarter_of(two, 0, 3) == (144, 192)
    assert online.quarter_of(two, 1, 0) == (192, 216)
    assert online.quarter_of(two, 2, 1) == (294, 300)


def test_the_shift_goes_from_most_to_a_little(tmp_path: Path) -> None:
    (phase,) = schedule(SMOOTH, tmp_path).phases
    assert phase.shares(0) == pytest.approx({"arithmetic": 0.8, "sql": 0.1, "finance": 0.1})
    end = phase.shares(phase.requests - 1)
    assert end == pytest.approx({"arithmetic": 0.1, "sql": 0.8, "finance": 0.1})


def test_a_difference_is_of_sums_and_its_interval_over_requests() -> None:
    one, other = np.array([[9, 10], [1, 10]]), np.array([[4, 10], [4, 10]])
    found = online.difference(one, other)
    assert found.value == pytest.approx(0.1)
    assert (found.low, found.high) == pytest.approx((-0.3, 0.5))
    alike = online.difference(one, one - [[1, 0], [1, 0]])  # the same places in both
    assert (alike.value, alike.low, alike.high) == pytest.approx((0.1, 0.1, 0.1))
    weighted = online.difference(np.array([[9, 10], [0, 90]]), None)
    assert weighted.value == pytest.approx(0.09)


def test_windows_hold_all_seeds() -> None:
    rows = [a_row(CURVE, ONLINE, [0.5, 0.1]), a_row(CURVE, ONLINE, [0.2, 0.3])]
    assert online.window(rows, 0, 1).tolist() == [[10, TESTED], [4, TESTED]]
