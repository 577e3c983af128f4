"""When training rests, and what ends its rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from osd.config.schema import TrainerConfig
from osd.control.drift import DriftDetector, FadingAlpha, Watched
from osd.records import EvalReport, Event, RoundOutcome, SpecWindow

NOW = 1.7e9
PATIENCE = 3


@pytest.fixture
def detector() -> DriftDetector:
    return DriftDetector(TrainerConfig(patience_rounds=PATIENCE), "t")


def window(
    alpha: float, num_tested: int = 400, num_output_tokens: int = 500, domain: str = ""
) -> SpecWindow:
    num_accepted = round(alpha * num_tested)
    return SpecWindow(
        at=NOW,
        replica="replica-0",
        version=3,
        domain=domain,
        seconds=1.0,
        k=4,
        num_drafts=num_tested,
        num_draft_tokens=num_tested,
        num_accepted_tokens=num_accepted,
        num_accepted_tokens_per_pos=(num_accepted,),
        num_tested_per_pos=(num_tested,),
        num_output_tokens=num_output_tokens,
    )


REPORT = EvalReport(
    num_traces=40,
    num_tokens=1000,
    k=4,
    alpha_base=0.8,
    alpha_candidate=0.8,
    alpha_base_per_pos=(0.8,),
    alpha_candidate_per_pos=(0.8,),
    diff=0.0,
    diff_low=-0.01,
    diff_high=0.01,
)
FRUITLESS = RoundOutcome(
    draft="default",
    base_version=3,
    target_id="t",
    path="",
    kind="full",
    num_steps=10,
    num_tokens=100,
    loss_first=1.0,
    loss_last=0.9,
    seconds=1.0,
    trace_age_mean_s=1.0,
    trace_age_max_s=2.0,
    eval=REPORT,
)
FRUITFUL = replace(
    FRUITLESS, eval=replace(REPORT, alpha_candidate=0.9, diff=0.1, diff_low=0.05, diff_high=0.15)
)
UNJUDGED = replace(FRUITLESS, eval=None)
DISCARDED = replace(FRUITLESS, eval=None, discarded="held-out loss rose")


def serve(detector: DriftDetector, alpha: float, num_windows: int = 40, **values: object) -> None:
    for _ in range(num_windows):
        detector.add(window(alpha, **values))  # type: ignore[arg-type]


def end(detector: DriftDetector, outcome: RoundOutcome, at: float = NOW) -> None:
    """A round and what became of its candidate."""
    detector.add(outcome)
    kind = "published" if outcome is FRUITFUL else "discarded" if outcome.discarded else "refused"
    detector.add(Event(at=at, kind=kind, text=""))


def resting(detector: DriftDetector, alpha: float = 0.8) -> DriftDetector:
    serve(detector, alpha)
    for _ in range(PATIENCE):
        end(detector, FRUITLESS)
    assert detector.is_resting
    return detector


def serve_requests(
    detector: DriftDetector, alphas: Iterable[float], num_output_tokens: int = 64
) -> list[bool]:
    """One after the other. Returns whether α has fallen, after each."""
    seen = []
    for alpha in alphas:
        one = window(float(alpha), num_output_tokens * 3 // 4, num_output_tokens)
        detector.add(replace(one, num_finished=1, num_captured=1))
        seen.append(detector.num_since_fall is not None)
    return seen


@pytest.mark.parametrize("num_output_tokens", [64, 800])
def test_a_fall_shows_within_a_few_requests(
    detector: DriftDetector, num_output_tokens: int
) -> None:
    assert not any(serve_requests(detector, [0.6] * 200, num_output_tokens))
    seen = serve_requests(detector, [0.25] * 20, num_output_tokens)
    assert 2 <= seen.index(True) <= 8 and all(seen[seen.index(True) :])
    assert detector.num_since_fall == 19 - seen.index(True)
    serve_requests(detector, [0.25] * 200, num_output_tokens)
    assert detector.num_since_fall is None, "it is what is usual by then"
    assert not any(serve_requests(detector, [0.6] * 20, num_output_tokens))


@pytest.mark.parametrize("num_output_tokens", [64, 800])
def test_alpha_that_varies_from_request_to_request_has_not_fallen(
    detector: DriftDetector, num_output_tokens: int
) -> None:
    alphas = np.random.default_rng(0).beta(6, 4, 1000)
    assert sum(serve_requests(detector, alphas, num_output_tokens)) < 30


def test_nothing_has_fallen_before_anything_was_tested(detector: DriftDetector) -> None:
    assert detector.num_since_fall is None
    serve(detector, 0.0, num_tested=1, num_output_tokens=64, num_windows=20)
    assert detector.num_since_fall is None


def test_alpha_that_falls_to_nothing_has_fallen(detector: DriftDetector) -> None:
    serve_requests(detector, [0.6] * 100)
    assert serve_requests(detector, [0.0] * 10)[-1]


def test_it_learns_from_the_start(detector: DriftDetector) -> None:
    assert detector.decide(NOW).ok


@pytest.mark.parametrize("last", [FRUITLESS, DISCARDED])
def test_it_rests_after_rounds_that_brought_nothing(
    detector: DriftDetector, last: RoundOutcome
) -> None:
    serve(detector, 0.8)
    for outcome in [FRUITLESS] * (PATIENCE - 1):
        end(detector, outcome)
        assert detector.decide(NOW).ok
    end(detector, last)
    decision = detector.decide(NOW)
    assert not decision.ok
    assert decision.reason == "at rest: 3 rounds in a row brought no gain; α 0.80, usually 0.80"


@pytest.mark.parametrize("between", [FRUITFUL])
def test_a_gain_begins_the_count_anew(detector: DriftDetector, between: RoundOutcome) -> None:
    for outcome in [FRUITLESS, FRUITLESS, between, FRUITLESS, FRUITLESS]:
        end(detector, outcome)
    assert detector.decide(NOW).ok


def test_a_round_nobody_could_judge_says_nothing(detector: DriftDetector) -> None:
    for _ in range(10):
        end(detector, UNJUDGED)
        end(detector, replace(UNJUDGED, discarded="no traces"))
    assert detector.decide(NOW).ok


def test_without_patience_it_never_rests() -> None:
    detector = DriftDetector(TrainerConfig(patience_rounds=0), "t")
    for _ in range(100):
        end(detector, FRUITLESS)
    assert detector.decide(NOW).ok


def test_a_fall_ends_the_rest(detector: DriftDetector) -> None:
    resting(detector, 0.8)
    serve(detector, 0.2, num_windows=3)
    assert not detector.is_resting
    assert detector.decide(NOW).reason.startswith("α fell from 0.")


def test_a_rest_after_a_fall_takes_the_new_for_usual(detector: DriftDetector) -> None:
    resting(detector, 0.8)
    serve(detector, 0.5, num_windows=100)
    for _ in range(PATIENCE):
        end(detector, FRUITLESS)
    serve(detector, 0.5, num_windows=100)
    assert detector.is_resting


def test_a_fall_ends_a_rest_for_the_price_of_rounds_too(detector: DriftDetector) -> None:
    serve(detector, 0.8)
    serve(detector, 0.2, num_windows=3)
    assert detector.num_wakes == 0, "it trains: nothing rests that could be woken"
    serve(detector, 0.8)
    detector.note_price_rest(is_on=True)
    serve(detector, 0.8)
    assert detector.num_wakes == 0 and detector.decide(NOW).ok
    serve(detector, 0.2, num_windows=3)
    assert detector.num_wakes == 1
    assert detector.decide(NOW).reason.startswith("α fell from 0.")


def test_where_no_round_pays_after_a_fall_either_it_is_known_from_then_on(
    detector: DriftDetector,
) -> None:
    """The controller says at each look that training rests."""
    serve(detector, 0.8)
    for alpha, num in ((0.8, 40), (0.2, 40)):
        for _ in range(num):
            detector.note_price_rest(is_on=True)
            detector.add(window(alpha))
    assert 1 <= detector.num_wakes < 12, "as α falls, and no more"
    num = detector.num_wakes
    for _ in range(200):
        detector.note_price_rest(is_on=True)
        detector.add(window(0.2))
    assert detector.num_wakes == num
    assert detector.decide(NOW).reason == "learning", "the payback meter has the word"


def test_a_rest_that_comes_and_goes_while_acceptance_falls_hides_nothing(
    detector: DriftDetector,
) -> None:
    serve(detector, 0.8)
    for turn in range(60):
        detector.note_price_rest(is_on=turn % 2 == 0)
        detector.add(window(0.8 if turn < 20 else 0.2, num_tested=40, num_output_tokens=50))
    assert detector.num_wakes > 0


@pytest.mark.parametrize("outcome", [FRUITFUL, UNJUDGED])
def test_after_a_round_a_rest_takes_the_new_for_usual(
    detector: DriftDetector, outcome: RoundOutcome
) -> None:
    serve(detector, 0.8)
    detector.note_price_rest(is_on=True)
    detector.note_price_rest(is_on=False)
    serve(detector, 0.5, num_windows=100)
    end(detector, outcome)
    detector.note_price_rest(is_on=True)
    serve(detector, 0.5)
    assert detector.num_wakes == 0
    serve(detector, 0.3)
    assert detector.num_wakes == 1


REST = pytest.mark.parametrize("for_price", [False, True])


def begin_rest(detector: DriftDetector, *, for_price: bool) -> None:
    """Without a further window: α is what was served so far."""
    if for_price:
        detector.note_price_rest(is_on=True)
        return
    for _ in range(PATIENCE):
        end(detector, FRUITLESS)


@REST
@pytest.mark.parametrize("fallen", [0.2, 0.35])
def test_a_draft_that_serves_better_in_a_rest_is_usual_from_then_on(
    detector: DriftDetector, for_price: bool, fallen: float
) -> None:
    """A round was published just before the rest began: what is recent is of the draft before."""
    serve(detector, 0.2, num_windows=100)
    begin_rest(detector, for_price=for_price)
    serve(detector, 0.57, num_windows=200)
    assert detector.num_wakes == 0
    serve(detector, fallen, num_windows=100)
    assert detector.num_wakes > 0


@REST
def test_a_rise_by_chance_changes_nothing(detector: DriftDetector, for_price: bool) -> None:
    rng = np.random.default_rng(5)
    serve(detector, 0.5, num_windows=100)
    begin_rest(detector, for_price=for_price)
    for _ in range(3600):
        detector.add(window(rng.binomial(50, 0.5) / 50))
    assert detector.num_wakes == 0


def test_what_the_feed_says_of_a_rest_for_the_price_is_known_after_a_restart(
    detector: DriftDetector,
) -> None:
    """Three fruitless rounds in all, and traffic that changed before the last two."""
    serve(detector, 0.8)
    end(detector, FRUITLESS)
    detector.add(Event(at=NOW, kind="rests", text=""))
    serve(detector, 0.2)
    assert detector.num_wakes > 0
    detector.add(Event(at=NOW, kind="learns", text=""))
    for _ in range(PATIENCE - 1):
        end(detector, FRUITLESS)
    assert not detector.is_resting
    num = detector.num_wakes
    serve(detector, 0.05, num_windows=100)
    assert detector.num_wakes == num, "nothing rests"


def test_the_feed_does_not_tell_a_running_process_what_it_said(detector: DriftDetector) -> None:
    serve(detector, 0.8)
    detector.note_price_rest(is_on=True)
    serve(detector, 0.2)
    woken_by, num = detector.woken_by, detector.num_wakes
    assert woken_by
    detector.add(Event(at=NOW, kind="rests", text=""))
    serve(detector, 0.05, num_windows=100)
    assert (detector.woken_by, detector.num_wakes) == (woken_by, num)


def test_steady_traffic_never_ends_the_rest(detector: DriftDetector) -> None:
    """An hour of windows with chance in them; requests make tokens depend on each other, eight or
    so."""
    rng = np.random.default_rng(3)
    resting(detector, 0.7)
    for _ in range(3600):
        detector.add(window(rng.binomial(50, 0.7) / 50))
        assert detector.is_resting


def test_little_evidence_is_taken_with_care(detector: DriftDetector) -> None:
    """A draft tried now and then, with chance against it: no alarm; clearly worse: alarm."""
    resting(detector, 0.8)
    serve(detector, 0.8, num_windows=100, num_tested=0)
    assert detector.is_resting, "no evidence is no fall"
    assert detector.decide(NOW).reason == "at rest: 3 rounds in a row brought no gain", (
        "nor is it shown"
    )
    serve(detector, 0.7, num_windows=3, num_tested=10)
    assert detector.is_resting
    serve(detector, 0.1, num_windows=4, num_tested=10)
    assert not detector.is_resting


@REST
def test_a_fall_of_one_class_is_seen_though_the_whole_holds(
    detector: DriftDetector, for_price: bool
) -> None:
    serve(detector, 0.9, domain="arithmetic")
    serve(detector, 0.8, domain="sql")
    serve(detector, 0.85)
    begin_rest(detector, for_price=for_price)
    for _ in range(20):
        detector.add(window(0.9, domain="arithmetic", num_tested=4000, num_output_tokens=5000))
        detector.add(window(0.3, domain="sql", num_tested=160, num_output_tokens=200))
    assert detector.woken_by.startswith("α of 'sql' fell from 0.79 to 0.")


def test_of_many_labels_the_first_64_are_watched(detector: DriftDetector) -> None:
    """The others count in the whole, which here hardly notices them."""
    for index in range(70):
        serve(detector, 0.8, num_windows=3, domain=f"label-{index}")
    resting(detector, 0.8)
    for index in (64, 69, 63):
        assert detector.is_resting
        for _ in range(20):
            detector.add(window(0.8, num_tested=4000, num_output_tokens=5000))
            detector.add(window(0.3, 160, num_output_tokens=200, domain=f"label-{index}"))
    assert detector.woken_by.startswith("α of 'label-63' fell from 0.79 to 0.")


def test_a_label_that_is_served_no_more_makes_room_for_another(detector: DriftDetector) -> None:
    """Label 0, which goes on being served, keeps its place."""
    for index in range(64):
        serve(detector, 0.8, num_windows=3, domain=f"label-{index}")
    for hours in (0.9, 1.1):
        for label in ("label-0", "new", "newer"):
            later = replace(window(0.8, domain=label), at=NOW + 3600 * hours)
            for _ in range(3):
                detector.add(later)
    resting(detector, 0.8)
    assert len(detector._labels) == 64
    assert {"label-0", "new", "newer", "label-3"} <= set(detector._labels)
    assert not {"label-1", "label-2"} & set(detector._labels)
    for _ in range(20):
        serve(detector, 0.8, num_windows=1, num_tested=4000)
        serve(detector, 0.3, num_windows=1, num_tested=160, domain="new")
    assert detector.woken_by.startswith("α of 'new' fell from 0.79 to 0.")


def test_a_rest_takes_what_is_recent_of_each_label_for_usual(detector: DriftDetector) -> None:
    serve(detector, 0.9, num_windows=100, domain="sql")
    serve(detector, 0.5, num_windows=40, domain="sql")
    for _ in range(PATIENCE):
        end(detector, FRUITLESS)
    serve(detector, 0.5, domain="sql")
    assert detector.is_resting


def test_a_fall_within_the_margin_is_none() -> None:
    detector = resting(
        DriftDetector(TrainerConfig(patience_rounds=PATIENCE, drift_margin=0.7), "t")
    )
    serve(detector, 0.2)
    assert detector.is_resting


@pytest.mark.parametrize("kind", ["rolled_back", "promoted", "unpinned"])
def test_another_draft_begins_the_count_anew(detector: DriftDetector, kind: str) -> None:
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            end(detector, FRUITLESS)
        detector.add(Event(at=NOW, kind=kind, text=""))
    assert detector.decide(NOW).reason == "learning", "it never rested"
    end(detector, FRUITLESS)
    assert not detector.is_resting


# The averages, by hand


def test_half_of_what_is_recent_is_of_4000_tokens_and_of_what_is_usual_of_64000() -> None:
    for watched, half in ((Watched().recent, 4000), (Watched().usual, 64_000)):
        for alpha, num in ((0.75, 100 * half), (0.25, half)):
            while num > 0:
                watched.add(window(alpha, num_tested=400, num_output_tokens=500))
                num -= 500
        assert watched.alpha == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("num_output_tokens", [10, 250, 4000, 100_000])
def test_it_does_not_matter_in_how_long_windows_tokens_come(num_output_tokens: int) -> None:
    fading = FadingAlpha(4000)
    for alpha in (0.75, 0.25):
        for _ in range(round(400_000 / num_output_tokens)):
            served = window(alpha, num_tested=4 * num_output_tokens)
            fading.add(replace(served, num_output_tokens=num_output_tokens))
    assert fading.alpha == pytest.approx(0.25, abs=1e-3)
    assert fading.weight == pytest.approx(4000, rel=0.02)


def test_stretches_weigh_by_their_tokens_whatever_was_tested() -> None:
    fading = FadingAlpha(1e9)
    fading.add(window(0.75, num_tested=400, num_output_tokens=300))
    fading.add(window(0.25, num_tested=8, num_output_tokens=300))
    fading.add(window(0.0, num_tested=0, num_output_tokens=300))
    assert (fading.tested, fading.alpha) == (pytest.approx(408), pytest.approx(0.5))
    many, few = (300.5 / 401) * (1 - 300.5 / 401) / 401, (2.5 / 9) * (1 - 2.5 / 9) / 9
    assert fading.error == pytest.approx(math.sqrt(many + few) / 2, rel=1e-6)


def test_of_few_tokens_nothing_is_said() -> None:
    fading = FadingAlpha(1e9)
    assert (fading.alpha, fading.error) == (None, 0.5)
    fading.add(window(1.0, num_tested=23, num_output_tokens=249))
    assert fading.tested == 0, "the stretch is too short"
    fading.add(window(1.0, num_tested=0, num_output_tokens=1))
    assert (round(fading.tested), fading.alpha) == (23, None)
    fading.add(window(0.0, num_tested=7, num_output_tokens=900))
    assert round(fading.tested) == 23, "and has too few drafts"
    fading.add(window(0.0, num_tested=0, num_output_tokens=100))
    assert fading.alpha == pytest.approx(0.2, abs=0.01)


def test_what_becomes_usual_has_the_weight_of_all_that_such_an_average_holds() -> None:
    watched = Watched()
    for _ in range(1000):
        watched.add(window(0.5))
    weight, error = watched.usual.weight, watched.recent.error
    for _ in range(1000):
        watched.recent.add(window(0.25))
    watched.settle()
    assert watched.usual.alpha == pytest.approx(0.25)
    assert watched.usual.weight == pytest.approx(weight, rel=0.01)
    assert watched.usual_error == watched.recent.error == watched.usual.error != error


def test_a_draft_that_is_hardly_tried_on_new_traffic_shows_its_fall_there(
    detector: DriftDetector,
) -> None:
    """The control leaves it after a few requests, and tries it now and then."""
    resting(detector, 0.8)
    serve(detector, 0.2, num_windows=2, num_tested=20, num_output_tokens=50)
    for _ in range(20):
        serve(detector, 0.0, num_windows=1, num_tested=2, num_output_tokens=100)
    assert not detector.is_resting


def test_a_fall_must_exceed_the_margin_and_two_standard_errors_of_both() -> None:
    recent = FadingAlpha(4000, tested=100, weight=1, total=0.6, variance=0.05**2)
    usual = FadingAlpha(64_000, tested=1000, weight=1, total=0.8)
    watched = Watched(recent=recent, usual=usual, usual_error=0.03)
    most = 0.2 - 2 * math.sqrt(recent.error**2 + 0.03**2)
    assert watched.fall(most + 1e-9) is None
    assert watched.fall(most - 1e-9) == (0.8, 0.6)
    better = replace(recent, total=1.0)
    watched = Watched(recent=better, usual=usual, usual_error=0.03)
    assert not watched.has_risen(most + 1e-9) and watched.has_risen(most - 1e-9)
    for unknown in (Watched(recent=recent), Watched(usual=usual)):
        assert unknown.fall(-9.0) is None


@pytest.mark.parametrize("kind", ["rolled_back", "promoted", "unpinned"])
def test_another_draft_ends_the_rest(detector: DriftDetector, kind: str) -> None:
    resting(detector)
    detector.add(Event(at=NOW, kind=kind, text=""))
    assert detector.decide(NOW).ok
    for _ in range(PATIENCE - 1):
        end(detector, FRUITLESS)
    assert detector.decide(NOW).ok


def test_at_rest_a_round_runs_now_and_then(detector: DriftDetector) -> None:
    resting(detector)
    assert not detector.decide(NOW + 3599).ok
    decision = detector.decide(NOW + 3600)
    assert decision.ok
    assert decision.reason == "no round for 60 minutes: looking whether there is something to learn"
    end(detector, FRUITLESS, at=NOW + 3650)
    assert not detector.decide(NOW + 3700).ok, "one round, then rest again"
    end(detector, FRUITFUL)
    assert detector.decide(NOW + 3700).ok


def test_a_clock_that_jumps_costs_a_round_at_most(detector: DriftDetector) -> None:
    resting(detector)
    assert not detector.decide(NOW - 1e6).ok, "back"
    assert detector.decide(NOW + 1e6).ok, "ahead"
    end(detector, FRUITLESS, at=NOW + 1e6)
    assert not detector.decide(NOW + 1e6 + 60).ok
    assert not detector.decide(NOW).ok, "and back again"
    serve(detector, 0.1, num_windows=5)
    assert detector.decide(NOW).ok, "a fall is seen whatever the clock says"


def test_a_better_candidate_that_may_not_serve_is_no_gain(detector: DriftDetector) -> None:
    """A pinned draft, or a class of traffic that would pay, refuses it every time."""
    serve(detector, 0.8)
    for _ in range(PATIENCE):
        detector.add(FRUITFUL)
        detector.add(Event(at=NOW, kind="refused", text="v3 is pinned"))
    assert detector.is_resting


@pytest.mark.parametrize("num_refused", [PATIENCE - 1, PATIENCE])
def test_what_was_refused_for_a_trial_is_forgotten_when_it_ends(
    detector: DriftDetector, num_refused: int
) -> None:
    for _ in range(num_refused):
        detector.add(FRUITFUL)
        detector.add(Event(at=NOW, kind="refused", text="v2 is on trial"))
    detector.add(Event(at=NOW, kind="rolled_out", text=""))
    for _ in range(PATIENCE - 1):
        end(detector, FRUITLESS)
    assert not detector.is_resting and detector.num_wakes == 0
    end(detector, FRUITLESS)
    assert detector.is_resting


def test_what_was_before_the_first_release_says_nothing() -> None:
    detector = DriftDetector(TrainerConfig(patience_rounds=PATIENCE), "t", since=NOW + 10)
    serve(detector, 0.9)
    for _ in range(PATIENCE):
        end(detector, FRUITLESS, at=NOW + 9)
    assert not detector.is_resting and detector.decide(NOW + 20).reason == "learning"
    for _ in range(PATIENCE):
        end(detector, FRUITLESS, at=NOW + 10)
    assert detector.decide(NOW + 20).reason == "at rest: 3 rounds in a row brought no gain", (
        "nor do its windows"
    )


def test_a_clock_that_was_set_back_since_the_first_release_hides_nothing() -> None:
    detector = DriftDetector(TrainerConfig(patience_rounds=PATIENCE), "t", since=NOW + 3600)
    detector.add(Event(at=NOW + 3600, kind="attached", text=""))
    serve(detector, 0.9)
    for _ in range(PATIENCE):
        end(detector, FRUITLESS, at=NOW)
    assert detector.is_resting
    serve(detector, 0.3)
    assert not detector.is_resting and "fell from" in detector.woken_by


def test_rounds_of_another_target_say_nothing(detector: DriftDetector) -> None:
    for _ in range(PATIENCE):
        end(detector, replace(FRUITLESS, target_id="other"))
    assert not detector.is_resting
    for _ in range(PATIENCE):
        end(detector, FRUITLESS)
    detector.add(replace(FRUITFUL, target_id="other"))
    detector.add(Event(at=NOW + 5000, kind="published", text=""))
    assert detector.is_resting and detector.decide(NOW + 3601).ok, (
        "nor do they count for the time since the last"
    )


def test_a_usual_alpha_known_from_little_is_no_measure(detector: DriftDetector) -> None:
    serve(detector, 0.9, num_windows=1, num_tested=30, domain="rare")
    resting(detector)
    serve(detector, 0.7, num_windows=1, num_tested=30, num_output_tokens=10_000, domain="rare")
    assert detector.is_resting
