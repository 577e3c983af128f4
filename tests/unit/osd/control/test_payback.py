"""Whether a round pays: what it takes and brings, from made-up heartbeats and rounds."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osd.common.wording import span
from osd.config.schema import TrainerConfig
from osd.control.payback import MOST_REST_S, PaybackMeter
from osd.control.round_effects import CHANGED, KEEP_ROUND, SHOWS_IN, UNTRIED
from osd.records import (
    FAR_FEWER_ERRORS,
    FEWER_ERRORS,
    NO_TRACES,
    DraftWorth,
    Payback,
    ReplicaStatus,
    RoundOutcome,
    SpeculationReport,
)
from tests.unit.osd.control.test_controller import World, make_outcome, no_gain, replica
from tests.unit.osd.control.test_round_effects import errs_less_by


class Deployment:
    """Replicas that beat every second, and a trainer whose rounds take 10 seconds. With a draft of
    theirs an engine is so many times faster (`brings`)."""

    def __init__(self, *, num_replicas: int = 1, **trainer: Any) -> None:
        self.meter = PaybackMeter(TrainerConfig(**trainer))
        self.now, self.names = 1000.0, [f"replica-{i}" for i in range(num_replicas)]
        self.better, self.slowdown, self.pace = 1.1, 1.25, 0.9
        self.far_better: float | None = None
        """None: as much as `better`."""
        self.version, self.draft, self.brings = 1, 1.5, 1.04
        self.idle, self.fixed, self.spared = set[str](), set[str](), set[str]()
        self.ahead_s = 0.0
        """Of the replicas' clocks."""

    def beat(self, seconds: int, *, is_training: bool = False) -> None:
        for _ in range(seconds):
            self.now += 1
            statuses = [self.status(name, is_training=is_training) for name in self.names]
            self.meter.look(statuses, is_training=is_training, now=self.now)

    def status(self, name: str, *, is_training: bool) -> ReplicaStatus:
        is_slowed = is_training and name not in self.spared
        far_better = self.better if self.far_better is None else self.far_better
        worth = DraftWorth(of_draft=self.draft, of_better=self.better, of_far_better=far_better)
        report = SpeculationReport(
            pace=self.pace * (self.slowdown if is_slowed else 1.0),
            worth=None if name in self.fixed else worth,
        )
        is_idle = name in self.idle
        return replace(
            replica(self.version, name),
            at=self.now + self.ahead_s,
            speculation=report,
            num_running=int(not is_idle),
        )

    def round(
        self,
        outcome: RoundOutcome | None = None,
        *,
        is_published: bool = True,
        seconds: float = 10.0,
    ) -> None:
        self.beat(10, is_training=True)
        outcome = outcome or make_outcome("", 1)
        self.meter.add_round(replace(outcome, seconds=seconds), self.now, is_published=is_published)
        self.beat(1)  # the draft is on its way
        if is_published:
            self.version, self.draft = self.version + 1, self.draft * self.brings
        self.beat(9)


def taken(slowdown: float) -> float:
    """Of ten seconds that the trainer works."""
    return 10 * (1 - 1 / slowdown)


