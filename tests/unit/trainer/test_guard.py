"""A round that made the draft worse is noticed, undone exactly, and not repeated at its rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from osd.config.schema import GateConfig, TrainerConfig
from osd.records import DraftRelease, RoundOutcome, Trace
from tests.support.builders import ids, make_trace
from tests.support.tiny_drafts import (
    TARGET_ID,
    chain_trace,
    chain_traces,
    release_of,
    save_draft,
)
from tests.support.tiny_rounds import GATE, alpha, buffer_with, config, same_weights, trainer_at
from trainer.batch import TrainBatch, collate
from trainer.distiller import Distiller
from trainer.draft import load_draft
from trainer.guard import NUM_WATCHED, LossGuard, Watch, has_risen, start_of_change
from trainer.loop import Trainer
from trainer.replay import NewTraces
from trainer.working_draft import WorkingDraft

TOO_HIGH = 0.5
"""A learning rate at which the tiny draft stays finite, and forgets what it knew."""
HELD_OUT = chain_traces(16, start=500, holdout=True)


@pytest.fixture
def base(tmp_path: Path) -> DraftRelease:
    """A draft that knows the language already, so that there is something to lose."""
    blank = release_of(save_draft(tmp_path / "blank"))
    outcome = trainer_at(tmp_path / "school", buffer_with(*chain_traces(64), *HELD_OUT)).run_round(
        blank
    )
    return release_of(Path(outcome.path))


# What counts as a rise


BEFORE = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
EVERY = np.ones(6, bool)


@pytest.mark.parametrize(
    "change, is_risen",
    [
        ([0.5, 0.4, 0.6, 0.5, 0.5, 0.5], True),  # everywhere
        ([-0.5] * 6, False),
        ([0.0] * 6, False),
        ([0.069] * 6, False),  # everywhere, and no doubt about it, but less than 2 % of 3.5
        ([0.071] * 6, True),
        # The standard error is sqrt(6 * 5 / 5) / sqrt(6) = 1, and it takes 2 of them.
        ([1.99 + 5**0.5, 1.99 - 5**0.5] * 3, False),
        ([2.01 + 5**0.5, 2.01 - 5**0.5] * 3, True),
        ([3.0, -2.0, 1.0, -1.5, 2.0, -1.0], False),  # mean 0.25, standard error 0.82
        ([3.0, 2.0, 1.0, -0.5, 2.0, 1.0], True),  # mean 1.42, standard error 0.49
        ([np.nan, 0, 0, 0, 0, 0], True),
        ([np.inf, -9, -9, -9, -9, -9], True),
    ],
)
def test_a_rise_must_be_more_than_chance_and_more_than_a_trifle(
    change: list[float], is_risen: bool
) -> None:
    assert has_risen(BEFORE, BEFORE + np.array(change)) is is_risen
    assert has_risen(BEFORE, BEFORE + np.array(change), [EVERY]) is is_risen


@pytest.mark.parametrize(
    "change_of_current, of_current, is_risen",
    [
        ([0.0, 0.0], 3.0, True),
        ([0.4, -0.5], 3.0, True),  # by chance
        ([-0.4, -0.5], 3.0, False),
        ([-1.0, -1.0], 3.0, False),
        ([-1.0, -1.0], 1.9, True),  # nothing was new there
        ([-1.0], 3.0, True),  # one alone says too little
        ([], 3.0, True),
        ([-1.0, np.nan], 3.0, True),
    ],
)
def test_what_is_learnt_of_new_traffic_at_the_cost_of_the_old_is_no_harm(
    change_of_current: list[float], of_current: float, is_risen: bool
) -> None:
    change = np.array([1.2, 1.3, 1.2, 1.1, 1.2, 1.3] * 4 + change_of_current)
    is_current = np.arange(len(change)) >= 24
    before = np.where(is_current, of_current, 2.0)
    assert has_risen(before, before + change, [is_current]) is is_risen
    some = np.arange(len(change)) % 2 == 0
    assert has_risen(before, before + change, [some, is_current]) is is_risen, "any may be new"


def test_noise_alone_is_rarely_a_rise() -> None:
    rng = np.random.default_rng(0)
    before = rng.uniform(1, 3, NUM_WATCHED)
    false_alarms = sum(
        has_risen(before, before + rng.normal(0, 0.5, NUM_WATCHED)) for _ in range(2000)
    )
    # Two standard errors, one-sided: 2.3 %, and a little for 24 degrees of freedom.
    assert 0.01 < false_alarms / 2000 < 0.05


# What is watched


def test_the_newest_24_held_out_traces_with_rows_are_watched() -> None:
    traces = chain_traces(40, start=500, holdout=True)
    guard = LossGuard(config(), GATE, buffer_with(*traces, *chain_traces(30)))
    assert ids(guard.watched(64)) == ids(traces[-24:])


def test_a_gate_that_wants_more_is_given_more() -> None:
    traces = chain_traces(40, start=500, holdout=True)
    gate = GateConfig(min_holdout_traces=32)
    assert ids(LossGuard(config(), gate, buffer_with(*traces)).watched(64)) == ids(traces[-32:])


def test_too_few_are_not_watched_at_all() -> None:
    gate = GateConfig(min_holdout_traces=5)

    def watched(*traces: Trace) -> list[Trace]:
        return LossGuard(config(), gate, buffer_with(*traces)).watched(64)

    assert watched(*chain_traces(4, holdout=True)) == []
    assert len(watched(*chain_traces(5, holdout=True))) == 5
    # Token 64 is outside the vocabulary.
    bad = chain_traces(1, start=50, holdout=True, prompt_ids=[1, 2, 3, 64])
    assert watched(*chain_traces(4, holdout=True), *bad) == []
    no_rows = make_trace(index=60, holdout=True, num_rows=0, vocab_size=64)
    assert watched(*chain_traces(4, holdout=True), no_rows) == []


def test_those_are_current_that_came_with_the_rounds_own_traces(tmp_path: Path) -> None:
    guard = LossGuard(config(), GATE, buffer_with(*chain_traces(16, start=100, holdout=True)))
    distiller = Distiller(load_draft(save_draft(tmp_path / "draft")), config())
    new = NewTraces(chain_traces(3, start=113), {}, {})  # finished at 113 to 115
    watch = guard.begin(distiller, new)
    assert watch is not None and watch.is_own_R.tolist() == [False] * 13 + [True] * 3
    assert guard.begin(distiller, NewTraces([], {}, {})) is None, "nothing to learn"


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_loss_of_a_trace_does_not_depend_on_its_company(
    tmp_path: Path, batch_size: int
) -> None:
    guard = LossGuard(config(batch_size=batch_size), GATE, buffer_with())
    distiller = Distiller(load_draft(save_draft(tmp_path / "draft", scale=0.3)), config())
    traces = [*chain_traces(4), *chain_traces(4, start=4, step=7, num_output=5)]
    losses = guard.losses(distiller, guard.batches(distiller, traces))
    expected = []
    for trace in traces:
        # By hand: KL of (0.97, 0.02, rest 0.01) to softmax, weighted by 1 / keep_prob.
        tokens = torch.tensor([*trace.prompt_ids, *trace.output_ids])[None]
        q_SV = distiller.model.hf(tokens).logits[0].softmax(-1).detach().double().numpy()
        total = weight = 0.0
        for i, t in enumerate(trace.position):
            listed = q_SV[t - 1, trace.target_ids[i]]
            p = np.array([0.97, 0.02, 0.01])
            total += float((p * np.log(p / [*listed, 1 - listed.sum()])).sum()) / float(
                trace.keep_prob[i]
            )
            weight += 1 / float(trace.keep_prob[i])
        expected.append(total / weight)
    assert losses == pytest.approx(expected, rel=0.01)


class Weighs:
    """A distiller whose loss at each row is the token served there; a trace of one row."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def collate(self, traces: Sequence[Trace]) -> TrainBatch:
        self.batch_sizes.append(len(traces))
        return collate(traces, 64, 64)

    def losses(self, batch: TrainBatch) -> torch.Tensor:
        assert not torch.is_grad_enabled(), "what is only looked at needs no gradients"
        return batch.label_ids_N.float()


