"""New traces that judge a round where the traffic has just changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffers.memory import MemoryTraceBuffer
from osd.config.schema import GateConfig
from osd.records import DraftRelease, Trace
from tests.support.builders import ids
from tests.support.tiny_drafts import TARGET_ID, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import buffer_with, config, trainer_at
from trainer.evaluator import Evaluator
from trainer.loop import Trainer
from trainer.replay import NO_JUDGES, Judges

GATE = GateConfig(min_holdout_traces=8)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> DraftRelease:
    """A draft that has learnt one language."""
    directory = tmp_path_factory.mktemp("school")
    buffer = buffer_with(*chain_traces(96), *chain_traces(16, start=500, holdout=True))
    base = release_of(save_draft(directory / "base"))
    outcome = trainer_at(directory, buffer).run_round(base)
    assert outcome.loss_last < outcome.loss_first / 2
    return release_of(Path(outcome.path), version=2)


OF_BEFORE = chain_traces(24, start=600, holdout=True)


def of_now(num: int, **fields: Any) -> list[Trace]:
    return chain_traces(num, start=1000, step=7, **fields)


def judges(
    serving: DraftRelease,
    new: list[Trace],
    *held_out: Trace,
    replay_batches: int = 4,
    **gate: Any,
) -> list[Trace]:
    buffer = buffer_with(*OF_BEFORE, *held_out)
    settings = config(replay_batches=replay_batches), GATE.model_copy(update=gate)
    found = Evaluator(*settings, 4, buffer).judges_among(serving, new)
    assert found.since == (1000.0 if found.traces else 0.0)
    return list(found.traces)


def test_where_the_traffic_has_just_changed_as_many_judge_as_the_gate_lacks(
    serving: DraftRelease,
) -> None:
    new = [*chain_traces(12, start=700), *of_now(20)]
    chosen = judges(serving, new)
    assert len(chosen) == 8 and all(trace in new[12:] for trace in chosen)
    held_out = of_now(3, holdout=True)
    assert len(judges(serving, new, *held_out)) == 5, "three judge anyway"


def test_who_judges_depends_on_ids_alone(serving: DraftRelease) -> None:
    """Which engines draw: nobody can send what judges."""
    new = of_now(32)
    late = [replace(t, finished_at=2031.0 - t.finished_at) for t in new]
    chosen = judges(serving, new)
    assert set(ids(chosen)) == set(ids(judges(serving, late)))
    assert ids(chosen) != ids(new[:8])


def test_answers_to_one_request_do_not_judge_each_other(serving: DraftRelease) -> None:
    new = of_now(32)
    pairs = [
        replace(trace, trace_id=f"{i % 2}_{new[i // 2].trace_id}") for i, trace in enumerate(new)
    ]
    assert judges(serving, pairs) == []
    assert len(judges(serving, [*pairs, *chain_traces(16, start=1100, step=7)])) == 8


@pytest.mark.parametrize(("least", "num"), [(2, 8), (8, 8), (20, 20)])
def test_as_many_as_the_change_is_seen_by_judge(
    serving: DraftRelease, least: int, num: int
) -> None:
    assert len(judges(serving, of_now(48), min_holdout_traces=least)) == num


def test_none_judges_where_it_is_not_needed_or_too_few_would_teach(serving: DraftRelease) -> None:
    assert judges(serving, chain_traces(32, start=700)) == [], "nothing has changed"
    assert judges(serving, of_now(15)) == [], "seven would teach"
    assert len(judges(serving, of_now(16))) == 8
    assert judges(serving, of_now(32), *of_now(8, holdout=True)) == [], "there are enough"
    assert judges(serving, of_now(32), judge_since_change=False) == []
    assert judges(serving, of_now(32), replay_batches=0) == [], "they would never be learnt"
    assert judges(serving, []) == []


def test_a_change_within_the_first_requests_of_a_service_is_seen(serving: DraftRelease) -> None:
    """None of before judges."""
    evaluator = Evaluator(config(), GATE, 4, buffer_with(*OF_BEFORE[:3], *of_now(2, holdout=True)))
    found = evaluator.judges_among(serving, [*chain_traces(12, start=700), *of_now(20)])
    assert found.since == 1000 and len(found.traces) == 6
    assert all(trace.finished_at >= 1000 for trace in found.traces)


def test_where_too_few_are_held_out_new_ones_judge_from_the_start(serving: DraftRelease) -> None:
    """Whether or not the traffic has changed."""

    def chosen(num_held_out: int, num_new: int, since: float = 0.0) -> Judges:
        buffer = buffer_with(*OF_BEFORE[:num_held_out])
        base = replace(serving, judged_since=since)
        new = chain_traces(num_new, start=700)
        return Evaluator(config(), GATE, 4, buffer).judges_among(base, new)

    assert len(chosen(0, 16).traces) == 8 and chosen(0, 16).since == 0
    assert len(chosen(3, 16).traces) == 5
    assert chosen(0, 15) == NO_JUDGES and chosen(8, 32) == NO_JUDGES
    after_a_recall = chosen(24, 32, since=710.0)
    assert len(after_a_recall.traces) == 8
    assert min(trace.finished_at for trace in after_a_recall.traces) >= 710


def round_of(
    directory: Path, serving: DraftRelease, buffer: MemoryTraceBuffer, **gate: Any
) -> tuple[Trainer, Any, list[str]]:
    """(trainer, outcome, ids of all that was trained on)."""
    gate_config = GATE.model_copy(update=gate)
    trainer = Trainer(config(), gate_config, 4, buffer, directory, TARGET_ID)
    trained, batches = list[str](), trainer._batches

    def noted(*given: Any) -> Any:
        for traces, num_steps in batches(*given):
            trained.extend(trace.trace_id for trace in traces)
            yield traces, num_steps

    trainer._batches = noted  # type: ignore[method-assign]
    return trainer, trainer.run_round(serving), trained


def test_they_teach_nothing_in_the_round_that_they_judge(
    tmp_path: Path, serving: DraftRelease
) -> None:
    new = of_now(32)
    buffer = buffer_with(*OF_BEFORE, *new)
    trainer, outcome, trained = round_of(tmp_path, serving, buffer)
    chosen = {trace.trace_id for trace in judges(serving, new)}
    assert len(chosen) == 8 and not chosen & set(trained)
    assert {trace.trace_id for trace in new} - chosen <= set(trained)
    assert outcome.discarded == ""
    report = outcome.eval
    assert (report.num_traces, report.num_before) == (8, len(OF_BEFORE))
    assert report.alpha_candidate > report.alpha_base + 0.1 and report.diff_low > 0
    # Later they may be replayed, as all that was read.
    buffer.put(chain_traces(32, start=1100, step=7))
    del trained[:]
    trainer.run_round(release_of(Path(outcome.path), version=3))
    assert chosen & set(trained)


def test_the_first_round_of_a_service_is_judged(tmp_path: Path, serving: DraftRelease) -> None:
    _, outcome, _ = round_of(tmp_path, serving, buffer_with(*of_now(32)))
    assert outcome.eval.num_traces == 8 and outcome.eval.diff_low > 0


def test_without_them_nobody_could_say_that_the_new_traffic_was_learnt(
    tmp_path: Path, serving: DraftRelease
) -> None:
    buffer = buffer_with(*OF_BEFORE, *of_now(32))
    _, outcome, trained = round_of(tmp_path, serving, buffer, judge_since_change=False)
    assert {trace.trace_id for trace in of_now(32)} <= set(trained)
    assert outcome.discarded or outcome.eval.diff_low <= 0
