"""How the draft fares beside what the memory finds, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from serving.speculation.memory.hybrid import (
    EDGES,
    KEEP,
    PRIOR_WEIGHT,
    CalibrationSlope,
    Hybrid,
    Level,
)


def ratio(hybrid: Hybrid, found: float) -> float:
    found_ratio = float(hybrid.ratio(np.array(found)))
    assert hybrid.ratio_beside(found) == found_ratio
    return found_ratio


def test_until_something_is_known_the_draft_is_what_it_is_in_the_mean() -> None:
    assert Hybrid().ratio(np.array([[0.0, 1.0], [3.0, 99.0]])).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_what_is_accepted_is_counted_by_what_was_found_beside_it() -> None:
    hybrid = Hybrid()
    hybrid.add(3.0, expected=2.0, accepted=4.0)
    hybrid.add(0.0, expected=2.0, accepted=0.0)
    assert ratio(hybrid, 3.9) == pytest.approx((4 + PRIOR_WEIGHT) / (2 + PRIOR_WEIGHT))
    assert ratio(hybrid, 0.2) == pytest.approx(PRIOR_WEIGHT / (2 + PRIOR_WEIGHT))
    assert ratio(hybrid, 1.0) == ratio(hybrid, 4.0) == 1.0, "nothing was found like that"


def test_a_kind_begins_at_its_edge() -> None:
    assert len(set(EDGES)) == len(EDGES)
    for edge in EDGES:
        hybrid = Hybrid()
        hybrid.add(edge, expected=1.0, accepted=3.0)
        assert ratio(hybrid, edge) > 1.0
        assert ratio(hybrid, edge - 1e-9) == 1.0


def test_it_comes_to_what_it_is_however_much_was_expected() -> None:
    """The draft gets 1.8 of 1.2 tokens accepted beside long finds, and 0.4 of 1.6 beside none."""
    hybrid, random = Hybrid(), np.random.default_rng(0)
    for _ in range(2000):
        hybrid.add(5.0, 1.2, float(random.binomial(3, 0.6)))
        hybrid.add(0.0, 1.6, float(random.binomial(4, 0.1)))
    assert ratio(hybrid, 5.0) == pytest.approx(1.5, rel=0.06)
    assert ratio(hybrid, 0.0) == pytest.approx(0.25, rel=0.15)


def test_old_evidence_fades_with_every_draft_of_its_kind() -> None:
    hybrid = Hybrid()
    for _ in range(2000):
        hybrid.add(5.0, 1.0, 0.0)
    assert ratio(hybrid, 5.0) < 0.05
    num = 700
    for _ in range(num):
        hybrid.add(5.0, 1.0, 1.0)
    left = KEEP**num
    assert left < 0.25
    assert ratio(hybrid, 5.0) == pytest.approx(1 - left, abs=0.05)
    assert ratio(hybrid, 0.0) == 1.0


def test_another_draft_begins_anew() -> None:
    hybrid = Hybrid()
    hybrid.add(5.0, 1.0, 4.0)
    hybrid.restart()
    assert ratio(hybrid, 5.0) == 1.0


# -- how far requests differ ----------------------------------------------------------------------

FAR = np.array([[0.8, 0.6], [0.4, 0.2]])
"""What is estimated of two requests."""
USUAL = [0.6, 0.4]


def taught(gains: tuple[float, float], ratio: float = 1.0) -> CalibrationSlope:
    """So many tokens of the draft of either request are accepted, times what was found beside."""
    slope = CalibrationSlope()
    for _ in range(2000):
        slope.believed(FAR)
        for survival_G, gain in zip(FAR, gains, strict=True):
            slope.add(survival_G.cumsum().tolist(), 2, ratio * gain, ratio)
    return slope


def test_at_first_requests_are_believed_to_differ_as_estimated() -> None:
    assert CalibrationSlope().believed(FAR) == pytest.approx(FAR)


def test_requests_that_turn_out_alike_are_believed_to_be() -> None:
    believed_BG = taught((1.0, 1.0)).believed(FAR)
    assert believed_BG == pytest.approx(np.array([USUAL, USUAL]), abs=0.05)


def test_requests_that_turn_out_different_are_believed_to_be() -> None:
    assert taught((1.4, 0.6)).believed(FAR) == pytest.approx(FAR, abs=0.02)
    assert taught((1.8, 0.2)).believed(FAR) == pytest.approx(FAR), "never more than estimated"


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3])
@pytest.mark.parametrize(
    "gains, differ",
    [((1.4, 0.6), 1.0), ((1.2, 0.8), 0.5), ((1.0, 1.0), 0.0), ((0.6, 1.4), 0.0)],
)
def test_the_slope_is_how_far_requests_differ(
    gains: tuple[float, float], differ: float, ratio: float
) -> None:
    """Of how far they were estimated to, whatever was found beside their drafts."""
    weight = (0.4 * ratio) ** 2 / (1 - KEEP)
    slope = (differ * weight + PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)
    assert taught(gains, ratio).slope == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("gain, differ", [(1.4, 1.0), (1.0, 0.0)])
def test_of_a_request_alone_it_is_known_what_was_found_beside_its_drafts(
    gain: float, differ: float
) -> None:
    slope = CalibrationSlope()
    for _ in range(2000):
        slope.believed(FAR)
        slope.add(FAR[0].cumsum().tolist(), 2, 0.5 * gain, 0.5)
    weight = (0.4 * 0.5) ** 2 / (1 - KEEP)
    expected = (differ * weight + PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)
    assert slope.slope == pytest.approx(expected, rel=1e-2)


def test_what_is_usual_follows_the_estimates() -> None:
    slope = taught((1.0, 1.0))
    far = slope.believed(FAR / 2)[0, 0]
    for _ in range(2000):
        slope.believed(FAR / 2)
    assert slope.believed(FAR / 2)[0, 0] < 0.35 < far


def test_no_request_has_no_survival() -> None:
    assert CalibrationSlope().believed(np.zeros((0, 2))).shape == (0, 2)


# -- whether the traffic has changed --------------------------------------------------------------


def changes(found: list[float]) -> list[int]:
    """At which look-ups a change is told."""
    level = Level()
    return [at for at, each in enumerate(found) if level.add(each)]


def test_a_level_that_stays_is_no_change() -> None:
    rng = np.random.default_rng(0)
    assert changes([0.0] * 500) == changes([2.5] * 500) == []
    assert changes(rng.exponential(2.0, 3000).tolist()) == []


@pytest.mark.parametrize("before, after", [(4.0, 1.0), (1.0, 4.0), (0.0, 1.0)])
def test_a_level_that_falls_or_rises_is_told_of_once_and_soon(before: float, after: float) -> None:
    rng = np.random.default_rng(1)
    found = [*rng.normal(before, 1.0, 400), *rng.normal(after, 1.0, 400)]
    told = changes(found)
    assert told and 400 <= told[0] <= 400 + 60
    assert len(told) <= 2, "the mean of the newest holds some of before when it is told"


def test_too_few_look_ups_tell_nothing() -> None:
    assert changes([0.0] * 30 + [8.0] * 30) == []
