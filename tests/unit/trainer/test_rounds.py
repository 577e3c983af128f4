"""What a round draws, how far it moves the weights, and what it reports."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from buffers.base import Cursor
from buffers.memory import MemoryTraceBuffer
from osd.errors import ReleaseError
from osd.records import NO_TRACES, DraftRelease, RoundSize, Trace
from tests.support.builders import ids, make_minimal_trace, trace_id
from tests.support.tiny_drafts import TARGET_ID, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import GATE, Rounds, buffer_with, config, trainer_at, weights
from trainer.batch import RowBatch, TrainBatch
from trainer.checkpoint import Checkpoint, TrainerState
from trainer.loop import Trainer
from trainer.loss import Coarse
from trainer.replay import ReplayState

HELD_OUT = chain_traces(4, start=500, holdout=True)
AWAY: dict[str, Any] = {"start": 600, "holdout": True, "step": 9, "num_output": 40}
"""Held-out traces of a language that nobody teaches."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DraftRelease:
    return release_of(save_draft(tmp_path_factory.mktemp("base")))


# What is drawn


class NotingBuffer(MemoryTraceBuffer):
    """Notes which traces it gave for replay, and in which order they were asked for."""

    def __init__(self) -> None:
        super().__init__(target_id=TARGET_ID)
        self.given: list[list[str]] = []

    def sample(
        self, n: int, rng: np.random.Generator, cursor: Cursor, *, since: Cursor | None = None
    ) -> list[Trace]:
        found = super().sample(n, rng, cursor, since=since)
        self.given.append(ids(found))
        return found


def test_each_round_draws_anew_from_its_seed_and_number(tmp_path: Path, base: DraftRelease) -> None:
    options: dict[str, Any] = {"seed": 3, "num_anchors": 4, "replay_batches": 1}
    trained, drawn = NotingBuffer(), NotingBuffer()
    trainer, rounds = trainer_at(tmp_path, trained, **options), Rounds(drawn, **options)
    for index in range(2):
        fresh = chain_traces(16, start=16 * index)
        trained.put(fresh)
        trainer.run_round(base)
        rounds.round(*fresh)
        assert trained.given == drawn.given, "as the seed, the round's number and the use say"
        assert ids(trained.anchors(range(8))) == ids(drawn.anchors(range(8)))
    # Two rounds, each of the recent and of the whole buffer; no draw takes what another took.
    places = [tuple(int(name.split("-")[1]) % 16 for name in names) for names in trained.given]
    assert len(places) == len(set(places)) == 4


class BusyBuffer(MemoryTraceBuffer):
    """Gives a few traces at a time, as a server does whose entries are large; meanwhile others
    arrive."""

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Trace], Cursor]:
        self.put(chain_traces(1, start=100 + self.stats().num_traces))
        return super().read(cursor, min(limit, 3))


def test_a_round_reads_the_newest_there_were_and_leaves_the_next_what_arrives(
    tmp_path: Path, base: DraftRelease
) -> None:
    buffer = BusyBuffer(target_id=TARGET_ID)
    buffer.put(chain_traces(10))
    trainer = trainer_at(tmp_path, buffer, replay_batches=0, max_new_traces=8)
    outcome = trainer.run_round(base)
    assert (outcome.num_steps, outcome.num_tokens, outcome.num_new_rows) == (1, 8 * 12, 8 * 12)
    assert trainer.num_new_traces() == buffer.stats().num_traces - 10 > 0


# How far the weights move


def moved(before: str | Path, now: str | Path) -> torch.Tensor:
    """By how much each weight of the output layer is another."""
    name = "lm_head.weight"
    return (weights(now)[name] - weights(before)[name]).abs().flatten()


RATE = 0.02
SLOWLY: dict[str, Any] = {
    "replay_batches": 0,
    "warmup_steps": 4,
    "learning_rate": 4 * RATE,
    "averaging_rate": 1.0,
}
"""A round on a single trace is one step, at a quarter of the rate: AdamW without memory moves every
weight by as much, with memory by no more."""


