"""Which traces the evaluator compares drafts on, how many, and under which versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from osd.control.policy import should_publish
from osd.records import DraftRelease, EvalReport, Trace
from tests.support.tiny_drafts import VOCAB_SIZE, chain_trace, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import GATE, buffer_with, config, trainer_at
from tests.unit.osd.control.test_controller import make_outcome
from trainer.draft import load_draft
from trainer.evaluate import compare, replay
from trainer.evaluator import Evaluator

K = 3
CONFIG = config(max_length=16, seed=5)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("drafts")
    return save_draft(directory / "one", 1, scale=0.3), save_draft(
        directory / "other", 2, scale=0.3
    )


def held_out(num: int, start: int = 500, domain: str = "") -> list[Trace]:
    """Longer than what the drafts are trained to see."""
    return chain_traces(num, start=start, holdout=True, domain=domain, num_output=24)


def evaluator(*traces: Trace) -> Evaluator:
    return Evaluator(CONFIG, GATE, K, buffer_with(*traces))


def test_a_candidate_is_evaluated_on_the_newest_held_out_traces_at_most_as_many_as_the_gate_says(
    drafts: tuple[Path, Path],
) -> None:
    newest = held_out(GATE.max_holdout_traces, 600, "new")
    report = evaluator(*held_out(9, 500, "old"), *newest, *chain_traces(9)).compare(
        drafts[0], release_of(drafts[1])
    )
    models = [load_draft(path) for path in drafts]
    assert report == compare(models[0], models[1], newest, K, GATE, max_length=16, seed=5)
    assert report.num_traces == 16 and list(report.classes) == ["new"]
    assert report.alpha_candidate != report.alpha_base


@pytest.mark.parametrize(
    ("traces", "is_evaluated"),
    [
        (held_out(3), False),
        (held_out(4), True),
        ([*held_out(3), chain_trace(600, holdout=True, num_output=1)], False),  # never drafted
        ([*held_out(3), chain_trace(600, holdout=True, prompt_ids=[1, 2, VOCAB_SIZE, 3])], False),
        ([*held_out(3), *chain_traces(30)], False),  # trained on
    ],
)
def test_too_few_held_out_traces_evaluate_no_draft(
    drafts: tuple[Path, Path], traces: list[Trace], is_evaluated: bool
) -> None:
    releases = [release_of(drafts[0], version=1), release_of(drafts[1], version=2)]
    assert (evaluator(*traces).compare(drafts[0], releases[1]) is not None) is is_evaluated
    assert bool(evaluator(*traces).alphas(releases, 16)) is is_evaluated


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Step of a language -> a draft that knows it, and no other."""
    directory = tmp_path_factory.mktemp("taught")
    blank = release_of(save_draft(directory / "blank"))
    return {
        step: Path(
            trainer_at(directory / str(step), buffer_with(*chain_traces(64, step=step)))
            .run_round(blank)
            .path
        )
        for step in (5, 7)
    }


@pytest.mark.parametrize(
    ("num_before", "num_since", "follows", "num_judged"),
    [
        (8, 8, True, 8),
        (9, 7, True, 8),  # eight are needed, and one more does not hide it
        (7, 9, True, 16),
        (8, 8, False, 16),
        (12, 0, True, 12),
        (0, 12, True, 12),
    ],
)
def test_after_a_change_of_traffic_a_candidate_is_judged_on_what_came_since(
    taught: dict[int, Path], num_before: int, num_since: int, follows: bool, num_judged: int
) -> None:
    before = chain_traces(num_before, start=500, holdout=True)
    since = chain_traces(num_since, start=600, holdout=True, step=7)
    gate = GATE.model_copy(update={"judge_since_change": follows})
    judge = Evaluator(CONFIG, gate, K, buffer_with(*before, *since))
    report = judge.compare(taught[7], release_of(taught[5]))
    assert report is not None
    assert (report.num_traces, report.num_before) == (
        num_judged,
        num_before + num_since - num_judged,
    )
    if num_judged == num_since:
        assert report.diff_low > 0 and should_publish_on(report, release_of(taught[5]))
    # What serves is worse on what was before: nothing has become worse for it.
    other = judge.compare(taught[5], release_of(taught[7]))
    assert other is not None and other.num_before == 0


def should_publish_on(report: EvalReport, release: DraftRelease) -> bool:
    """Whether the gate lets such a candidate serve in its place, and says why."""
    outcome = replace(make_outcome("", release.version), eval=report, target_id=release.target_id)
    decision = should_publish(outcome, release, GATE, False)
    assert ("since the traffic changed" in decision.reason) is bool(report.num_before)
    return decision.ok


def test_where_drafts_are_sampled_they_are_judged_so(drafts: tuple[Path, Path]) -> None:
    """Requests whose rows cannot be read are left out."""
    newest = held_out(5, 600)
    drawn = [replace(trace, temperature=1.0) for trace in newest]
    broken = replace(drawn[0], trace_id=held_out(1, 700)[0].trace_id, tail_logprob=np.zeros(24))
    releases = [release_of(path, version) for version, path in enumerate(drafts, 1)]
    buffer = buffer_with(*drawn, broken)
    found = Evaluator(CONFIG, GATE, K, buffer, is_sampled=True).alphas(releases, 6)
    models = [load_draft(path) for path in drafts]
    by_hand = [replay(model, drawn, K, max_length=16, is_sampled=True).alpha for model in models]
    assert found == dict(enumerate(by_hand, 1))
    report = Evaluator(CONFIG, GATE, K, buffer, is_sampled=True).compare(drafts[0], releases[1])
    assert report is not None
    assert (report.alpha_candidate, report.alpha_base) == tuple(by_hand)
    greedy = Evaluator(CONFIG, GATE, K, buffer).alphas(releases, 6)
    assert greedy != found


def test_releases_are_replayed_on_as_many_of_the_newest_traces_as_is_asked_for(
    drafts: tuple[Path, Path],
) -> None:
    newest = held_out(5, 600)
    found = evaluator(*held_out(9), *newest).alphas(
        [release_of(drafts[0], version=7), release_of(drafts[1], version=4)], 5
    )
    by_hand = [replay(load_draft(path), newest, K, max_length=16).alpha for path in drafts]
    assert found == {7: by_hand[0], 4: by_hand[1]}
    assert by_hand[0] != by_hand[1]