@asynccontextmanager
async def going_on(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def after_rounds(num: int = 2, **given: Any) -> Deployment:
    """As many rounds as it takes to know what they take."""
    here = Deployment(**given)
    here.beat(10)
    for _ in range(num):
        here.round()
    return here


def figures(here: Deployment) -> Payback:
    found = here.meter.figures()
    assert found is not None
    return found


def test_what_a_round_takes_and_saves() -> None:
    here = after_rounds(0)
    assert here.meter.figures() is None and here.meter.decide(here.now).ok
    here.round()
    assert figures(here).slowdown == pytest.approx(1.25)
    here.round()
    found = figures(here)
    assert found.slowdown == pytest.approx(1.25)
    assert found.taken_s == pytest.approx(taken(1.25))
    # Less of what is promised came true, and it saves nothing before it is trained.
    untried, weight = UNTRIED * KEEP_ROUND**2, KEEP_ROUND + 1
    trust = (untried + weight * math.log(1.04)) / (untried + weight * math.log(1.1))
    assert found.saved_s == pytest.approx(590 * (1 - 1.1**-trust))
    assert not here.meter.is_resting and here.meter.decide(here.now).ok


def longer(batches: int) -> RoundOutcome:
    """A round that replayed so many, where the least is 8."""
    return replace(make_outcome("", 1), replay_batches=batches)


def test_a_round_that_replayed_more_counts_as_so_many_of_the_least() -> None:
    """Else it would seem too dear to be made again, and training rest where the least pays."""
    ones, fours = after_rounds(), after_rounds(0)
    for _ in range(2):
        fours.round(longer(35), seconds=40.0)
    assert figures(fours).taken_s == pytest.approx(figures(ones).taken_s) == taken(1.25)
    share = 0.5  # of the errors, which four rounds took
    of_one = 1 - (1 - share) ** 0.25
    assert fours.meter._progress.shares.mean == pytest.approx(of_one)
    assert ones.meter._progress.shares.mean == pytest.approx(share)
    fours.round(longer(2), seconds=10.0)
    assert figures(fours).taken_s == pytest.approx(taken(1.25)), "fewer than the least count as it"


@pytest.mark.parametrize(
    ("slowdown", "brings", "expected"), [(1.25, 1.04, False), (1.01, 1.04, True), (0.99, 1.0, True)]
)
def test_a_round_may_be_longer_where_many_take_little_of_what_they_save(
    slowdown: float, brings: float, expected: bool
) -> None:
    here = Deployment()
    here.slowdown, here.brings = slowdown, brings
    here.beat(10)
    here.round()
    assert not here.meter.may_be_longer(), "one round shows too little"
    here.round()
    assert here.meter.may_be_longer() is expected


def test_a_quarter_of_what_the_next_four_rounds_save_is_the_most_they_may_take() -> None:
    here = after_rounds(4)
    saved_s = here.meter._saved_s(4, here.meter._living)
    for factor, expected in ((0.24, True), (0.26, False)):
        here.meter._round_s.clear()
        here.meter._round_s.extend([factor * saved_s / (1 - 1 / 1.25)] * 2)
        # How long rounds are counts in what is saved, too, but little.
        assert here.meter.may_be_longer() is expected


@pytest.mark.parametrize("kind", ["cannot tell", "new"])
def test_where_not_all_that_serve_are_known_no_round_is_longer(kind: str) -> None:
    here = Deployment(num_replicas=2)
    here.spared = {"replica-0", "replica-1"}
    if kind == "cannot tell":
        here.fixed = {"replica-1"}
    here.beat(10)
    here.round()
    here.round()
    assert here.meter.may_be_longer() == (kind == "new")
    if kind == "new":
        here.names.append("replica-2")
        here.beat(1)
        assert not here.meter.may_be_longer()
        here.idle.add("replica-2")
        here.beat(2000)
        assert here.meter.may_be_longer(), "it serves nothing"


def test_where_training_may_take_anything_rounds_may_be_longer() -> None:
    assert Deployment(payback_seconds=0).meter.may_be_longer()
    assert not Deployment().meter.may_be_longer()


def test_a_pace_that_wanders_is_held_against_that_just_before() -> None:
    here = Deployment()
    here.beat(10)
    for _ in range(6):
        here.beat(10, is_training=True)
        here.meter.add_round(make_outcome("", 1), here.now, is_published=True)
        here.pace *= 1.25  # from now on it is as slow at rest as it was in the round
        here.beat(10)
    assert figures(here).slowdown == pytest.approx(1.25)


def test_what_a_look_at_earlier_drafts_slows_down_is_no_pace_without_the_trainer() -> None:
    here, undisturbed = Deployment(), Deployment()
    for each in (here, undisturbed):
        each.beat(4)
        for _ in range(4):
            if each is here:
                each.meter.begin_look()
                each.pace *= 1.25
                each.beat(6)
                each.pace /= 1.25
                each.meter.end_look(each.now)
            each.beat(4)
            each.round()
    assert figures(here).slowdown == pytest.approx(figures(undisturbed).slowdown)
    assert figures(here).slowdown == pytest.approx(1.25)


def test_after_a_look_a_clock_that_was_set_back_hides_no_pace() -> None:
    here = Deployment()
    here.meter.begin_look()
    here.meter.end_look(here.now + 3600)
    here.beat(10)
    for _ in range(2):
        here.round()
    assert figures(here).slowdown == pytest.approx(1.25)


def test_one_odd_round_changes_nothing() -> None:
    """On a machine that was suspended, say."""
    here = after_rounds(4)
    usual = figures(here)
    slow, here.slowdown = here.slowdown, 50.0
    here.round(seconds=7200.0)
    assert figures(here).taken_s == pytest.approx(usual.taken_s)
    here.slowdown = slow
    here.round()
    assert figures(here).taken_s == pytest.approx(usual.taken_s)


def test_a_round_that_found_no_traces_says_nothing_of_how_long_one_takes() -> None:
    here = after_rounds()
    before = figures(here)
    for _ in range(9):
        here.meter.add_round(
            replace(make_outcome("", 1), seconds=0.1, discarded=NO_TRACES),
            here.now,
            is_published=False,
        )
    assert figures(here) == before


def test_the_next_round_does_not_hide_what_the_last_one_took() -> None:
    here = Deployment()
    here.beat(10)
    here.beat(10, is_training=True)
    here.meter.add_round(make_outcome("", 1), here.now, is_published=False)
    here.beat(2)
    here.beat(1, is_training=True)
    assert figures(here).slowdown == pytest.approx(1.25)


def test_what_an_idle_engine_says_of_its_pace_is_not_believed() -> None:
    here = Deployment()
    here.beat(10)
    usual, here.pace, here.idle = here.pace, 5.0, {"replica-0"}
    here.beat(10)
    here.pace, here.idle = usual, set()
    here.round()
    assert figures(here).slowdown == pytest.approx(1.25)


def test_a_round_that_failed_shows_nothing_of_what_one_takes() -> None:
    """Its trainer was away for most of it."""
    here = after_rounds()
    here.slowdown = 1.0
    for _ in range(9):
        here.beat(60, is_training=True)
        here.beat(10)
    assert figures(here).slowdown == pytest.approx(1.25)


def test_a_trainer_on_a_machine_of_its_own_takes_nothing_and_never_rests() -> None:
    here = Deployment()
    here.slowdown, here.better, here.brings = 0.99, 1.0, 1.0
    here.beat(10)
    here.round()
    here.round()
    found = figures(here)
    assert (found.taken_s, found.saved_s, found.slowdown) == (0, 0, 1)
    assert not here.meter.is_resting


def test_idle_engines_lose_and_gain_nothing() -> None:
    here = after_rounds(num_replicas=2)
    both = figures(here)
    here.idle = {"replica-1"}
    here.beat(4000)
    one = figures(here)
    assert (one.taken_s, one.saved_s) == pytest.approx((both.taken_s / 2, both.saved_s / 2))


def test_the_engine_that_suffers_most_is_named() -> None:
    here = Deployment(num_replicas=2)
    here.spared = {"replica-1"}
    here.beat(10)
    here.round()
    here.round()
    assert figures(here).slowdown == pytest.approx(1.25)
    assert figures(here).taken_s == pytest.approx(taken(1.25))


def test_it_rests_where_a_better_draft_gains_less_than_it_takes_and_wakes_where_it_gains_more() -> (
    None
):
    here = Deployment()
    here.better, here.brings = 1.0005, 1.0  # the memory knows what is served
    here.beat(10)
    here.round()
    here.round()
    assert here.meter.is_resting
    decided = here.meter.decide(here.now)
    assert not decided.ok
    assert decided.reason.startswith("at rest: a round takes 2.0 s from the engines, and is ")
    assert decided.reason.endswith("of the next 10 min (trainer.payback_seconds)")
    found = figures(here)
    here.better = 1 + 0.0005 * 1.1 * found.taken_s / found.saved_s
    here.beat(1)
    assert here.meter.is_resting, "it does not pay by a factor that would last"
    here.better = 1.05  # the traffic has changed
    here.beat(1)
    assert not here.meter.is_resting and here.meter.decide(here.now).ok


def test_rounds_that_bring_nothing_are_expected_to_bring_less_until_the_traffic_changes() -> None:
    here = Deployment(payback_seconds=60)
    here.beat(10)
    here.round(is_published=False)
    expected = []
    for _ in range(8):
        here.round(is_published=False)
        expected.append(figures(here).saved_s)
    assert expected == sorted(expected, reverse=True) and expected[-1] < 0.2 < expected[0]
    assert here.meter.is_resting
    here.meter.renew(here.now, has_rested=True)
    here.beat(1)
    assert not here.meter.is_resting
    assert figures(here).saved_s == pytest.approx(50 * (1 - 1 / 1.1))


def test_drafts_that_brought_nothing_say_nothing_of_changed_traffic() -> None:
    here = Deployment()
    here.brings = 1.0
    here.beat(10)
    for _ in range(6):
        here.round()
    assert figures(here).saved_s < 10
    here.meter.renew(here.now, has_rested=True)
    assert figures(here).saved_s == pytest.approx(590 * (1 - 1 / 1.1))


@pytest.mark.parametrize(("better", "rests"), [(1.1, False), (1.0005, True)])
def test_other_traffic_ends_a_rest_at_once_where_a_round_pays_on_it(
    better: float, rests: bool
) -> None:
    """The controller asks right after it."""
    here = Deployment()
    here.better, here.brings = better, 1.0
    here.beat(10)
    for _ in range(20):
        here.round()
    assert here.meter.is_resting
    here.meter.renew(here.now, has_rested=True)
    assert here.meter.is_resting is rests


# -------------------------------------------------------------------------- traffic that turns

PATIENCE = 6
"""Rounds in vain after which training rests, whatever the meter says."""


def attempt(here: Deployment, *, is_published: bool = False) -> float:
    """Rounds until training rests; seconds of the trainer."""
    for num in range(PATIENCE):
        if not here.meter.decide(here.now).ok and here.meter.is_resting:
            return 10.0 * num
        here.round(is_published=is_published)
    return 10.0 * PATIENCE


def turning(here: Deployment, *, hours: float, every_s: int, is_published: bool) -> float:
    """Seconds that the trainer worked while the traffic turned, and training rested before."""
    until, worked_s = here.now + 3600 * hours, 0.0
    while here.now < until:
        here.meter.renew(here.now, has_rested=True)
        turned_at = here.now
        if not here.meter.is_waiting(here.now):
            worked_s += attempt(here, is_published=is_published)
        here.beat(max(int(turned_at + every_s - here.now), 1))
    return worked_s


@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize(
    ("payback_s", "num_replicas", "num_idle"), [(60, 1, 0), (600, 1, 0), (600, 4, 0), (600, 4, 3)]
)
def test_attempts_in_vain_take_a_fiftieth_of_the_time(
    payback_s: float, num_replicas: int, num_idle: int, is_published: bool
) -> None:
    """Of the engines' time, however many there are, and though each is of several rounds."""
    here = Deployment(payback_seconds=payback_s, num_replicas=num_replicas)
    here.brings = 1.0
    here.beat(10)
    here.round()
    here.idle = set(here.names[:num_idle])
    here.beat(1000)
    taken_s = 0.2 * turning(here, hours=1, every_s=45, is_published=is_published)
    assert 0.01 < taken_s / 3600 < 0.026


@pytest.mark.parametrize("every_s", [600, 1800])
def test_where_attempts_are_a_fiftieth_anyway_none_waits(every_s: int) -> None:
    here = Deployment()
    here.brings = 1.0
    here.beat(10)
    for _ in range(6):
        here.beat(every_s)
        here.meter.renew(here.now, has_rested=True)
        assert here.meter.decide(here.now).ok
        here.round()


def vain(num: int, **given: Any) -> Deployment:
    """So many attempts of two rounds each, right one after the other."""
    here = Deployment(**given)
    here.brings = 1.0
    here.beat(10)
    for _ in range(num):
        here.round()
        here.round()
        here.meter.renew(here.now, has_rested=True)
    return here


def test_how_long_the_next_round_waits_is_said() -> None:
    here = vain(1)
    assert not here.meter.is_resting, "what was before says nothing"
    wait_s = 2 * 10 * 0.2 / 0.02 - 30  # since the first of its two rounds, 20 s apart
    decided = here.meter.decide(here.now)
    assert not decided.ok and decided.reason == (
        "at rest: rounds on other traffic brought too little; the next in "
        + span(here.meter._attempts.wait_s(here.now))
    )
    assert here.meter._attempts.wait_s(here.now) == pytest.approx(wait_s, abs=2)
    here.meter.renew(here.now, has_rested=True)  # it turns again, and no round was tried
    here.beat(int(here.meter._attempts.wait_s(here.now)) - 1)
    assert here.meter.is_waiting(here.now) and not here.meter.decide(here.now).ok
    here.beat(2)
    assert here.meter.decide(here.now).ok and not here.meter.is_waiting(here.now)


@pytest.mark.parametrize(
    ("brings", "payback_s", "waits"), [(1.05, 600, False), (1.02, 600, True), (1.05, 60, True)]
)
def test_attempts_that_paid_are_not_held_against_the_next(
    brings: float, payback_s: float, waits: bool
) -> None:
    """Two drafts made the engine faster by that: beyond chance, and by more than rounds took."""
    here = vain(0, payback_seconds=payback_s)
    here.brings = brings
    here.round()
    here.brings = 1.0
    here.round()
    here.meter.renew(here.now, has_rested=True)
    assert here.meter.is_waiting(here.now) is waits


def test_an_engine_that_joined_later_does_not_hide_what_drafts_brought() -> None:
    here = vain(0)
    here.brings = 1.1
    here.round()
    here.names += ["replica-1", "replica-2", "replica-3"]
    here.brings = 1.0
    here.round()
    here.meter.renew(here.now, has_rested=True)
    assert not here.meter.is_waiting(here.now)


def test_what_a_recalled_draft_follows_has_brought_what_it_did() -> None:
    here = vain(0)
    here.brings = 1.1
    here.round()
    here.round()
    here.meter.note_recall()
    here.meter.renew(here.now, has_rested=True)
    assert not here.meter.is_waiting(here.now)


def test_a_change_in_the_middle_of_an_attempt_does_not_end_it() -> None:
    """A promote, say: rounds go on."""
    here = vain(0)
    here.round()
    here.meter.renew(here.now, has_rested=False)
    assert here.meter._attempts.seconds == 10
    here.round()
    here.meter.renew(here.now, has_rested=True)
    assert here.meter.is_waiting(here.now)


@pytest.mark.parametrize("given", [{"payback_seconds": 0}, {"max_idle_seconds": 20}])
def test_nothing_waits_where_rounds_may_take_anything_nor_longer_than_a_rest_may_be(
    given: dict[str, float],
) -> None:
    here = vain(1, **given)
    assert here.meter._attempts.wait_s(here.now) <= given.get("max_idle_seconds", 0)


def test_nothing_waits_for_a_trainer_that_takes_nothing() -> None:
    here = Deployment()
    here.slowdown, here.brings = 1.0, 1.0
    here.beat(10)
    for _ in range(4):
        here.round()
        here.meter.renew(here.now, has_rested=True)
    assert not here.meter.is_waiting(here.now)


def test_a_clock_that_was_set_back_makes_no_round_wait() -> None:
    here = vain(1)
    assert here.meter.is_waiting(here.now)
    here.now -= 10_000
    here.beat(1)
    assert not here.meter.is_waiting(here.now)
    here.beat(20)
    here.now += 10_000
    here.beat(1)
    assert not here.meter.is_waiting(here.now), "nor later"


@pytest.mark.parametrize("is_on_trial", [False, True])
def test_better_drafts_that_wait_for_a_trial_bring_something(is_on_trial: bool) -> None:
    here = Deployment(payback_seconds=60)
    here.beat(10)
    for _ in range(30):
        here.beat(10, is_training=True)
        outcome = replace(make_outcome("", 1), seconds=10.0)
        here.meter.add_round(outcome, here.now, is_published=False, is_on_trial=is_on_trial)
        here.beat(10)
    assert here.meter.is_resting is not is_on_trial
    (engine,) = here.meter._engines.values()
    assert engine.gain.awaited is None, "it serves nowhere, so it shows nothing"


def test_traffic_that_nobody_can_judge_is_not_trained_on_for_ever() -> None:
    here = Deployment(payback_seconds=60)
    here.beat(10)
    for _ in range(100):
        here.round(replace(make_outcome("", 1), eval=None), is_published=False)
    assert here.meter.is_resting


def test_rounds_looked_at_together_save_in_the_mean_what_is_left_when_all_are_trained() -> None:
    here = Deployment()
    here.better, here.far_better = 1.0, 1.5
    here.beat(10)
    here.round(replace(make_outcome("", 1), eval=None))
    errors = 1 - (1 - FEWER_ERRORS) ** 4  # four rounds promise most
    share = (errors - FEWER_ERRORS) / (FAR_FEWER_ERRORS - FEWER_ERRORS)
    assert figures(here).saved_s == pytest.approx((600 - 40) / 4 * (1 - 1.5**-share))


def test_a_round_longer_than_it_has_to_pay_back_saves_nothing() -> None:
    assert figures(after_rounds(payback_seconds=5)).saved_s == 0


def test_what_a_draft_brings_counts_not_what_its_gate_promises() -> None:
    """Beside a memory, a draft that errs far less may make nothing faster."""
    here = Deployment()
    here.brings = 1.0
    here.beat(10)
    outcome = make_outcome("", 1)
    assert outcome.eval is not None and outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.2
    expected = []
    for _ in range(12):
        here.round(outcome)
        expected.append(figures(here).saved_s)
    assert expected == sorted(expected, reverse=True) and here.meter.is_resting
    here.brings = 1.02
    for _ in range(12):
        here.round(outcome)
    assert figures(here).saved_s == pytest.approx(590 * (1 - 1 / 1.02), rel=0.3)
    assert not here.meter.is_resting


def test_a_draft_that_makes_engines_slower_brings_nothing() -> None:
    here = after_rounds(6, payback_seconds=60)
    here.draft, here.brings = 20.0, math.exp(-0.9 * CHANGED)
    here.beat(1)
    for _ in range(6):
        here.round()
    assert figures(here).saved_s < 0.1 and here.meter.is_resting


def test_one_round_that_brought_less_than_nothing_ends_no_training_that_promises_much() -> None:
    """The engine's estimates of a new draft begin anew, and the traffic may just have changed."""
    for brings in (1.0, math.exp(-0.9 * CHANGED)):
        here = Deployment()
        here.better, here.brings = 1.2, brings
        here.beat(10)
        here.round(errs_less_by(0.5))
        assert not here.meter.is_resting and figures(here).saved_s > taken(here.slowdown)
        for _ in range(6):
            here.round(errs_less_by(0.5))
        assert here.meter.is_resting, "all of them did"


def test_where_the_traffic_changes_in_a_round_it_shows_nothing_of_the_draft() -> None:
    """The draft before it was worth much on the old traffic, and nothing on the new."""
    here = after_rounds(3)
    before = figures(here).saved_s
    brings, here.brings = here.brings, 0.5
    here.round()
    assert figures(here).saved_s == pytest.approx(before)
    here.draft, here.brings = 1.5, brings
    here.beat(1)
    here.round()
    assert figures(here).saved_s == pytest.approx(before, rel=0.05)


def test_a_draft_that_is_not_worth_its_passes_yet_goes_on_learning() -> None:
    """The first rounds after a shift bring nothing, and a few errors less would not either."""
    here = Deployment()
    here.draft, here.better, here.far_better, here.brings = 1.0, 1.0, 1.5, 1.0
    here.beat(10)
    for _ in range(3):
        here.round(errs_less_by(0.2))
    assert not here.meter.is_resting and figures(here).saved_s > 10
    here.far_better = 1.0  # nothing is to be had
    here.beat(1)
    assert here.meter.is_resting


def test_the_fewer_errors_rounds_take_the_less_is_expected_of_the_next() -> None:
    saved = []
    for share in (0.3, 0.1, 0.01):
        here = Deployment(payback_seconds=60)
        here.better, here.far_better, here.brings = 1.1, 1.3, 1.0 + share / 2.5
        here.beat(10)
        for _ in range(8):
            here.round(errs_less_by(share))
        saved.append(figures(here).saved_s)
    assert saved[0] > 2 * saved[1] > 4 * saved[2]


def test_only_engines_that_serve_the_new_draft_show_what_it_brings() -> None:
    """On trial, or refused by an engine: what the others say is of the old one."""
    here = after_rounds(0)
    before = here.better
    here.beat(10, is_training=True)
    here.meter.add_round(replace(make_outcome("", 1), seconds=10.0), here.now, is_published=True)
    here.draft = 1.1  # the traffic has changed, the version has not
    here.beat(10)
    assert figures(here).saved_s == pytest.approx(590 * (1 - 1 / before))


def test_a_draft_shows_what_it_brings_at_first() -> None:
    """Later, the traffic has changed what it is worth."""
    here = after_rounds(4)
    before = figures(here).saved_s
    here.beat(SHOWS_IN)
    here.draft *= 2
    here.beat(5)
    assert figures(here).saved_s == before


def test_a_round_too_short_to_be_seen_says_nothing_of_what_drafts_bring() -> None:
    """What the draft before it brought is kept, and not counted again."""
    here = after_rounds(3)
    before = figures(here).saved_s
    here.draft *= 1.02  # the traffic has changed
    for is_published in (False, True):
        here.meter.add_round(make_outcome("", 1), here.now, is_published=is_published)
        here.version += is_published
        here.beat(10)
        assert figures(here).saved_s == before


def test_a_round_waits_a_moment_for_what_the_last_one_brought() -> None:
    here = after_rounds(4)
    here.beat(10, is_training=True)
    here.meter.add_round(make_outcome("", 1), here.now, is_published=True)
    here.beat(3)
    waits = here.meter.decide(here.now)
    assert not waits.ok and "brought is being measured" in waits.reason
    assert here.meter.decide(here.now + MOST_REST_S).ok, "but not for long"
    here.version += 1
    here.beat(1)
    assert here.meter.decide(here.now).ok


def test_a_clock_that_is_set_back_holds_no_round_up() -> None:
    here = after_rounds(4)
    here.beat(10, is_training=True)
    here.meter.add_round(make_outcome("", 1), here.now, is_published=True)
    here.beat(3)
    assert not here.meter.decide(here.now).ok
    here.now -= 3600
    here.beat(1)
    assert here.meter.decide(here.now).ok


@pytest.mark.parametrize("ahead_s", [-86_400.0, -30.0, -5.0, 5.0, 30.0, 86_400.0])
def test_a_replica_whose_clock_is_wrong_shows_as_much(ahead_s: float) -> None:
    right, wrong = after_rounds(3), Deployment()
    wrong.ahead_s = ahead_s
    wrong.beat(10)
    for _ in range(3):
        wrong.round()
    assert figures(wrong).slowdown == pytest.approx(1.25)
    assert figures(wrong) == figures(right)


def test_a_replica_whose_clock_is_set_is_understood_again() -> None:
    here = after_rounds(3)
    usual = figures(here)
    here.ahead_s = -3600.0
    here.beat(10)
    for _ in range(9):
        here.round()
    assert figures(here).slowdown == pytest.approx(usual.slowdown)
    here.slowdown = 2.0
    for _ in range(9):
        here.round()
    assert figures(here).slowdown == pytest.approx(2.0)


def test_a_rest_ends_for_one_round_after_a_long_time() -> None:
    here = Deployment(max_idle_seconds=3600)
    here.better = here.brings = 1.0
    here.beat(10)
    here.round()
    here.round()
    assert not here.meter.decide(here.now + 3500).ok
    late = here.meter.decide(here.now + 3600)
    assert late.ok and late.reason.startswith("no round for 1 h")


def test_whoever_wants_it_trains_whatever_it_takes() -> None:
    here = Deployment(payback_seconds=0)
    here.better, here.slowdown = 1.0, 3.0
    here.beat(10)
    here.round()
    here.round()
    assert here.meter.figures() is None
    assert not here.meter.is_resting and here.meter.decide(here.now) == (True, "learning")


def test_engines_that_cannot_tell_are_left_out() -> None:
    """One of a fixed k, one that joined late, one that is away for a moment."""
    here = Deployment(num_replicas=2)
    here.better = here.brings = 1.0
    here.fixed = {"replica-1"}
    here.beat(10)
    here.round(replace(make_outcome("", 1), discarded=NO_TRACES))
    here.round()
    here.round()
    assert here.meter.is_resting
    before = figures(here)
    here.names.append("replica-9")
    here.beat(1)
    assert figures(here) == before and here.meter.is_resting
    here.meter.look([], is_training=False, now=here.now + 1)
    here.beat(1)
    assert here.meter.is_resting
    alone = Deployment()
    alone.fixed = {"replica-0"}
    alone.beat(10)
    alone.round()
    alone.round()
    assert alone.meter.figures() is None and alone.meter.decide(alone.now).ok


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -3.0, 0.0, 1e308])
def test_rubbish_in_a_heartbeat_ends_nothing(rubbish: float) -> None:
    here = after_rounds()
    pace, better, here.pace, here.better = here.pace, here.better, rubbish, rubbish
    here.round()
    assert isinstance(here.meter.decide(here.now).ok, bool)
    here.pace, here.better = pace, better
    for _ in range(4):
        here.round()
    assert figures(here).slowdown == pytest.approx(1.25)