def in_one_step(before: str | Path, now: str | Path, *, remembers: bool) -> bool:
    steps = moved(before, now)
    assert float(steps.max()) == pytest.approx(RATE, rel=0.02)
    return bool(steps.quantile(0.1) < RATE / 2) is remembers


def test_each_round_warms_up_and_remembers_those_before(tmp_path: Path, base: DraftRelease) -> None:
    # Neither better nor worse at held-out requests, of which no row can be watched: published or
    # refused, no matter.
    rowless = [
        trace.with_rows(np.zeros(trace.num_rows, bool)) for trace in chain_traces(16, **AWAY)
    ]
    buffer = buffer_with(*chain_traces(1), *rowless)
    trainer = trainer_at(tmp_path, buffer, **SLOWLY)
    first = trainer.run_round(base)
    assert first.eval is not None and first.eval.diff_low < 0 <= first.eval.diff_high
    published = release_of(Path(first.path), version=2)
    buffer.put(chain_traces(1, start=1))
    second = trainer.run_round(published)
    buffer.put(chain_traces(1, start=2))
    third = trainer.run_round(published)  # the second was refused
    assert in_one_step(base.path, first.path, remembers=False)
    assert in_one_step(first.path, second.path, remembers=True)
    assert in_one_step(second.path, third.path, remembers=True)


def test_a_candidate_of_a_line_that_was_left_is_a_release_like_others(
    tmp_path: Path, base: DraftRelease
) -> None:
    buffer = buffer_with(*chain_traces(1))
    trainer = trainer_at(tmp_path, buffer, **SLOWLY)
    first = trainer.run_round(base)
    assert trainer.run_round(replace(base, version=7)).discarded == NO_TRACES
    buffer.put(chain_traces(1, start=1))
    third = trainer.run_round(release_of(Path(first.path), version=8))
    assert in_one_step(first.path, third.path, remembers=False)


# What a round says of itself


def test_a_round_says_what_it_did(tmp_path: Path) -> None:
    base = release_of(save_draft(tmp_path / "base"), version=5)
    buffer = MemoryTraceBuffer(target_id="target-z", draft="math")
    now, named = time.time(), {"target_id": "target-z", "draft": "math"}
    for index, finished_at in enumerate((now - 300, now - 100, now + 1000)):
        buffer.put(
            chain_traces(
                1, start=index, num_output=12 - 3 * index, finished_at=finished_at, **named
            )
        )
    steps: list[tuple[int, int, float]] = []
    trainer = Trainer(
        config(batch_size=2, replay_batches=0, method="lora"),
        GATE,
        4,
        buffer,
        tmp_path / "t",
        "target-z",
        "math",
    )
    outcome = trainer.run_round(base, lambda *step: steps.append(step))
    late = time.time() - now
    assert (outcome.draft, outcome.target_id, outcome.kind) == ("math", "target-z", "lora")
    assert (outcome.base_version, outcome.path) == (5, str(tmp_path / "t" / "candidates" / "1"))
    assert [step[:2] for step in steps] == [(1, 2), (2, 2)] and outcome.num_steps == 2
    assert (outcome.loss_first, outcome.loss_last) == (steps[0][2], steps[1][2])
    assert outcome.num_tokens == outcome.num_new_rows == 12 + 9 + 6
    assert 300 <= outcome.trace_age_max_s <= 300 + late
    assert 400 / 3 <= outcome.trace_age_mean_s <= 400 / 3 + late, "one of the future has no age"
    assert 0 < outcome.seconds <= late
    assert (outcome.discarded, outcome.eval, outcome.learning_rate) == ("", None, 0.01)
    # Of another draft of the same target nothing is taken up, where it stood in its buffer neither.
    others = MemoryTraceBuffer(target_id="target-z")
    others.put(chain_traces(2, target_id="target-z"))
    trainer = Trainer(config(method="lora"), GATE, 4, others, tmp_path / "t", "target-z")
    assert trainer.num_new_traces() == 2