def measured(distiller: Weighs, traces: list[Trace], **fields: Any) -> np.ndarray:
    guard, weighs = LossGuard(config(**fields), GATE, buffer_with()), cast(Distiller, distiller)
    return guard.losses(weighs, guard.batches(weighs, traces))


def test_losses_are_means_by_the_weights_of_rows_in_batches_of_the_configured_size() -> None:
    def trace(index: int, keep_prob: Sequence[float]) -> Trace:
        rows = np.arange(len(keep_prob))
        return chain_trace(
            index, num_output=len(rows), keep_prob=keep_prob, output_ids=10 * (1 + rows)
        )

    distiller = Weighs()
    # Tokens 10, 20 and 30, with weights 1, 2 and 4.
    traces = [
        trace(0, [1.0, 0.5, 0.25]),
        trace(1, [1.0]),
        trace(2, [0.5, 1.0]),
        trace(3, [0.25, 0.25]),
    ]
    losses = measured(distiller, traces, batch_size=3)
    assert losses == pytest.approx([(10 + 40 + 120) / 7, 10, 40 / 3, 15])
    assert distiller.batch_sizes == [3, 1]


def test_a_trace_that_weighs_nothing_beside_another_ends_no_round() -> None:
    # No capture keeps so little; who else writes to the buffer may.
    heavy = chain_trace(0, keep_prob=np.full(12, 1.4e-45))
    losses = measured(Weighs(), [heavy, chain_trace(1)])
    assert losses == pytest.approx([heavy.output_ids.mean(), 0])