def test_the_first_moment_of_a_round_says_nothing_of_its_pace() -> None:
    here = Deployment()
    here.beat(10)
    for _ in range(2):
        slow, here.slowdown = here.slowdown, 1.0
        here.beat(1, is_training=True)  # the pace has not followed yet
        here.slowdown = slow
        here.beat(9, is_training=True)
        here.meter.add_round(make_outcome("", 1), here.now, is_published=True)
        here.beat(10)
    assert figures(here).slowdown == pytest.approx(1.25)


def test_a_heartbeat_counts_for_the_time_at_which_it_was_sent() -> None:
    """Rounds of a second, which are over when the heartbeat sent in them is read."""
    here = Deployment()
    here.beat(10)
    for _ in range(2):
        known, begun = here.status("replica-0", is_training=False), here.now + 0.1
        here.meter.look([replace(known, at=begun - 0.05)], is_training=True, now=begun)
        here.meter.look([replace(known, at=begun - 0.02)], is_training=True, now=begun)
        here.now = begun + 0.9
        sent = here.status("replica-0", is_training=True)
        here.meter.add_round(make_outcome("", 1), here.now, is_published=True)
        here.meter.look([sent], is_training=False, now=begun + 1)
        here.beat(5)
    assert figures(here).slowdown == pytest.approx(1.25)