def test_a_round_without_traces_says_nothing_that_is_not_so(
    tmp_path: Path, base: DraftRelease
) -> None:
    trainer = trainer_at(tmp_path, buffer_with(*HELD_OUT, make_minimal_trace(trace_id(0))))
    assert trainer.num_new_traces() == 1
    outcome = trainer.run_round(base)
    assert (outcome.discarded, outcome.path, outcome.base_version) == (NO_TRACES, "", base.version)
    assert (outcome.num_steps, outcome.num_tokens) == (0, 0)
    assert (outcome.num_new_rows, outcome.num_contradicting) == (0, 0)
    assert (outcome.loss_first, outcome.loss_last, outcome.padding) == (0, 0, 0)
    assert (outcome.trace_age_mean_s, outcome.trace_age_max_s) == (0, 0)
    assert (outcome.holdout_loss_before, outcome.holdout_loss_after, outcome.eval) == (
        None,
        None,
        None,
    )
    assert trainer.num_new_traces() == 0, "a trace without rows counts as read"


def test_padding_is_the_share_of_all_that_was_computed(tmp_path: Path, base: DraftRelease) -> None:
    # 15, 15, 9 and 9 tokens: three lines of 18.
    buffer = buffer_with(*chain_traces(2), *chain_traces(2, start=2, num_output=6))
    assert trainer_at(tmp_path, buffer, replay_batches=0).run_round(base).padding == pytest.approx(
        6 / 54
    )


def test_progress_counts_what_parts_to_come_will_add(tmp_path: Path, base: DraftRelease) -> None:
    steps: list[tuple[int, int]] = []
    trainer = trainer_at(
        tmp_path, buffer_with(*chain_traces(96, num_output=2)), batch_size=32, replay_batches=1
    )
    trainer.run_round(base, lambda done, total, _: steps.append((done, total)))
    # Parts of 64 and 32 new traces, each with as many replayed: four steps and two.
    assert steps == [(done, 6) for done in range(1, 7)]


# Which weights, and which files


def test_a_base_that_cannot_be_loaded_costs_nothing(tmp_path: Path, base: DraftRelease) -> None:
    buffer = buffer_with(*chain_traces(8))
    trainer = trainer_at(tmp_path, buffer, replay_batches=0)
    with pytest.raises(ReleaseError):
        trainer.run_round(replace(base, path=str(tmp_path)))
    assert trainer.num_new_traces() == 8
    outcome = trainer.run_round(base)
    assert outcome.path.endswith("/1"), "the failed one was none"
    assert outcome.num_steps == 1


# What it takes of the machine, and what parts hand to one another


def test_a_trainer_takes_the_threads_it_is_given_and_shows_no_bars(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    enable_progress_bar()
    try:
        trainer_at(tmp_path, buffer_with(), num_threads=before + 1)
        assert torch.get_num_threads() == before + 1
        assert not is_progress_bar_enabled()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "kind", [RowBatch, TrainBatch, Coarse, ReplayState, TrainerState, Checkpoint]
)
def test_what_is_handed_on_stays_as_it_is(kind: type) -> None:
    value = kind.__new__(kind)
    for name in (fields(kind)[0].name, "misspelt"):
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(value, name, None)
    assert not hasattr(value, "__dict__"), "nor is anything put beside it"
    if kind is not Coarse:
        with pytest.raises(TypeError, match="positional"):
            kind(*[None] * len(fields(kind)))


@pytest.mark.parametrize(
    ("asked", "num_steps"),
    [
        (None, 2 + 2),
        (RoundSize(new_traces=16, replay_batches=3), 2 + 6),
        (RoundSize(new_traces=16, replay_batches=0), 2),
        (RoundSize(new_traces=8, replay_batches=2), 1 + 2),
    ],
)
def test_a_round_is_as_large_as_it_is_asked_to_be(
    tmp_path: Path, base: DraftRelease, asked: RoundSize | None, num_steps: int
) -> None:
    buffer = buffer_with(*chain_traces(16))
    trainer = trainer_at(tmp_path, buffer, replay_batches=1, batch_size=8)
    num_new = trainer.num_new_traces()
    outcome = trainer.run_round(base, size=asked)
    assert (num_new, outcome.num_steps, trainer.num_new_traces()) == (16, num_steps, 0)
    buffer.put(chain_traces(16))
    assert trainer.run_round(base).num_steps == 4, "what was asked for counts once"