# What is done about it


def is_undone(outcome: RoundOutcome) -> bool:
    """Whether the outcome says so, with both losses."""
    before, after = outcome.holdout_loss_before, outcome.holdout_loss_after
    if not outcome.discarded:
        return False
    said = re.fullmatch(
        r"held-out loss rose from (\S+) to (\S+); the learning rate is halved", outcome.discarded
    )
    assert said is not None and before is not None and after is not None and before < after
    assert (float(said[1]), float(said[2])) == (
        pytest.approx(before, rel=0.01),
        pytest.approx(after, rel=0.01),
    )
    assert (outcome.path, outcome.eval) == ("", None)
    return True


METHODS = pytest.mark.parametrize("method", ["full", "lora"])


@METHODS
def test_a_first_round_that_harms_leaves_the_base(
    tmp_path: Path, base: DraftRelease, method: str
) -> None:
    buffer = buffer_with(*chain_traces(32), *HELD_OUT)
    trainer = trainer_at(tmp_path / "t", buffer, learning_rate=TOO_HIGH, method=method)
    outcome = trainer.run_round(base)
    assert is_undone(outcome)
    assert outcome.learning_rate == TOO_HIGH
    assert trainer.num_new_traces() == 0
    # The next rounds are those of a trainer which did nothing in the first, at half the rate.
    idle_buffer = buffer_with(*HELD_OUT)
    idle = trainer_at(
        tmp_path / "idle", idle_buffer, learning_rate=0.01, method=method, replay_batches=0
    )
    idle.run_round(base)
    calm = trainer_at(tmp_path / "t", buffer, learning_rate=0.02, method=method, replay_batches=0)
    for each in (buffer, idle_buffer):
        each.put(chain_traces(32, start=100))
    again, expected = calm.run_round(base), idle.run_round(base)
    assert (again.learning_rate, again.loss_first) == (0.01, expected.loss_first)
    assert same_weights(again.path, expected.path)


@METHODS
@pytest.mark.parametrize("restarted", [False, True])
def test_a_later_round_that_harms_leaves_the_weights_of_the_one_before(
    tmp_path: Path, base: DraftRelease, method: str, restarted: bool
) -> None:
    """Two trainers with a good first round; then one learns another language, and the other has
    nothing to do."""
    outcomes = []
    for name in ("harmed", "idle"):
        buffer = buffer_with(*chain_traces(32), *HELD_OUT)
        options: dict[str, Any] = {"method": method, "replay_batches": 0}
        trainer = trainer_at(tmp_path / name, buffer, **options)
        assert trainer.run_round(base).discarded == ""
        if name == "harmed":
            if restarted:
                trainer = trainer_at(tmp_path / name, buffer, **options)
            buffer.put(chain_traces(32, start=32, step=7))
            assert is_undone(trainer.run_round(base))
        else:
            assert trainer.run_round(base).discarded == "no traces"
            trainer = trainer_at(tmp_path / name, buffer, learning_rate=0.005, **options)
        buffer.put(chain_traces(32, start=100))
        outcomes.append(trainer.run_round(base))
    assert [outcome.learning_rate for outcome in outcomes] == [0.005, 0.005]
    assert outcomes[0].loss_first == outcomes[1].loss_first
    assert same_weights(outcomes[0].path, outcomes[1].path), "weights, moments and adapters"