def test_rounds_wait_a_moment_while_the_pace_without_them_is_not_known() -> None:
    """Else, one right after the other, they would never show what they take."""
    here = Deployment()
    here.beat(10)
    here.beat(10, is_training=True)
    here.meter.add_round(make_outcome("", 1), here.now, is_published=False)
    here.beat(1)
    waits = here.meter.decide(here.now)
    assert not waits.ok and "is being measured" in waits.reason
    assert here.meter.decide(here.now + MOST_REST_S).ok, "but not for long"
    here.beat(2)
    assert here.meter.decide(here.now).ok
    here.idle = {"replica-0"}
    here.beat(4000)
    here.beat(3, is_training=True)
    here.beat(1)
    assert here.meter.decide(here.now).ok, "nobody is slowed down"


async def test_the_train_loop_rests_while_no_round_pays(tmp_path: Path) -> None:
    world, better, beats = World(tmp_path), [1.0], Counter[bool]()

    async def beat() -> None:
        while True:
            world.clock.now += 3
            is_training = (await world.controller.status()).phase == "training"
            beats[is_training] += 1
            report = SpeculationReport(
                pace=1.3 if is_training else 1.0,
                worth=DraftWorth(of_draft=2, of_better=better[0], of_far_better=better[0]),
            )
            world.registry.living = [
                replace(replica(1), at=world.clock.now, num_running=1, speculation=report)
            ]
            await asyncio.sleep(0.01)

    async with world.running(), going_on(beat()):
        await world.until(lambda: beats[False] > 30)
        world.trainer.gate_open.clear()
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: beats[True] > 30)
        world.trainer.gate_open.set()
        await world.until(lambda: "rests" in world.kinds())
        world.trainer.rounds.append(world.trainer.better)
        await world.a_few_looks()
        assert world.trainer.calls == ["round from v1"]
        status = await world.controller.status()
        assert status.phase_detail.startswith("at rest: a round takes 0.2 s from the engines")
        assert status.payback is not None and status.payback.slowdown == pytest.approx(1.3)
        (said,) = [text for text in world.events() if text.startswith("rests")]
        assert said == f"rests: {status.phase_detail}"
        assert world.says("osd_round_saved_seconds 0.0")
        better[0] = 1.2
        await world.until(lambda: len(world.trainer.calls) == 2)
        await world.until(lambda: world.kinds().count("learns") == 1)
        (said,) = [text for text in world.events() if text.startswith("learns")]
        assert said.startswith("learns: a round takes 0.2 s from the engines, and is expected to")


