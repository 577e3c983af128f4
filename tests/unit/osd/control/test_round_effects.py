"""What rounds do to an engine, from made-up heartbeats: paces, promises, and what came true."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from osd.control.round_effects import (
    CHANGED,
    KEEP_ROUND,
    LEAST_PROMISE,
    MAX_WORTH,
    MOST_UNJUDGED,
    Gain,
    Pace,
    Progress,
    Promise,
)
from osd.records import FAR_FEWER_ERRORS, FEWER_ERRORS, DraftWorth, RoundOutcome
from tests.unit.osd.control.test_controller import make_outcome

PROMISED = 0.1
"""Of a draft that errs less often by `FEWER_ERRORS`; all are logarithms of speeds."""


class Engine:
    """Its draft is worth so much, and it promises the same of any better one."""

    def __init__(self) -> None:
        self.gain, self.draft, self.version = Gain(), 0.5, 1
        self.beat()

    def beat(self) -> None:
        said = {"of_better": math.exp(PROMISED), "of_far_better": math.exp(PROMISED)}
        self.gain.add(DraftWorth(of_draft=math.exp(self.draft), **said), self.version)

    def round(self, brings: float, *, share: float = FEWER_ERRORS) -> Engine:
        """One whose draft makes it so much faster, and serves at once."""
        self.gain.begin_round(self.version)
        self.gain.end_round(share, is_published=True)
        self.draft, self.version = self.draft + brings, self.version + 1
        self.beat()
        return self

    def unpublished(self) -> Engine:
        self.gain.begin_round(self.version)
        self.gain.end_round(0.0, is_published=False)
        self.beat()
        return self


def test_trust_is_a_share_whatever_drafts_bring() -> None:
    assert Engine().gain.trust == 1
    assert Engine().round(3 * PROMISED).gain.trust == 1, "more than was promised"
    assert Engine().round(PROMISED / 2).gain.trust == pytest.approx(0.5, abs=0.1)
    slower = Engine().round(-0.9 * CHANGED).gain
    assert slower.trust == Engine().round(0.0).gain.trust < 0.2


def test_a_draft_of_which_next_to_nothing_was_promised_shows_nothing_of_promises() -> None:
    share = 0.9 * LEAST_PROMISE / PROMISED * FEWER_ERRORS
    engine, known = Engine().round(PROMISED / 2), Engine().round(PROMISED / 2).gain.trust
    for brings in (0.04, -0.04):
        assert engine.round(brings, share=share).gain.trust == pytest.approx(known, abs=0.02)


def test_a_draft_on_changed_traffic_takes_back_what_it_has_shown() -> None:
    engine = Engine().round(0.0)
    assert engine.gain.trust < 0.5
    engine.draft -= 1.1 * CHANGED
    engine.beat()
    assert engine.gain.trust == 1


def test_what_a_draft_brought_is_counted_once() -> None:
    engine = Engine().round(PROMISED).round(0.0)
    known = engine.unpublished().gain.trust
    assert engine.unpublished().unpublished().gain.trust == known


def test_a_swap_in_the_next_round_shows_nothing_of_the_last_rounds_draft() -> None:
    """It was published and had not been swapped in; then the operator promoted another."""
    engine = Engine()
    engine.gain.begin_round(1)
    engine.gain.end_round(FEWER_ERRORS, is_published=True)
    engine.beat()
    engine.gain.begin_round(1)
    engine.version = 2
    engine.beat()
    assert engine.gain.trust == 1


def test_a_moment_without_an_estimate_changes_nothing() -> None:
    """Right after a swap the engine knows nothing of its draft."""
    engine = Engine()
    engine.gain.begin_round(1)
    engine.gain.end_round(FEWER_ERRORS, is_published=True)
    engine.gain.add(None, 2)
    assert engine.gain.of_share(FEWER_ERRORS) == pytest.approx(PROMISED)
    assert engine.gain.is_open, "the draft has shown nothing yet"


def test_rounds_that_are_forgotten_say_nothing_of_the_next() -> None:
    engine = Engine().round(0.0).round(0.0)
    engine.gain.forget_rounds()
    assert engine.gain.trust == 1
    engine.beat()
    assert engine.gain.trust == 1, "nor does a draft of theirs that serves on"


@pytest.mark.parametrize(
    ("said", "known"),
    [(0.5, 0), (-3.0, 0), (1e308, math.log(MAX_WORTH)), (math.nan, None), (math.inf, None)],
)
def test_worths_that_no_draft_has_are_not_believed(said: float, known: float | None) -> None:
    gain = Gain()
    gain.add(DraftWorth(of_draft=said, of_better=said, of_far_better=said), 1)
    assert gain.of_draft == known
    assert gain.promise == (None if known is None else Promise(known, known))


def test_one_heartbeat_at_rest_does_not_show_the_pace_before_a_round() -> None:
    pace = Pace()
    for num_at_rest, slowdown in ((1, None), (2, 1.25)):
        for _ in range(num_at_rest):
            pace.at_rest.add(0.3)
        pace.begin_round()
        pace.within.add(0.3 + math.log(1.25))
        pace.end_round()
        assert pace.slowdown == (slowdown and pytest.approx(slowdown))


def test_promises_are_those_of_the_shares_that_were_asked_after() -> None:
    promise = Promise(of_better=0.1, of_far_better=0.5)
    shares = (0, FEWER_ERRORS / 2, FEWER_ERRORS, 0.5, FAR_FEWER_ERRORS, 1)
    assert [promise.of_share(share) for share in shares] == pytest.approx(
        [0, 0.05, 0.1, 0.3, 0.5, 0.5]
    )


def test_progress_is_the_share_of_errors_by_the_gate() -> None:
    progress = Progress()
    assert progress.of_rounds(1) == FEWER_ERRORS
    assert progress.of_rounds(2) == pytest.approx(1 - (1 - FEWER_ERRORS) ** 2)
    assert progress.add(errs_less_by(0.4), may_serve=True) == pytest.approx(0.4)
    assert progress.of_rounds(1) == pytest.approx(
        (KEEP_ROUND * FEWER_ERRORS + 0.4) / (KEEP_ROUND + 1)
    )
    assert progress.add(errs_less_by(0.4), may_serve=False) == 0, "it serves nowhere"
    assert progress.add(errs_less_by(-0.4), may_serve=True) == 0
    assert progress.add(makes_no_error(), may_serve=True) == 0, "nothing was left to learn"
    before = progress.of_rounds(1)
    unjudged = replace(make_outcome("", 1), eval=None)
    for may_serve in (True, False):
        assert progress.add(unjudged, may_serve=may_serve) == before
    assert progress.of_rounds(1) == before
    undone = replace(unjudged, discarded="held-out loss rose")
    assert progress.add(undone, may_serve=False) == 0 and progress.of_rounds(1) < before


def test_many_rounds_that_nobody_can_judge_bring_nothing() -> None:
    progress, unjudged = Progress(), replace(make_outcome("", 1), eval=None)
    for _ in range(2):
        for _ in range(MOST_UNJUDGED):
            assert progress.add(unjudged, may_serve=False) > 0
        progress.add(errs_less_by(0.4), may_serve=True)
    for _ in range(MOST_UNJUDGED + 20):
        share = progress.add(unjudged, may_serve=False)
    assert share == 0 and progress.of_rounds(8) < 0.01


def errs_less_by(share: float) -> RoundOutcome:
    """A round whose gate says so."""
    outcome = make_outcome("", 1)
    assert outcome.eval is not None
    alpha = 1 - (1 - outcome.eval.alpha_base) * (1 - share)
    return replace(outcome, eval=replace(outcome.eval, alpha_candidate=alpha))


def makes_no_error() -> RoundOutcome:
    """A round that began with a draft whose tokens were all accepted."""
    outcome = make_outcome("", 1)
    assert outcome.eval is not None
    return replace(outcome, eval=replace(outcome.eval, alpha_base=1.0, alpha_candidate=1.0))