@METHODS
def test_after_another_release_was_followed_it_is_that_one_which_is_left(
    tmp_path: Path, base: DraftRelease, method: str
) -> None:
    blank = release_of(tmp_path / "blank")
    school = trainer_at(
        tmp_path / "other school", buffer_with(*chain_traces(24, start=200), *HELD_OUT)
    )
    other = release_of(Path(school.run_round(blank).path), version=7)
    options: dict[str, Any] = {"method": method, "replay_batches": 0}
    buffer = buffer_with(*chain_traces(32), *HELD_OUT)
    trainer = trainer_at(tmp_path / "t", buffer, **options)
    assert trainer.run_round(base).discarded == ""
    buffer.put(chain_traces(32, start=32, step=7))
    assert is_undone(trainer.run_round(other))
    buffer.put(chain_traces(32, start=100))
    # As if nothing had ever happened before this, the third round.
    idle_buffer = buffer_with(*HELD_OUT)
    idle = trainer_at(tmp_path / "idle", idle_buffer, learning_rate=0.005, **options)
    assert [idle.run_round(other).discarded for _ in range(2)] == ["no traces"] * 2
    idle_buffer.put(chain_traces(32, start=100))
    assert same_weights(trainer.run_round(other).path, idle.run_round(other).path)


def test_the_rate_is_halved_by_each_harm_and_recovers_with_good_rounds(
    tmp_path: Path, base: DraftRelease
) -> None:
    buffer = buffer_with(*HELD_OUT)
    trainer = trainer_at(tmp_path, buffer, replay_batches=0)
    rates = []
    for index in range(2):
        buffer.put(chain_traces(32, start=100 * index, step=7))
        outcome = trainer.run_round(base)
        assert is_undone(outcome)
        rates.append(outcome.learning_rate)
    assert rates == pytest.approx([0.01, 0.005])
    assert trainer.run_round(base).discarded == "no traces", "neither good nor bad"
    trainer = trainer_at(tmp_path, buffer, replay_batches=0)  # it remembers
    rates = []
    for index in range(17):
        buffer.put(chain_traces(8, start=1000 + 8 * index))
        outcome = trainer.run_round(base)
        assert outcome.discarded == ""
        rates.append(outcome.learning_rate)
    # 0.0025 * 1.1^n; 1.1^15 = 4.18 is the first above 4.
    assert rates == pytest.approx([min(0.01, 0.0025 * 1.1**n) for n in range(17)])
    assert rates[14] < 0.01 and rates[15:] == [0.01, 0.01]


@METHODS
def test_a_round_that_learns_new_traffic_is_kept(
    tmp_path: Path, base: DraftRelease, method: str
) -> None:
    """Few held-out traces have come with it, and on all others the draft gets worse."""
    of_before = chain_traces(22, start=100, holdout=True)
    of_now = chain_traces(2, start=200, step=7, holdout=True)
    new = chain_traces(48, start=200, step=7)
    buffer = buffer_with(*of_before, *of_now, *new)
    options: dict[str, Any] = {"method": method, "replay_batches": 0}
    outcome = trainer_at(tmp_path / "t", buffer, **options).run_round(base)
    before, after = outcome.holdout_loss_before, outcome.holdout_loss_after
    assert before is not None and after is not None and after > before
    assert outcome.discarded == "" and outcome.eval is not None, "the gate judges it"
    late = chain_traces(48, start=1200, step=7)  # as if none had come with it
    buffer = buffer_with(*of_before, *of_now, *late)
    assert is_undone(trainer_at(tmp_path / "late", buffer, **options).run_round(base))
    for follows in (False, True):  # as some of the new ones judge it then
        gate = GATE.model_copy(update={"judge_since_change": follows})
        settings = config(method=method, replay_batches=1), gate
        trainer = Trainer(*settings, 4, buffer, tmp_path / f"judged {follows}", TARGET_ID)
        assert is_undone(trainer.run_round(base)) is not follows


@pytest.mark.parametrize(
    ("newest", "start"),
    [
        ([3.0, 2.5, 3.5], 21),
        ([0.3, 3.0, 2.5, 3.5, 2.8], 22),
        ([3.0, 2.5], None),  # too few
        ([0.3, 3.0, 0.3], None),  # some are as before
        ([0.3, 0.3, 0.3], None),
        ([0.1, 0.1, 0.1], None),
        ([0.36, 0.36, 0.36], None),  # alike by chance, and a little higher
        ([3.0, 2.5, np.inf], None),
        ([3.0, 2.5, np.nan], None),
        ([], None),
    ],
)
def test_a_change_of_traffic_is_told_by_the_loss(newest: list[float], start: int | None) -> None:
    loss = np.array([0.2, 0.4, 0.3] * 7 + newest)
    assert start_of_change(loss) == (len(loss) if start is None else start)
    assert start_of_change(loss[::-1]) == len(loss), "it became easier, or there is nothing"


