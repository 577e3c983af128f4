"""The replay under the control of speculation: every token accounted for, time as modelled, and sensible decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from osd.bench import contenders
from osd.bench import drift_names as names
from osd.bench.closed_loop import ClosedLoop
from osd.bench.recording import Recorded, kinds
from osd.bench.served import EveryStep, Served
from osd.bench.step_times import STREAMS, StepTimes
from osd.config import Config, SpeculationConfig
from osd.records import ACCEPTED, PLAIN, REJECTED
from tests.tiny_drafts import save_draft
from tests.unit.test_contenders import a_setup, recorded

TIMES = StepTimes(verify_s=(0.04, 0.05, 0.12), draft_s=0.008)


def config(mode: str = "auto", proposers: tuple[str, ...] = ("draft", "ngram")) -> Config:
    return Config(speculation=SpeculationConfig(mode=mode, k_max=4, proposers=proposers))  # type: ignore[arg-type]


def run(loop: ClosedLoop, draft: Path) -> list[Served]:
    loop.swap(draft, None)
    return sorted(loop.serve(), key=lambda one: one.index)


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


def test_with_a_fixed_k_it_counts_what_every_other_replay_counts(good: Path, draft: Path) -> None:
    requests = recorded(20)
    for one in (good, draft):
        plain = EveryStep(requests, 4)
        plain.swap(one, None)
        expected = list(plain.serve())
        found = run(ClosedLoop(requests, config("fixed"), TIMES, seed=0), one)
        assert [served.counts for served in found] == [served.counts for served in expected]
        for own, other in zip(found, expected, strict=True):
            assert own.kind_T.tolist() == other.kind_T.tolist()


def test_time_is_what_the_steps_take(good: Path) -> None:
    requests = recorded(4 * STREAMS)
    loop = ClosedLoop(requests, config("off"), TIMES, seed=0)
    found = run(loop, good)
    assert all(served.counts.drafts == 0 and set(served.kind_T) == {PLAIN} for served in found)
    seconds = [served.seconds or 0.0 for served in found]
    assert sum(seconds) == pytest.approx(loop.clock)  # all streams are busy to the end: the requests are of one length
    assert loop.clock == pytest.approx(4 * 23 * TIMES.verify_s[0], rel=0.03)


def test_every_token_is_served_once_whatever_is_proposed(good: Path) -> None:
    for mode, proposers in (("auto", ("draft", "ngram")), ("fixed", ("ngram",)), ("auto", ("ngram",))):
        requests = recorded(60)
        for served, request in zip(
            run(ClosedLoop(requests, config(mode, proposers), TIMES, seed=1), good), requests, strict=True
        ):
            assert len(served.kind_T) == len(request.output_ids) == served.counts.tokens + 1
            of_draft = served.of_the_draft
            assert (served.kind_T == ACCEPTED).sum() == of_draft.accepted
            assert (served.kind_T == REJECTED).sum() == of_draft.tested - of_draft.accepted
            # Each step makes a token of its own, but for one that the end of the answer cuts off.
            assert served.counts.tokens - served.counts.accepted <= served.counts.steps
            assert served.counts.steps <= served.counts.tokens - served.counts.accepted + 1
            if "draft" not in proposers:
                assert of_draft.drafts == 0


def test_ngrams_repeat_what_stood_before(good: Path) -> None:
    ids = np.array([7, 9, 11, 13] * 12, np.int32)
    shape = (len(ids), 1)
    looping = Recorded(
        name="r",
        prompt_ids=ids[:8],
        output_ids=ids,
        target_ids=ids[:, None],
        target_logprobs=np.zeros(shape, np.float16),
        tail_logprob=np.full(len(ids), -np.inf, np.float32),
    )
    (served,) = run(ClosedLoop([looping], config("fixed", ("ngram",)), TIMES, seed=0), good)
    assert served.counts.accepted > 0.7 * served.counts.tokens
    assert served.of_the_draft.drafted == 0


def test_a_draft_that_is_never_right_is_left_alone_and_a_good_one_is_used(draft: Path, good: Path) -> None:
    requests = recorded(300)
    bad = run(ClosedLoop(requests, config(proposers=("draft",)), TIMES, seed=0), draft)
    assert sum(s.counts.drafts for s in bad[100:]) < 0.1 * sum(s.counts.steps for s in bad[100:])
    used = run(ClosedLoop(requests, config(proposers=("draft",)), TIMES, seed=0), good)
    assert sum(s.counts.drafts for s in used[100:]) > 0.9 * sum(s.counts.steps for s in used[100:])
    assert sum(s.seconds or 0 for s in used) < 0.6 * sum(s.seconds or 0 for s in bad)


def test_a_swap_reaches_the_requests_that_run(draft: Path, good: Path) -> None:
    requests = recorded(40)
    loop = ClosedLoop(requests, config("fixed"), TIMES, seed=0)
    loop.swap(draft, None)
    before, after = [], []
    for served in loop.serve():
        (after if len(before) >= 8 else before).append(served)
        if len(before) == 8 and not after:
            loop.swap(good, 0.95)
    rate = [sum(s.counts.accepted for s in some) / sum(s.counts.drafted for s in some) for some in (before, after)]
    assert rate[0] < 0.2 < 0.7 < rate[1]


def test_the_contenders_that_the_loop_decides_for(draft: Path, tmp_path: Path) -> None:
    setup = replace(a_setup(draft, tmp_path / "a", 160), times=TIMES)
    (tmp_path / "a").mkdir()
    learnt = contenders.CONTENDERS[names.SERVED](setup)
    assert learnt.num_published >= 1 and learnt.seconds is not None
    assert (np.diff(learnt.cpu_s) >= 0).all() and learnt.cpu_s[-1] > 0
    frozen = contenders.CONTENDERS[names.FROZEN_LOOP](setup)
    assert frozen.seconds is not None and frozen.num_rounds == 0
    assert learnt.seconds[-40:].sum() < 0.8 * frozen.seconds[-40:].sum()
    again = contenders.CONTENDERS[names.FROZEN_LOOP](setup)
    assert again.seconds is not None and (again.seconds == frozen.seconds).all(), "the same seed, the same run"


def test_without_step_times_there_is_nothing_to_decide_by(draft: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none were measured"):
        contenders.CONTENDERS[names.SERVED](a_setup(draft, tmp_path))


def test_kinds_of_an_answer() -> None:
    assert kinds(np.array([True, False, True]), 2, 4).tolist() == [PLAIN, ACCEPTED, REJECTED, ACCEPTED]
