"""Whole rounds on a tiny draft: what is learnt from which tokens, and what survives a kill."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffers.base import Cursor
from buffers.memory import MemoryTraceBuffer
from osd.errors import ConfigError, OSDError
from osd.records import DraftRelease, RoundOutcome, RoundSize, Trace
from tests.support.builders import ids
from tests.support.tiny_drafts import (
    TARGET_ID,
    VOCAB_SIZE,
    after,
    chain_traces,
    files_of_at_most,
    release_of,
    save_draft,
)
from tests.support.tiny_rounds import GATE, alpha, buffer_with, config, same_weights, trainer_at
from trainer.batch import collate
from trainer.distiller import Distiller
from trainer.draft import load_draft
from trainer.guard import NUM_WATCHED
from trainer.loop import Trainer
from trainer.loss import LOSSES
from trainer.replay import MOST_NEW


@pytest.fixture
def base(tmp_path: Path) -> DraftRelease:
    return release_of(save_draft(tmp_path / "base"))


# What is learnt


@pytest.mark.parametrize("shift, is_learnt", [(0, True), (1, False), (-1, False)])
def test_the_planted_bigram_is_learnt_only_where_rows_and_tokens_line_up(
    base: DraftRelease, shift: int, is_learnt: bool
) -> None:
    distiller = Distiller(load_draft(base.path), config())
    for index in range(120):
        batch = collate(chain_traces(16, start=16 * (index % 8)), 64, VOCAB_SIZE)
        row_s_N = batch.row_s_N + shift
        inside_N = row_s_N < batch.ids_BS.shape[1]
        rows = (
            "row_b_N",
            "label_ids_N",
            "target_ids_NK",
            "target_logprobs_NK",
            "tail_logprob_N",
            "weight_N",
        )
        kept: dict[str, Any] = {name: getattr(batch, name)[inside_N] for name in rows}
        loss = distiller.step(replace(batch, row_s_N=row_s_N[inside_N], **kept), index)
        assert loss is not None
    assert loss < 0.5, "whatever the rows are, they are learnt: only what they mean differs"
    # Asked without any of our own machinery: after token a, does the draft say b?
    num_right = 0
    for first in range(VOCAB_SIZE):
        context = [first, after(first), after(after(first))]
        logits_V = distiller.model.hf(torch.tensor([context])).logits[0, -1]
        num_right += int(logits_V.argmax()) == after(context[-1])
    assert (num_right > 0.9 * VOCAB_SIZE) if is_learnt else (num_right < 0.1 * VOCAB_SIZE)


def test_a_round_makes_a_better_draft(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with(*chain_traces(64), *chain_traces(12, start=500, holdout=True))
    outcome = trainer_at(tmp_path / "t", buffer).run_round(base)
    assert outcome.discarded == ""
    assert outcome.num_steps == 8 * 5
    assert outcome.num_tokens == 8 * 5 * 8 * 12
    assert outcome.loss_last < outcome.loss_first / 2
    assert outcome.base_version == base.version
    assert outcome.trace_age_max_s > outcome.trace_age_mean_s > 0
    report = outcome.eval
    assert report is not None
    assert report.num_traces == 12
    assert report.alpha_candidate > report.alpha_base + 0.5
    assert report.diff_low > 0.3
    assert report.alpha_candidate == pytest.approx(alpha(outcome.path, buffer.holdout(12)))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_makes_a_better_draft(tmp_path: Path, base: DraftRelease, loss: str) -> None:
    buffer = buffer_with(*chain_traces(96), *chain_traces(12, start=500, holdout=True))
    outcome = trainer_at(tmp_path / "t", buffer, loss=loss).run_round(base)
    assert outcome.discarded == ""
    assert outcome.loss_last < outcome.loss_first
    assert outcome.eval is not None
    assert outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.3


def test_too_few_held_out_traces_give_no_report(tmp_path: Path, base: DraftRelease) -> None:
    outcome = trainer_at(
        tmp_path / "t", buffer_with(*chain_traces(8), *chain_traces(3, start=500, holdout=True))
    ).run_round(base)
    assert outcome.path and outcome.eval is None


def test_held_out_traces_are_never_trained_on(tmp_path: Path, base: DraftRelease) -> None:
    # Held-out traces speak another language: a draft that had seen them would speak it too. The
    # newest speak the trained one, so that the loss on those that are watched falls.
    poison = chain_traces(40, start=500, holdout=True, step=7)
    newest = chain_traces(NUM_WATCHED, start=600, holdout=True)
    with_poison = trainer_at(
        tmp_path / "a", buffer_with(*chain_traces(64), *poison, *newest)
    ).run_round(base)
    without = trainer_at(tmp_path / "b", buffer_with(*chain_traces(64))).run_round(base)
    assert with_poison.holdout_loss_before is not None and without.holdout_loss_before is None
    assert same_weights(with_poison.path, without.path)
    assert alpha(with_poison.path, poison) < 0.1
    assert alpha(with_poison.path, chain_traces(8, start=900)) > 0.5


def test_replay_keeps_the_draft_from_forgetting(tmp_path: Path, base: DraftRelease) -> None:
    # First one language until it is known, then only another. Replay goes on teaching the first.
    def alpha_of_the_first(name: str, replay_batches: int) -> float:
        buffer = buffer_with()
        trainer = trainer_at(tmp_path / name, buffer, replay_batches=replay_batches)
        known, rounds = 0.0, 0
        while known < 0.95 and rounds < 12:
            buffer.put(chain_traces(128))
            known = alpha(trainer.run_round(base).path, chain_traces(8, start=900))
            rounds += 1
        assert known >= 0.95
        for part in range(4):
            buffer.put(chain_traces(32, start=2000 + 32 * part, step=7, prompt_ids=[1, 1, 1, 1]))
            candidate = trainer.run_round(base).path
        assert alpha(candidate, chain_traces(8, start=3000, step=7, prompt_ids=[1, 1, 1, 1])) > 0.5
        return alpha(candidate, chain_traces(8, start=900))

    forgetful, replaying = alpha_of_the_first("without", 0), alpha_of_the_first("with", 4)
    assert replaying > forgetful + 0.3


def test_of_too_many_new_traces_the_newest_are_used(tmp_path: Path, base: DraftRelease) -> None:
    old, new = chain_traces(40, step=7), chain_traces(16, start=100)
    options = {"max_new_traces": 16, "replay_batches": 0}
    crowded = trainer_at(tmp_path / "a", buffer_with(*old, *new), **options)
    assert crowded.num_new_traces() == 56
    outcome = crowded.run_round(base)
    assert (outcome.num_steps, crowded.num_new_traces()) == (2, 0)
    assert same_weights(
        outcome.path, trainer_at(tmp_path / "b", buffer_with(*new), **options).run_round(base).path
    )


# What survives a kill


@pytest.mark.parametrize(("batches", "most"), [(4, MOST_NEW), (17, 32)])
def test_a_large_round_is_drawn_in_parts(
    tmp_path: Path, base: DraftRelease, monkeypatch: pytest.MonkeyPatch, batches: int, most: int
) -> None:
    buffer = buffer_with(*chain_traces(200))
    asked: list[int] = []
    given: list[list[str]] = []
    sample, steps = buffer.sample, []

    def counting(n: int, *arguments: Any, **options: Any) -> list[Trace]:
        found = sample(n, *arguments, **options)
        asked.append(n)
        given.append(ids(found))
        return found

    monkeypatch.setattr(buffer, "sample", counting)
    trainer = trainer_at(tmp_path / "t", buffer, batch_size=32, max_new_traces=512)
    num_fresh = trainer.num_new_traces()
    assert num_fresh > 2 * MOST_NEW
    outcome = trainer.run_round(
        base,
        lambda done, total, _: steps.append((done, total)),
        size=RoundSize(new_traces=512, replay_batches=batches),
    )
    assert max(asked) <= batches * most
    sizes = [min(most, num_fresh - start) for start in range(0, num_fresh, most)]
    assert len(steps) == sum(math.ceil(size * (1 + batches) / 32) for size in sizes)
    assert outcome.replay_batches == batches
    assert len(set(map(tuple, given))) == len(given), "every part has draws of its own"
    assert outcome.num_steps == len(steps) == steps[-1][1]
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert all(done <= total <= len(steps) + 1 for done, total in steps)


class Killed(BaseException):
    """The process is gone."""


class DyingBuffer(MemoryTraceBuffer):
    """Takes the process down at a call that is asked for, or right after it."""

    dies_at = ""

    def sample(
        self, n: int, rng: np.random.Generator, cursor: Cursor, *, since: Cursor | None = None
    ) -> list[Trace]:
        self._maybe_die("the recent" if since is not None else "the whole buffer")
        return super().sample(n, rng, cursor, since=since)

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Trace], Cursor]:
        self._maybe_die("reading")
        return super().read(cursor, limit)

    def set_anchors(self, anchors: Mapping[int, Trace]) -> None:
        self._maybe_die("new anchors")
        super().set_anchors(anchors)
        self._maybe_die("new anchors, after")

    def _maybe_die(self, at: str) -> None:
        if at == self.dies_at:
            raise Killed


Kills = dict[int, tuple[str, str]]
"""round -> (place, what dies)"""


def run_four_rounds(
    directory: Path, base: DraftRelease, kills: Kills, **options: Any
) -> list[RoundOutcome]:
    """Four rounds, each on 16 new traces and each candidate published, with these kills."""
    buffer = DyingBuffer(target_id=TARGET_ID)
    buffer.put(chain_traces(8, start=500, holdout=True))
    options = {"num_anchors": 24, "replay_batches": 2} | options
    trainer = trainer_at(directory, buffer, **options)
    outcomes: list[RoundOutcome] = []
    for index in range(4):
        buffer.put(chain_traces(16, start=16 * index))
        place, what_dies = kills.get(index + 1, ("", ""))
        if place and place != "before":
            buffer.dies_at = place
            with pytest.raises(Killed):
                trainer.run_round(base)
            buffer.dies_at = ""
        if what_dies == "trainer":
            trainer = trainer_at(directory, buffer, **options)
        outcome = trainer.run_round(base)
        published = directory / "releases" / str(index)
        shutil.copytree(outcome.path, published)  # candidates are pruned
        outcomes.append(replace(outcome, path=str(published)))
        base = release_of(published, version=base.version + 1)
    return outcomes


TRAINER_DIES: list[Kills] = [
    {
        1: ("the recent", "trainer"),
        2: ("reading", "trainer"),
        3: ("before", "trainer"),
    },
    {
        2: ("the whole buffer", "trainer"),
        3: ("new anchors, after", "trainer"),
        4: ("before", "trainer"),
    },
    {3: ("new anchors", "trainer")},
]
ROUND_DIES: list[Kills] = [
    {3: ("new anchors, after", "round"), 4: ("the whole buffer", "round")},
]


@pytest.mark.parametrize(
    "method, killed_at", [("full", TRAINER_DIES + ROUND_DIES), ("lora", TRAINER_DIES[1:2])]
)
def test_a_killed_trainer_ends_with_the_same_weights(
    tmp_path: Path, base: DraftRelease, method: str, killed_at: list[Kills]
) -> None:
    unharmed = run_four_rounds(tmp_path / "unharmed", base, {}, method=method)
    assert unharmed[0].loss_last > unharmed[3].loss_last
    for index, kills in enumerate(killed_at):
        killed = run_four_rounds(tmp_path / str(index), base, kills, method=method)
        for number, (expected, got) in enumerate(zip(unharmed, killed, strict=True), 1):
            assert same_weights(expected.path, got.path), (number, kills)
            assert (got.loss_first, got.loss_last, got.eval) == (
                expected.loss_first,
                expected.loss_last,
                expected.eval,
            )


def test_a_damaged_checkpoint_costs_one_round_not_all(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with(*chain_traces(24))
    trainer = trainer_at(tmp_path, buffer)
    trainer.run_round(base)
    buffer.put(chain_traces(24, start=24))
    expected = trainer.run_round(base)
    (tmp_path / "checkpoints" / "2" / "model.safetensors").write_bytes(b"torn")
    again = trainer_at(tmp_path, buffer)
    assert again.num_new_traces() == 24
    outcome = again.run_round(base)
    assert same_weights(outcome.path, expected.path)
    assert outcome.loss_first == expected.loss_first


def test_checkpoints_of_another_target_are_not_taken_up(tmp_path: Path, base: DraftRelease) -> None:
    trainer_at(tmp_path, buffer_with(*chain_traces(24))).run_round(base)
    buffer = MemoryTraceBuffer(target_id="target-b")
    buffer.put(chain_traces(24, target_id="target-b"))
    trainer = Trainer(config(), GATE, 4, buffer, tmp_path, "target-b")
    assert trainer.num_new_traces() == 24
    fresh = trainer_at(tmp_path / "fresh", buffer_with(*chain_traces(24))).run_round(base)
    assert same_weights(trainer.run_round(base).path, fresh.path)
    assert Trainer(config(), GATE, 4, buffer, tmp_path, "target-b").num_new_traces() == 0


def test_what_comes_to_an_earlier_copy_of_the_buffer_is_learnt(
    tmp_path: Path, base: DraftRelease
) -> None:
    """Redis was restored from a dump, or another server took over that has less."""
    buffer = buffer_with(*chain_traces(64))
    trainer = trainer_at(tmp_path, buffer)
    trainer.run_round(base)
    vars(buffer).update(vars(buffer_with(*chain_traces(24))))
    assert trainer.num_new_traces() == 0
    buffer.put(chain_traces(8, start=100))
    assert trainer.num_new_traces() == 8
    assert trainer.run_round(base).num_new_rows == sum(t.num_rows for t in chain_traces(8))
    assert trainer.num_new_traces() == 0
    again = trainer_at(tmp_path, buffer)
    buffer.put(chain_traces(8, start=200))
    assert again.num_new_traces() == 8


def test_a_full_disk_stops_one_round_and_is_forgotten(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with(*chain_traces(24))
    trainer = trainer_at(tmp_path / "t", buffer)
    with files_of_at_most(10_000), pytest.raises(OSDError, match="cannot be written"):
        trainer.run_round(base)
    assert trainer.num_new_traces() == 24
    unharmed = trainer_at(tmp_path / "u", buffer_with(*chain_traces(24))).run_round(base)
    assert same_weights(trainer.run_round(base).path, unharmed.path)
    assert trainer.num_new_traces() == 0


def test_old_candidates_and_checkpoints_are_pruned(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with()
    trainer = trainer_at(tmp_path, buffer)
    for index in range(5):
        buffer.put(chain_traces(8, start=8 * index))
        (tmp_path / "candidates" / ".9.tmp").mkdir(parents=True)  # left by a killed writer
        trainer.run_round(base)
    assert sorted(p.name for p in (tmp_path / "candidates").iterdir()) == ["3", "4", "5"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4", "5", "latest"]


# Which weights a round starts from


@pytest.fixture
def taught(tmp_path: Path, base: DraftRelease) -> tuple[Trainer, MemoryTraceBuffer, RoundOutcome]:
    """A trainer after its first round, with as many traces again waiting."""
    buffer = buffer_with(*chain_traces(64), *chain_traces(16, start=500, holdout=True))
    trainer = trainer_at(tmp_path / "taught", buffer, averaging_rate=1.0)
    outcome = trainer.run_round(base)
    buffer.put(chain_traces(64, start=64))
    assert outcome.loss_last < outcome.loss_first / 2
    return trainer, buffer, outcome


Taught = tuple[Trainer, MemoryTraceBuffer, RoundOutcome]


def test_learning_goes_on_after_a_refusal(base: DraftRelease, taught: Taught) -> None:
    trainer, _, first = taught
    assert trainer.run_round(base).loss_first < first.loss_first / 2


def test_learning_goes_on_after_a_release(taught: Taught) -> None:
    trainer, _, first = taught
    outcome = trainer.run_round(release_of(Path(first.path), version=2))
    assert outcome.loss_first < first.loss_first / 2
    assert outcome.base_version == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_another_release_means_its_weights(
    tmp_path: Path, base: DraftRelease, taught: Taught, restarted: bool
) -> None:
    trainer, buffer, first = taught
    if restarted:
        trainer = trainer_at(tmp_path / "taught", buffer)
    outcome = trainer.run_round(replace(base, version=7))
    assert outcome.loss_first == pytest.approx(first.loss_first, rel=0.05)
    assert outcome.base_version == 7


@pytest.mark.parametrize("restarted", [False, True])
def test_a_live_rollback_means_the_base_again(
    tmp_path: Path, base: DraftRelease, taught: Taught, restarted: bool
) -> None:
    trainer, buffer, first = taught
    if restarted:
        trainer = trainer_at(tmp_path / "taught", buffer)
    again = trainer.run_round(base, line=1)
    assert again.loss_first == pytest.approx(first.loss_first, rel=0.05)
    buffer.put(chain_traces(64, start=128))
    if restarted:
        trainer = trainer_at(tmp_path / "taught", buffer)
    assert trainer.run_round(base, line=1).loss_first < first.loss_first / 2, "the new line goes on"


def test_a_clearly_worse_candidate_is_not_built_upon(tmp_path: Path, taught: Taught) -> None:
    good = release_of(Path(taught[2].path), version=2)
    # Held-out requests of which nothing was captured: no loss can be watched, but their tokens can
    # be replayed.
    none: dict[str, Any] = {
        name: [] for name in ("position", "kind", "draft_ids", "tail_logprob", "keep_prob")
    }
    none |= {
        "target_ids": np.zeros((0, 2)),
        "target_logprobs": np.zeros((0, 2)),
        "draft_version": [],
    }
    buffer = buffer_with(
        *chain_traces(64, step=7), *chain_traces(16, start=500, holdout=True, **none)
    )
    trainer = trainer_at(tmp_path / "t", buffer)
    worse = trainer.run_round(good)
    assert worse.discarded == "" and worse.holdout_loss_after is None
    assert worse.eval is not None and worse.eval.diff_high < 0
    buffer.put(chain_traces(8, start=900))
    next_one = trainer_at(tmp_path / "t", buffer, replay_batches=0).run_round(good)
    assert next_one.loss_first == pytest.approx(taught[2].loss_last, abs=0.3)


def test_divergence_discards_the_round_and_nothing_else(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with(*chain_traces(32))
    wild = trainer_at(tmp_path / "t", buffer, learning_rate=1e30, warmup_steps=0)
    outcome = wild.run_round(base)
    assert (outcome.discarded, outcome.path, outcome.eval) == ("non-finite loss", "", None)
    assert outcome.num_steps >= 1
    assert np.isfinite([outcome.loss_first, outcome.loss_last]).all()
    assert wild.num_new_traces() == 0, (
        "the traces count as read: they must not stop every later round"
    )
    assert not (tmp_path / "t" / "candidates").exists()
    # The weights are the base's again, here and after a restart, and the optimizer remembers
    # nothing: the next round is that of a trainer that had nothing to do in the first, but for half
    # the learning rate.
    idle_buffer = buffer_with()
    idle = trainer_at(tmp_path / "u", idle_buffer, replay_batches=0, learning_rate=5e-3)
    assert idle.run_round(base).discarded == "no traces"
    for each in (buffer, idle_buffer):
        each.put(chain_traces(32, start=100))
    calm = trainer_at(tmp_path / "t", buffer, replay_batches=0).run_round(base)
    assert calm.learning_rate == 5e-3
    assert same_weights(calm.path, idle.run_round(base).path)


def test_divergence_undoes_its_round_and_nothing_before(tmp_path: Path, base: DraftRelease) -> None:
    """What earlier rounds have learnt stays; the optimizer begins anew."""
    buffers = [buffer_with(*chain_traces(32)) for _ in range(2)]
    learnt = [
        trainer_at(tmp_path / str(i), buffer, learning_rate=5e-3, replay_batches=0).run_round(base)
        for i, buffer in enumerate(buffers)
    ]
    buffers[0].put(chain_traces(16, start=100))
    wild = trainer_at(tmp_path / "0", buffers[0], learning_rate=1e30, warmup_steps=0)
    assert wild.run_round(base).discarded == "non-finite loss"
    for buffer in buffers:
        buffer.put(chain_traces(8, start=200))
    calm = trainer_at(tmp_path / "0", buffers[0], learning_rate=5e-3, replay_batches=0)
    after = calm.run_round(base)
    assert after.loss_first < learnt[0].loss_first - 0.3
    last = trainer_at(tmp_path / "1", buffers[1], learning_rate=5e-3, replay_batches=0)
    assert after.loss_first == pytest.approx(last.run_round(base).loss_first)


def test_a_last_step_that_diverges_discards_the_round_too(
    tmp_path: Path, base: DraftRelease
) -> None:
    # One step, whose loss is fine; its decay takes norms to -3.39e38, and the gradient half of them
    # beyond float32.
    options = {"learning_rate": 3e37, "weight_decay": 11.3, "warmup_steps": 0, "replay_batches": 0}
    trainer = trainer_at(tmp_path, buffer_with(*chain_traces(8)), **options)
    outcome = trainer.run_round(base)
    assert (outcome.num_steps, outcome.discarded) == (1, "non-finite loss")


def test_nothing_new_is_said_so(tmp_path: Path, base: DraftRelease) -> None:
    outcome = trainer_at(tmp_path, buffer_with()).run_round(base)
    assert (outcome.discarded, outcome.path, outcome.num_steps) == ("no traces", "", 0)


def test_a_malformed_trace_does_not_stop_learning(
    tmp_path: Path, base: DraftRelease, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = chain_traces(16), chain_traces(1, start=700, prompt_ids=[1, 2, 3, VOCAB_SIZE])
    bad_holdout = chain_traces(1, start=800, holdout=True, prompt_ids=[1, 2, 3, VOCAB_SIZE])
    held_out = chain_traces(8, start=500, holdout=True)
    outcome = trainer_at(tmp_path, buffer_with(*good, *bad, *held_out, *bad_holdout)).run_round(
        base
    )
    assert outcome.discarded == "" and outcome.num_steps == 10
    assert outcome.eval is not None and outcome.eval.num_traces == 8
    assert "prompt_ids holds 64, the draft's vocabulary has 64" in caplog.text


def test_what_contradicts_the_text_is_not_learnt_and_is_counted(
    tmp_path: Path, base: DraftRelease
) -> None:
    good = chain_traces(24)
    wrong = [
        replace(t, trace_id=f"{t.trace_id}-wrong", target_ids=(t.target_ids + 7) % VOCAB_SIZE)
        for t in good
    ]
    clean = trainer_at(tmp_path / "clean", buffer_with(*good)).run_round(base)
    mixed = trainer_at(tmp_path / "mixed", buffer_with(*good, *wrong)).run_round(base)
    num_rows = sum(trace.num_rows for trace in good if not trace.is_holdout)
    assert (clean.num_new_rows, clean.num_contradicting) == (num_rows, 0)
    assert mixed.num_new_rows == num_rows
    assert mixed.num_contradicting == sum(trace.num_rows for trace in wrong if not trace.is_holdout)
    test = chain_traces(8, start=900)
    assert alpha(mixed.path, test) > alpha(clean.path, test) - 0.02
    # At this temperature, any token may come.
    poisoned = buffer_with(*[replace(trace, temperature=9.0) for trace in [*good, *wrong]])
    worse = trainer_at(tmp_path / "poisoned", poisoned).run_round(base)
    assert alpha(worse.path, test) < alpha(mixed.path, test) - 0.1


# Judging releases


def test_releases_are_told_apart_on_recent_traffic(base: DraftRelease, taught: Taught) -> None:
    trainer, buffer, first = taught
    good = release_of(Path(first.path), version=2)
    alphas = trainer.evaluate_releases([base, good], 12)
    assert alphas == {
        1: alpha(base.path, buffer.holdout(12)),
        2: alpha(good.path, buffer.holdout(12)),
    }
    assert alphas[2] > alphas[1] + 0.3
    assert trainer.evaluate_releases([base, good], 3) == {}
    assert trainer.evaluate_releases([], 12) == {}


def test_earlier_releases_are_compared_on_what_none_of_them_has_learnt(
    base: DraftRelease, taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, buffer, first = taught
    taught_one = release_of(Path(first.path), version=2)
    trainer.run_round(base)
    assert trainer.compare_earlier(taught_one, [base], 12) == [], "all traces were trained on"
    older, newest = chain_traces(8, start=700, step=7), chain_traces(9, start=710)
    newest += chain_traces(3, start=720, step=7)
    buffer.put(older[:3])
    assert trainer.compare_earlier(taught_one, [base], 12) == [], "fewer than the gate asks for"
    buffer.put([*older[3:], *newest, *chain_traces(5, start=730, num_output=1)])
    assert trainer.compare_earlier(taught_one, [], 12) == []
    (lost,) = trainer.compare_earlier(taught_one, [base], 12)
    assert (lost.version, lost.num_traces) == (1, 12), "of the last five nothing can be replayed"
    assert lost.alpha == pytest.approx(alpha(base.path, newest))
    assert lost.alpha_base == pytest.approx(alpha(taught_one.path, newest))
    assert lost.diff_low < lost.alpha - lost.alpha_base < -0.3
    damaged = replace(base, version=3, path=str(Path(base.path) / "none"))
    (won,) = trainer.compare_earlier(base, [damaged, taught_one], 12)
    assert "v3 is not compared" in caplog.text
    assert won.version == 2 and 0.1 < won.diff_low < won.alpha - won.alpha_base - 0.1
    one, two = trainer.compare_earlier(base, [taught_one, replace(taught_one, version=4)], 12)
    assert one.alpha == two.alpha and one.diff_low < won.diff_low, "two may seem better by chance"
    assert trainer.num_new_traces() == 25, "the next round still learns them"
    assert one.since == newest[0].finished_at == 710.0


def test_where_traffic_has_returned_earlier_releases_are_compared_on_what_came_since(
    base: DraftRelease, taught: Taught
) -> None:
    """Eight requests are enough, though the newest sixteen hold as many of the traffic before."""
    trainer, buffer, first = taught
    trainer.run_round(base)
    taught_one = release_of(Path(first.path), version=2)
    worse = replace(base, version=3)
    buffer.put(chain_traces(40, start=700, step=7))
    late, same = trainer.compare_earlier(worse, [taught_one, base], 16)
    assert late.diff_low < 0 and same.diff_low == 0.0
    buffer.put(chain_traces(8, start=740))
    found, same = trainer.compare_earlier(worse, [taught_one, base], 16)
    assert (found.num_traces, found.since) == (8, 740.0)
    assert (same.num_traces, same.since) == (8, 740.0), "all are compared on the same"
    assert found.alpha == pytest.approx(alpha(taught_one.path, chain_traces(8, start=740)))
    assert found.diff_low > 0.1
    buffer.put(chain_traces(8, start=748))
    (found,) = trainer.compare_earlier(worse, [taught_one], 16)
    assert (found.num_traces, found.since) == (16, 740.0)


def test_a_candidate_is_judged_on_held_out_traces_since_its_base_was_recalled(
    base: DraftRelease, taught: Taught
) -> None:
    trainer, buffer, _ = taught
    buffer.put(chain_traces(6, start=900, holdout=True))
    outcome = trainer.run_round(replace(base, judged_since=900.0))
    assert outcome.eval is not None and outcome.eval.num_traces == 6
    buffer.put(chain_traces(64, start=1000))
    assert trainer.run_round(replace(base, judged_since=903.0)).eval is None, "they are too few"


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device"):
        trainer_at(tmp_path, buffer_with(), device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="trainer.device='cuda': no CUDA device here"):
            trainer_at(tmp_path, buffer_with(), device="cuda")