def test_traffic_that_stays_hardly_ever_seems_to_change() -> None:
    rng = np.random.default_rng(0)
    kinds = (lambda: rng.normal(2, 0.4, 24), lambda: rng.lognormal(0.7, 0.5, 24))
    found = [start_of_change(draw()) < 24 for draw in kinds for _ in range(1000)]
    assert sum(found) <= 2
    seen = [
        start_of_change(np.concatenate([rng.normal(1, 0.4, 21), rng.normal(2.6, 0.4, 3)])) < 24
        for _ in range(500)
    ]
    assert 0.75 < sum(seen) / 500 < 0.9


class Rounds:
    """Rounds that each bring one held-out trace, of the given losses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.guard = LossGuard(config(), GATE, buffer_with())
        self.loss_of: dict[float, float] = {}
        self.traces: list[Trace] = []
        self.changed_at = 0.0
        monkeypatch.setattr(self.guard, "watched", lambda vocab: self.traces[-NUM_WATCHED:])
        monkeypatch.setattr(self.guard, "batches", lambda distiller, traces: traces)
        monkeypatch.setattr(self.guard, "losses", self._losses)

    def _losses(self, distiller: Any, traces: list[Trace]) -> np.ndarray:
        return np.array([self.loss_of[trace.finished_at] for trace in traces])

    def round(self, loss: float) -> Watch:
        (trace,) = chain_traces(1, start=len(self.traces), holdout=True)
        self.traces.append(trace)
        self.loss_of[trace.finished_at] = loss
        distiller: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=64))
        watch = self.guard.begin(distiller, NewTraces([trace], {}, {}), self.changed_at)
        assert watch is not None
        if watch.has_changed:
            self.changed_at = watch.changed_at
        return watch


def test_rounds_that_bring_one_held_out_trace_each_see_a_change_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = Rounds(monkeypatch)
    for loss in [0.2, 0.4, 0.3] * 7:
        assert not rounds.round(loss).has_changed
    first = len(rounds.traces)
    found = [rounds.round(loss) for loss in (3.0, 2.5, 3.5, 2.8)]
    assert [watch.has_changed for watch in found] == [False, False, True, False]
    assert rounds.changed_at == rounds.traces[first].finished_at
    assert [int(watch.is_since_R.sum()) for watch in found[2:]] == [3, 4]
    assert [int(watch.is_own_R.sum()) for watch in found] == [1] * 4


def test_each_change_is_seen_once_however_its_traces_slide_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rate that is halved on the new traffic stays so."""
    rounds, rng = Rounds(monkeypatch), np.random.default_rng(0)
    means = [0.3] * 30 + list(2.5 * 0.98 ** np.arange(10)) + [6.0] * 60
    seen = [rounds.round(float(rng.normal(mean, 0.1))).has_changed for mean in means]
    assert [index for index, has_changed in enumerate(seen) if has_changed] == [32, 42]


def test_a_clock_that_was_set_back_hides_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    rounds.changed_at = 1e12
    seen = [rounds.round(loss).has_changed for loss in [0.2, 0.4, 0.3] * 7 + [3.0, 2.5, 3.5]]
    assert seen == [False] * 23 + [True]


def test_a_round_is_kept_for_its_own_traces_or_for_those_since_a_change() -> None:
    """Three kinds of traffic in one window: the round learns the third at the cost of the second,
    or the second and third at the cost of the first."""
    rng = np.random.default_rng(0)
    before = np.repeat([0.3, 3.0, 3.6], 8) + rng.normal(0, 0.05, 24)
    is_since = np.arange(24) >= 8
    for first_own, changes in ((16, [1.0, 1.2, -0.8]), (23, [5.0, -0.6, -0.6])):
        after = before + np.repeat(changes, 8) + rng.normal(0, 0.02, 24)
        assert has_risen(before, after)
        assert not has_risen(before, after, [np.arange(24) >= first_own, is_since])


