"""The replay under the control of speculation.

Every token is accounted for, time passes as modelled, and decisions are sensible.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.drift import contenders, names
from benchmarks.replays import closed_loop, learning
from benchmarks.replays.closed_loop import ClosedLoop
from benchmarks.replays.curve import Curve
from benchmarks.replays.recording import Recorded, kinds
from benchmarks.replays.served import EveryStep, Served, counts_of, matches_of
from benchmarks.replays.step_times import STREAMS, ModelledStepTimes
from osd.config.schema import Config, SpeculationConfig
from osd.control.drift import DriftDetector
from osd.control.policy import Decision
from osd.records import ACCEPTED, PLAIN, REJECTED
from serving.speculation.control import Speculation
from serving.speculation.goodput import OFF, Plan
from serving.speculation.step_seen import StepSeen
from serving.speculation.step_times import StepTimes
from tests.support.tiny_drafts import save_draft
from tests.unit.benchmarks.drift.test_contenders import a_setup, recorded
from tests.unit.serving.speculation.test_control_memory import Knows
from trainer.draft import load_draft

TIMES = ModelledStepTimes(verify_s=(0.04, 0.05, 0.12), draft_s=0.008)


def config(mode: str = "auto", proposers: tuple[str, ...] = ("draft", "memory")) -> Config:
    return Config(speculation=SpeculationConfig(mode=mode, k_max=4, proposers=proposers))  # type: ignore[arg-type]


def run(loop: ClosedLoop, draft: Path) -> list[Served]:
    loop.swap(draft, None)
    return sorted(loop.serve(), key=lambda one: one.index)


def looping() -> Recorded:
    """An answer that the memory foresees."""
    ids = np.array([7, 9, 11, 13] * 12, np.int32)
    return Recorded(
        name="r",
        prompt_ids=ids[:8],
        output_ids=ids,
        target_ids=ids[:, None],
        target_logprobs=np.zeros((len(ids), 1), np.float16),
        tail_logprob=np.full(len(ids), -np.inf, np.float32),
    )


def one_token() -> Recorded:
    """An answer that prefill ends."""
    whole = looping()
    rest = {
        name: getattr(whole, name)[:1]
        for name in ("output_ids", "target_ids", "target_logprobs", "tail_logprob")
    }
    return replace(whole, name="short", **rest)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture(scope="module")
def good(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that knows the planted language."""
    directory = tmp_path_factory.mktemp("good")
    setup = a_setup(draft, directory)
    contenders.train_ceiling(setup.config, draft, recorded(64, start=1000), directory / "draft")
    return directory / "draft"


def test_with_a_fixed_k_it_counts_and_takes_what_every_other_replay_does(
    good: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_loop, "NOISE", 0.0)
    requests = [*recorded(20), one_token()]
    for one in (good, draft):
        plain = EveryStep(requests, 4)
        plain.swap(one, None)
        expected = list(plain.serve())
        found = run(ClosedLoop(requests, config("fixed"), TIMES, seed=0), one)
        assert [served.counts for served in found] == [served.counts for served in expected]
        for own, other in zip(found, expected, strict=True):
            assert own.kind_T.tolist() == other.kind_T.tolist()
        # Every step has a draft of 4, and all streams share it.
        alone = TIMES.seconds(
            Curve.of([served.counts for served in expected]), has_draft_model=True
        )
        assert [served.seconds for served in found] == pytest.approx(alone.tolist())


def test_a_draft_that_slept_catches_up_first(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "NOISE", 0.0)
    loop = ClosedLoop(recorded(STREAMS), config(), TIMES, seed=0)
    loop.swap(good, None)
    for index in range(STREAMS):
        loop._admit(index)
    took = []
    for plan in (OFF, OFF, Plan("draft", 4), Plan("draft", 4), OFF):
        loop.speculation.force(plan)
        before = loop.clock
        loop._step()
        took.append(loop.clock - before)
    off, verify, draft_s = TIMES.verify_s[0], TIMES.verify_s[1], TIMES.draft_s
    # The first step verifies what was proposed at the end of prefill, as does the one after each
    # draft.
    assert took == pytest.approx([verify, off, off + 2 * draft_s, verify + draft_s, verify])