async def test_other_traffic_makes_earlier_rounds_void_though_none_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meter lets training rest; nothing but its own rest would have watched acceptance."""
    world, renewed = World(tmp_path), list[float]()
    meter = world.controller._loops.payback

    def renew(now: float, *, has_rested: bool) -> None:
        assert has_rested
        renewed.append(now)
        meter.is_resting = False

    monkeypatch.setattr(meter, "renew", renew)
    world.serve(1, alpha=0.8, num=30)
    async with world.running():
        await world.a_few_looks()
        meter.is_resting = True
        await world.until(lambda: "rests" in world.kinds())
        world.serve(1, alpha=0.8, num=3)
        await world.a_few_looks()
        assert not renewed
        world.serve(1, alpha=0.2, num=3)
        await world.until(lambda: "learns" in world.kinds())
    assert renewed == [world.clock.time()]
    (said,) = [text for text in world.events() if text.startswith("learns")]
    assert said.startswith("learns: α fell from 0.")


@pytest.mark.parametrize("is_new_process", [False, True])
async def test_a_round_after_a_rest_takes_the_newest_traces(
    tmp_path: Path, is_new_process: bool
) -> None:
    """In a rest too, after `max_idle_seconds`. The ones after them take all again, and so does one
    after a pause."""
    world = World(tmp_path)
    world.configure("trainer", patience_rounds=1, min_new_traces=8)
    world.serve(1, alpha=0.8, num=30)
    async with world.running():
        world.trainer.rounds.append(no_gain)
        await world.until(lambda: "rests" in world.kinds())
        await world.a_few_looks()
        world.clock.move(world.config.trainer.max_idle_seconds)
        world.trainer.rounds.append(no_gain)
        await world.until(lambda: len(world.trainer.sizes) == 2)
        await world.a_few_looks()
    if is_new_process:
        world.restart()
    async with world.running():
        await world.a_few_looks()
        world.serve(1, alpha=0.2, num=2)
        await world.until(lambda: "learns" in world.kinds())
        world.trainer.rounds.append(world.trainer.better)
        await world.until(lambda: "published" in world.kinds())
        await world.a_few_looks()
        await world.controller.pause()
        await world.a_few_looks()
        await world.controller.resume()
        world.trainer.rounds.append(no_gain)
        await world.until(lambda: len(world.trainer.sizes) == 4)
    assert [size.new_traces for size in world.trainer.sizes] == [512, 16, 16, 512]


async def test_training_rests_while_a_round_waits_and_why_it_goes_on_is_told(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.configure("trainer", patience_rounds=1)
    meter = world.controller._loops.payback
    world.serve(1, alpha=0.8, num=30)
    async with world.running():
        world.trainer.rounds.append(no_gain)
        await world.until(lambda: "rests" in world.kinds())
        meter._attempts.free_at = world.clock.now + 90
        world.serve(1, alpha=0.2, num=3)
        world.trainer.rounds.append(world.trainer.better)
        await world.a_few_looks()
        assert "learns" not in world.kinds() and len(world.trainer.calls) == 1
        assert (await world.controller.status()).phase_detail == (
            "at rest: rounds on other traffic brought too little; the next in 1 min 30 s"
        )
        world.clock.move(91)
        await world.until(lambda: len(world.trainer.calls) == 2 and "learns" in world.kinds())
    (said,) = [text for text in world.events() if text.startswith("learns")]
    assert said.startswith("learns: α fell from 0.")


async def test_where_no_round_pays_after_a_fall_the_next_fall_is_seen_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, renewed = World(tmp_path), list[str]()
    meter = world.controller._loops.payback
    monkeypatch.setattr(meter, "renew", lambda now, has_rested: renewed.append("renewed"))
    world.serve(1, alpha=0.9, num=30)
    async with world.running():
        await world.a_few_looks()
        meter.is_resting = True
        await world.until(lambda: "rests" in world.kinds())
        for alpha in (0.5, 0.1):
            num_before = len(renewed)
            world.serve(1, alpha=alpha, num=100)
            await world.until(lambda: len(renewed) > num_before)  # noqa: B023
            await world.a_few_looks()
    assert "learns" not in world.kinds()


async def test_another_draft_to_improve_makes_earlier_rounds_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, renewed = World(tmp_path), list[str]()
    meter = world.controller._loops.payback
    monkeypatch.setattr(meter, "renew", lambda now, has_rested: renewed.append("renewed"))
    async with world.running():
        await world.publish(2)
        world.trainer.rounds += [no_gain] * 3
        await world.until(lambda: world.kinds().count("refused") == 3)
        num_before = len(renewed)
        await world.controller.promote(1)
        await world.until(lambda: len(renewed) == num_before + 1)