@METHODS
def test_small_rounds_that_learn_new_traffic_are_kept(
    tmp_path: Path, base: DraftRelease, method: str
) -> None:
    """The round brings one held-out trace, and two came before it since the change."""
    of_before = chain_traces(21, start=100, holdout=True)
    of_now = chain_traces(3, start=200, step=7, holdout=True)
    new = chain_traces(48, start=202, step=7)  # finished with the last of them, and later
    buffer = buffer_with(*of_before, *of_now, *new)
    options: dict[str, Any] = {"method": method, "replay_batches": 0}
    outcome = trainer_at(tmp_path, buffer, **options).run_round(base)
    before, after = outcome.holdout_loss_before, outcome.holdout_loss_after
    assert before is not None and after is not None and after > before
    assert outcome.discarded == "" and outcome.eval is not None, "the gate judges it"


def test_a_rate_that_was_halved_is_whole_again_on_other_traffic(
    tmp_path: Path, base: DraftRelease
) -> None:
    buffer = buffer_with(*chain_traces(12, start=100, holdout=True))
    buffer.put(chain_traces(16, start=100))
    trainer = trainer_at(tmp_path, buffer, replay_batches=0)
    for _ in range(2):
        trainer._working.adapt_rate(went_well=False)
    rates = []
    for start, step in ((200, 5), (300, 7)):
        buffer.put(chain_traces(16, start=start, step=step))
        buffer.put(chain_traces(3, start=start, step=step, holdout=True))
        rates.append(trainer.run_round(base).learning_rate)
    assert rates == pytest.approx([0.0025, 0.01])


def test_a_change_that_was_seen_restores_no_rate_again_not_even_after_a_restart(
    tmp_path: Path, base: DraftRelease
) -> None:
    buffer = buffer_with(*chain_traces(12, start=100, holdout=True))
    trainer = trainer_at(tmp_path, buffer, replay_batches=0)
    rates = []
    for start in (300, 340):
        buffer.put(chain_traces(16, start=start, step=7))
        buffer.put(chain_traces(3, start=start, step=7, holdout=True))
        trainer._working.adapt_rate(went_well=False)
        rates.append(trainer.run_round(base).learning_rate)
        known = trainer._working.state.changed_at
        trainer = trainer_at(tmp_path, buffer, replay_batches=0)
    assert rates[0] == pytest.approx(0.01) and rates[1] < 0.01
    assert known == trainer._working.state.changed_at == 300, "the checkpoint has it"


def test_a_rate_that_is_far_too_high_finds_its_way_down(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with(*HELD_OUT)
    trainer = trainer_at(tmp_path, buffer, learning_rate=TOO_HIGH)
    said: list[bool] = []
    while len(said) < 10 and (not said or said[-1]):
        buffer.put(chain_traces(16, start=16 * len(said)))
        outcome = trainer.run_round(base)
        said.append(is_undone(outcome))
    assert 2 <= len(said) < 10, "several harmful rounds, then a good one"
    assert outcome.learning_rate == TOO_HIGH / 2 ** (len(said) - 1)
    assert alpha(outcome.path, HELD_OUT) >= alpha(base.path, HELD_OUT) - 0.05


def test_without_held_out_traces_nothing_is_undone(tmp_path: Path, base: DraftRelease) -> None:
    outcome = trainer_at(tmp_path, buffer_with(*chain_traces(32, step=7))).run_round(base)
    assert outcome.discarded == ""
    assert (outcome.holdout_loss_before, outcome.holdout_loss_after) == (None, None)


def test_a_good_round_shows_both_losses(tmp_path: Path) -> None:
    blank = release_of(save_draft(tmp_path / "blank"))
    outcome = trainer_at(tmp_path / "t", buffer_with(*chain_traces(64), *HELD_OUT)).run_round(blank)
    # Before: nearly uniform over 64 tokens, ln 64 less the target's entropy of 0.16.
    assert outcome.holdout_loss_before == pytest.approx(4.0, abs=0.1)
    assert outcome.holdout_loss_after == pytest.approx(outcome.loss_last, abs=0.5)


def test_however_many_rounds_failed_it_learns_again(tmp_path: Path) -> None:
    """As in a night beside a draft that is damaged."""
    working = WorkingDraft(TrainerConfig(learning_rate=1.0), tmp_path, "default", "t")
    for _ in range(1000):
        working.adapt_rate(went_well=False)
    assert 0 < working.learning_rate < 0.01
    for _ in range(80):
        working.adapt_rate(went_well=True)
    assert working.learning_rate == 1.0