def test_the_control_is_told_nothing_of_what_was_never_recorded(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = ClosedLoop(recorded(8), config("fixed"), TIMES, seed=0)
    left: list[dict[str, int]] = []
    observe = loop.speculation.observe

    def spy(step: StepSeen) -> None:
        ends = {one.name: len(one.tokens) for one in loop._running}
        seen = zip(step.req_ids, step.num_tokens, step.drafted, step.accepted, strict=True)
        for name, num_tokens, drafted, accepted in seen:
            remaining = ends[name] - num_tokens
            left.append({"left": remaining, "drafted": drafted, "accepted": accepted})
        observe(step)

    monkeypatch.setattr(loop.speculation, "observe", spy)
    run(loop, good)
    ends = [one for one in left if one["accepted"] == one["left"]]
    assert ends and all(one["drafted"] == one["accepted"] for one in ends)
    assert all(one["drafted"] == 4 for one in left if one not in ends)


def test_caps_of_requests_hold(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = ClosedLoop(recorded(8), config("fixed"), TIMES, seed=0)
    monkeypatch.setattr(loop.speculation, "cap", lambda name: 1)
    for served in run(loop, good):
        assert served.counts.drafted == served.counts.drafts > 0


def test_no_step_is_decided_while_times_are_being_fitted(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay is faster than an engine: what it decides must not depend on how far a thread has
    come."""
    under_way: list[bool] = []
    refit, decide = StepTimes._refit, Speculation.plan

    def slowly(self: StepTimes, medians: Any) -> None:
        under_way.append(True)
        time.sleep(0.05)
        refit(self, medians)
        under_way.pop()

    def plan(self: Speculation, *given: Any) -> Plan:
        assert not under_way
        return decide(self, *given)

    monkeypatch.setattr(StepTimes, "_refit", slowly)
    monkeypatch.setattr(Speculation, "plan", plan)
    loop = ClosedLoop(recorded(60), config(), TIMES, seed=0)
    run(loop, draft)
    assert loop.speculation.times._fitting is not None, "there was something to wait for"


def test_a_new_draft_makes_the_control_begin_anew(draft: Path, good: Path) -> None:
    loop = ClosedLoop(recorded(8), config(), TIMES, seed=0)
    told: list[float | None] = []
    loop.speculation.restart = told.append  # type: ignore[method-assign]
    loop.swap(draft, None)
    loop.swap(good, 0.9)
    assert told == [None, 0.9]


def test_what_rests_and_wakes_training_is_the_drafts_acceptance(good: Path) -> None:
    (served,) = run(ClosedLoop([looping()], config("fixed", ("memory",)), TIMES, seed=0), good)
    window = learning._window(served, 0.0, 1, 4)
    assert served.counts.accepted > 0
    assert window.num_accepted_tokens == sum(window.num_tested_per_pos) == 0
    assert window.num_output_tokens == served.counts.tokens


def test_time_is_what_the_steps_take(good: Path) -> None:
    requests = recorded(4 * STREAMS)
    loop = ClosedLoop(requests, config("off"), TIMES, seed=0)
    found = run(loop, good)
    assert all(served.counts.drafts == 0 and set(served.kind_T) == {PLAIN} for served in found)
    seconds = [served.seconds or 0.0 for served in found]
    # All streams are busy to the end, as the requests are of one length.
    assert sum(seconds) == pytest.approx(loop.clock)
    assert loop.clock == pytest.approx(4 * 23 * TIMES.verify_s[0], rel=0.03)


def test_every_token_is_served_once_whatever_is_proposed(good: Path) -> None:
    for mode, proposers in (
        ("auto", ("draft", "memory")),
        ("fixed", ("memory",)),
        ("auto", ("memory",)),
    ):
        requests = recorded(60)
        for served, request in zip(
            run(ClosedLoop(requests, config(mode, proposers), TIMES, seed=1), good),
            requests,
            strict=True,
        ):
            assert len(served.kind_T) == len(request.output_ids) == served.counts.tokens + 1
            of_draft, counts = served.of_the_draft, served.counts
            assert (served.kind_T == ACCEPTED).sum() == counts.accepted
            assert (served.kind_T == REJECTED).sum() == counts.tested - counts.accepted
            # Each step makes a token of its own, but for one that the end of the answer cuts off.
            assert served.counts.tokens - served.counts.accepted <= served.counts.steps
            assert served.counts.steps <= served.counts.tokens - served.counts.accepted + 1
            if "draft" not in proposers:
                assert of_draft.drafts == 0


def test_the_memory_repeats_what_stood_before(good: Path) -> None:
    (served,) = run(ClosedLoop([looping()], config("fixed", ("memory",)), TIMES, seed=0), good)
    assert served.counts.accepted > 0.7 * served.counts.tokens
    assert served.of_the_draft.drafted == 0


def test_the_memory_proposes_what_earlier_answers_said(good: Path) -> None:
    """One answer is served again and again: the draft knows it well, and only the first time it is
    alone with that."""
    requests = [replace(recorded(1)[0], name=f"r{i}") for i in range(12 * STREAMS)]
    both = ClosedLoop(requests, config(), TIMES, seed=0)
    found = run(both, good)
    alone = run(ClosedLoop(requests, config(proposers=("draft",)), TIMES, seed=0), good)
    for served in found[: STREAMS // 2]:
        assert served.of_the_draft.drafted > 0
    late = found[6 * STREAMS :]
    assert sum(s.counts.accepted - s.of_the_draft.accepted for s in late) > 0, "the memory's"
    assert sum(s.counts.steps for s in late) <= sum(s.counts.steps for s in alone[6 * STREAMS :])
    report = both.speculation.report()
    assert report.sources["memory"][1] == sum(
        s.counts.accepted - s.of_the_draft.accepted for s in found
    )


def test_what_nobody_verified_is_judged_by_what_was_served(good: Path) -> None:
    """Whoever proposes, the draft is thought to be as good as where it proposes alone."""
    requests = [replace(recorded(1)[0], name=f"r{i}") for i in range(12 * STREAMS)]
    acceptance = {}
    for proposers in (("draft",), ("draft", "memory")):
        loop = ClosedLoop(requests, config(proposers=proposers), TIMES, seed=0)
        run(loop, good)
        report = loop.speculation.report()
        tested, accepted = report.tested_per_position[0], report.accepted_per_position[0]
        assert tested > 50
        acceptance[proposers] = accepted / tested
        by_itself = report.sources["draft"][0]
    assert by_itself < sum(report.tested_per_position), "some of it was never verified"
    assert acceptance["draft", "memory"] == pytest.approx(acceptance["draft",], abs=0.05)


def test_a_draft_that_is_never_right_is_left_alone_and_a_good_one_is_used(
    draft: Path, good: Path
) -> None:
    requests = recorded(300)
    bad = run(ClosedLoop(requests, config(proposers=("draft",)), TIMES, seed=0), draft)
    assert sum(s.counts.drafts for s in bad[100:]) < 0.1 * sum(s.counts.steps for s in bad[100:])
    used = run(ClosedLoop(requests, config(proposers=("draft",)), TIMES, seed=0), good)
    assert sum(s.counts.drafts for s in used[100:]) > 0.9 * sum(s.counts.steps for s in used[100:])
    assert sum(s.seconds or 0 for s in used) < 0.6 * sum(s.seconds or 0 for s in bad)


def test_requests_under_way_end_with_the_draft_they_began_with(
    draft: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = recorded(40)
    loop = ClosedLoop(requests, config("fixed"), TIMES, seed=0)
    expected = {name: EveryStep(requests, 4) for name in ("draft", "good")}
    expected["draft"].swap(draft, None)
    expected["good"].swap(good, None)
    counts = {name: [served.counts for served in one.serve()] for name, one in expected.items()}
    loop.swap(draft, None)
    step, num_steps = loop._step, 0
    running: set[int] = set()

    def swap_in_the_midst() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 30:
            running.update(one.index for one in loop._running)
            loop.swap(good, 0.95)
        step()

    monkeypatch.setattr(loop, "_step", swap_in_the_midst)
    found = list(loop.serve())
    assert running == {4, 5, 6, 7} and len(found) == 40
    for served in found:
        assert served.counts == counts["draft" if served.index < 8 else "good"][served.index]


def test_the_contenders_that_the_loop_decides_for(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        DriftDetector, "decide", lambda self, now: asked.append(now) or Decision(True, "")
    )
    setup = replace(a_setup(draft, tmp_path / "a", 160), times=TIMES)
    # The memory knows the planted language as soon as a draft does.
    alone = setup.config.speculation.model_copy(update={"proposers": ["draft"]})
    setup = replace(setup, config=setup.config.model_copy(update={"speculation": alone}))
    (tmp_path / "a").mkdir()
    learnt = contenders.CONTENDERS[names.SERVED](setup)
    assert learnt.num_published >= 1 and learnt.seconds is not None
    assert (np.diff(learnt.cpu_s) >= 0).all() and learnt.cpu_s[-1] > 0
    assert len(asked) == 160, "training rests where it brings nothing"
    assert names.FROZEN_LOOP in names.UNTRAINED
    frozen = contenders.CONTENDERS[names.FROZEN_LOOP](setup)
    assert frozen.seconds is not None and frozen.num_rounds == 0
    assert learnt.seconds[-40:].sum() < 0.8 * frozen.seconds[-40:].sum()
    again = contenders.CONTENDERS[names.FROZEN_LOOP](setup)
    assert again.seconds is not None and (again.seconds == frozen.seconds).all(), (
        "the same seed, the same run"
    )


def test_without_step_times_there_is_nothing_to_decide_by(draft: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none were measured"):
        contenders.CONTENDERS[names.SERVED](a_setup(draft, tmp_path))


def test_kinds_of_an_answer() -> None:
    assert kinds(np.array([True, False, True]), 2, 4).tolist() == [
        PLAIN,
        ACCEPTED,
        REJECTED,
        ACCEPTED,
    ]


def test_sampled_drafts_are_drawn_in_every_replay(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_loop, "NOISE", 0.0)
    requests = [replace(one, temperature=1.0) for one in recorded(20)]
    given = config("fixed", ("draft",))
    how = given.speculation.model_copy(update={"draft_sample_method": "probabilistic"})
    model = load_draft(good)
    drawn = [counts_of(matches_of(model, one, is_sampled=True), 4) for one in requests]
    assert drawn != [counts_of(matches_of(model, one), 4) for one in requests]
    sampled = given.model_copy(update={"speculation": how})
    found = run(ClosedLoop(requests, sampled, TIMES, seed=0), good)
    assert [served.counts for served in found] == drawn
    every_step = EveryStep(requests, 4, is_sampled=True)
    every_step.swap(good, None)
    assert [served.counts for served in every_step.serve()] == drawn


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drawn_draft_that_nobody_verified_is_judged_by_nothing(
    good: Path, temperature: float
) -> None:
    """As in the service, where what was served does not say what it is worth."""
    requests = [replace(one, temperature=temperature) for one in recorded(4)]
    given = config("auto", ("draft", "memory"))
    how = given.speculation.model_copy(update={"draft_sample_method": "probabilistic"})
    sampled = given.model_copy(update={"speculation": how})
    finds = Knows(**{str(index): [0.99] * 8 for index in range(4)})
    loop = ClosedLoop(requests, sampled, TIMES, seed=0, memory=finds)
    assert loop.speculation.settings.is_drawn
    loop.speculation.force(Plan("draft", 2, is_mixed=True))
    loop.speculation.plan([], 0)  # so that the first proposals follow it, too
    served = run(loop, good)
    assert sum(one.of_the_draft.tested for one in served) == 0, "the memory is in its place"
    judged = sum(loop.speculation.report().tested_per_position)
    assert (judged == 0) == (temperature > 0)
