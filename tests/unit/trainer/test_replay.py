"""The mix that a round is trained on: its shares, its anchors, and what they prevent forgetting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import GPT2Config, GPT2LMHeadModel

from buffers.memory import MemoryTraceBuffer
from osd.errors import ReplayBufferError
from osd.records import DraftRelease, Trace
from tests.support.builders import ids
from tests.support.tiny_drafts import TARGET_ID, VOCAB_SIZE, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import Rounds, alpha, buffer_with, config, trainer_at
from trainer.replay import ANCHOR_ONE_IN, PART, RECENT_ROUNDS, ReplayMix, ReplayState


@pytest.fixture
def base(tmp_path: Path) -> DraftRelease:
    return release_of(save_draft(tmp_path / "base"))


class MarkedBuffer(MemoryTraceBuffer):
    """Says of each trace how it came out."""

    marked: Counter[str] = Counter()

    def sample(
        self, n: int, rng: np.random.Generator, cursor: dict[str, int], *, since: Any = None
    ) -> list[Trace]:
        found = super().sample(n, rng, cursor, since=since)
        self.marked["recent" if since is not None else "all"] += len(found)
        return found

    def anchors(self, slots: Sequence[int]) -> list[Trace]:
        found = super().anchors(slots)
        if len(slots) > 1:  # one alone is asked for to see whether it is there
            self.marked["anchors"] += len(found)
        return found


# The shares


@pytest.mark.parametrize(
    "fields, expected",
    [
        # 40 new traces, each with four replayed: 160, of which 20 anchors, and half of the 140
        # others recent.
        ({}, {"anchors": 20, "recent": 70, "all": 70}),
        ({"recent_fraction": 0.0}, {"anchors": 20, "all": 140}),
        ({"recent_fraction": 1.0}, {"anchors": 20, "recent": 140}),
        ({"num_anchors": 0}, {"recent": 80, "all": 80}),
        ({"replay_batches": 1}, {"anchors": 5, "recent": 18, "all": 17}),
        ({"replay_batches": 0}, {}),
    ],
)
def test_the_shares_of_a_round(fields: dict[str, Any], expected: dict[str, int]) -> None:
    buffer = MarkedBuffer(target_id="target-a")
    rounds = Rounds(buffer, **fields)
    rounds.round(*chain_traces(400))
    buffer.marked = Counter()
    fresh = chain_traces(40, start=400)
    pool = rounds.round(*fresh)
    assert {name: num for name, num in buffer.marked.items() if num} == expected
    assert len(pool) == 40 + sum(expected.values())
    counts = Counter(ids(pool))
    assert all(counts[trace.trace_id] >= 1 for trace in fresh), "every new trace is trained on"
    assert ids(pool)[:40] != ids(fresh), "in mixed order"


@pytest.mark.parametrize("num_fresh", [1, 7, 8, 23])
@pytest.mark.parametrize("replay_batches", [1, 3])
def test_each_new_trace_has_as_many_replayed_beside_it(num_fresh: int, replay_batches: int) -> None:
    rounds = Rounds(
        buffer_with(), replay_batches=replay_batches, num_anchors=16, recent_fraction=0.3
    )
    rounds.round(*chain_traces(100))
    assert len(rounds.round(*chain_traces(num_fresh, start=100))) == num_fresh * (
        1 + replay_batches
    )


@pytest.mark.parametrize(
    ("batches", "batch_size", "most"),
    [(0, 8, 64), (8, 8, 64), (9, 8, 56), (32, 8, 16), (32, 32, 17), (200, 8, 2), (5000, 8, 1)],
)
def test_the_more_is_replayed_the_fewer_new_traces_are_in_memory_at_once(
    batches: int, batch_size: int, most: int
) -> None:
    mix = ReplayMix(config(batch_size=batch_size, replay_batches=1), buffer_with())
    mix.begin_round(batches)
    assert mix.most_new == most
    mix.begin_round(1)
    assert mix.most_new == 64


def test_few_different_traces_come_as_often_as_needed() -> None:
    pool = Rounds(buffer_with(), num_anchors=0).round(*chain_traces(3))
    assert set(Counter(ids(pool)).values()) == {5}


def test_the_same_round_is_the_same_again() -> None:
    def pools(seed: int) -> list[list[str]]:
        rounds = Rounds(buffer_with(), seed=seed, num_anchors=16)
        return [ids(rounds.round(*chain_traces(20, start=20 * i))) for i in range(4)]

    assert pools(0) == pools(0) != pools(1)


@pytest.mark.parametrize("num_rounds", [4, 12])
def test_recent_means_the_last_eight_rounds(num_rounds: int) -> None:
    rounds = Rounds(buffer_with(), recent_fraction=1.0, num_anchors=0, replay_batches=40)
    for index in range(num_rounds):
        # A domain that comes later is recent from its first trace on.
        domain = "" if index < 3 else "late"
        pool = rounds.round(*chain_traces(6, start=100 * index, domain=domain))
    drawn = {int(trace.finished_at) // 100 for trace in pool}
    assert drawn == set(range(max(0, num_rounds - 1 - RECENT_ROUNDS), num_rounds))


@pytest.mark.parametrize("num_small, expected", [(50, 40), (12, 12)])
def test_a_small_domain_gets_an_equal_share(num_small: int, expected: int) -> None:
    rounds = Rounds(buffer_with(), recent_fraction=0.0, num_anchors=0)
    rounds.round(
        *chain_traces(num_small, domain="small"), *chain_traces(300, start=100, domain="large")
    )
    pool = rounds.round(*chain_traces(20, start=1000, domain="large"))
    # 80 replayed: half of them from the small one, or all it has.
    assert Counter(trace.domain for trace in pool) == {
        "small": expected,
        "large": 80 - expected + 20,
    }


# Anchors


class SlotsBuffer(MemoryTraceBuffer):
    """Notes which anchors it was asked for."""

    def __init__(self) -> None:
        super().__init__(target_id=TARGET_ID)
        self.asked: list[int] = []

    def anchors(self, slots: Sequence[int]) -> list[Trace]:
        self.asked += slots
        return super().anchors(slots)


@pytest.mark.parametrize("num_anchors, slots", [(256, {0, 3, 4, 7}), (2, {0, 3}), (0, set())])
def test_every_anchor_may_be_drawn_from_the_place_that_holds_it(
    num_anchors: int, slots: set[int]
) -> None:
    buffer = SlotsBuffer()
    state = ReplayState(num_offered=4, places=[0, 1, 0, 1])
    mix = ReplayMix(config(num_anchors=num_anchors, replay_batches=8), buffer)
    mix.pool(chain_traces(64), {}, state, np.random.default_rng(0))
    assert set(buffer.asked) == slots, "an anchor beyond the number configured now is left alone"
    assert len(buffer.asked) == (64 * 8 // ANCHOR_ONE_IN if num_anchors else 0)


def test_an_anchor_is_replaced_in_its_other_place_and_none_comes_twice() -> None:
    buffer = buffer_with()
    rounds = Rounds(buffer, num_anchors=3, replay_batches=0)
    traces = chain_traces(150)
    rounds.round(*traces[:3])
    assert (rounds.state.places, ids(buffer.anchors([0, 2, 4]))) == ([0, 0, 0], ids(traces[:3]))
    rounds.round(*traces[3:])
    assert rounds.state.places == [1, 1, 1], "of many replacements in a round the last counts"
    assert ids(buffer.anchors([0, 2, 4])) == ids(traces[:3]), (
        "a round that is repeated finds what it found"
    )
    assert len(set(ids(buffer.anchors([1, 3, 5]))) & set(ids(traces[3:]))) == 3
    assert rounds.state.num_offered == 150


def test_where_the_cursor_stood_before_each_of_the_last_rounds_is_remembered() -> None:
    rounds, stood = Rounds(buffer_with(), num_anchors=0, replay_batches=0), []
    for index in range(RECENT_ROUNDS + 3):
        stood.append(rounds.cursor)
        rounds.round(*chain_traces(2, start=2 * index))
        assert rounds.state.past == stood[-RECENT_ROUNDS:]


def test_anchors_are_taken_of_what_was_read_behind_what_was_skipped() -> None:
    buffer = buffer_with(*chain_traces(400))
    mix = ReplayMix(config(num_anchors=16), buffer)
    start = buffer.skip_to_newest({}, 8)
    fresh, end = buffer.read(start, 8)
    rng = np.random.default_rng(0)
    state = mix.remember(fresh, {}, ReplayState(), rng, read=(start, end))
    assert (state.num_offered, ids(buffer.anchors(range(0, 32, 2)))) == (8, ids(fresh))
    assert state.past == [{}], "what was skipped counts as recent"


class CountingBuffer(MemoryTraceBuffer):
    """Counts what is read of it."""

    num_read = 0

    def read(self, cursor: dict[str, int], limit: int) -> tuple[list[Trace], dict[str, int]]:
        found = super().read(cursor, limit)
        self.num_read += len(found[0])
        return found


@pytest.mark.parametrize("is_there, num_parts", [(True, 2), (False, 4)])
def test_whether_a_round_was_purged_is_not_looked_for_for_ever(
    is_there: bool, num_parts: int
) -> None:
    fresh, later = chain_traces(65, start=2000), chain_traces(400, start=3000)
    buffer = CountingBuffer(target_id=TARGET_ID)
    buffer.put([*fresh, *later] if is_there else later)
    mix = ReplayMix(config(num_anchors=16), buffer)
    state = mix.remember(fresh, {}, ReplayState(), np.random.default_rng(0))
    assert bool(state.places) is is_there
    assert buffer.num_read == 2 * num_parts * PART, "looked for before anchors are set, and after"


def test_traces_that_teach_nothing_between_the_others_are_no_purge() -> None:
    """Of many whose draft was right, a few at the end have rows."""
    mix = ReplayMix(config(num_anchors=16), buffer := buffer_with(*chain_traces(8)))
    _, before = buffer.read({}, 8)
    state = mix.remember(chain_traces(8), {}, ReplayState(), np.random.default_rng(0))
    fresh = chain_traces(2, start=500)
    silent = [trace.with_rows(np.zeros(trace.num_rows, bool)) for trace in chain_traces(300)]
    buffer.put([*silent, *fresh])
    _, end = buffer.read(before, 1000)
    rng = np.random.default_rng(0)
    state = mix.remember(fresh, before, state, rng, read=(before, end))
    assert (state.num_offered, len(state.places)) == (10, 10)


def test_anchors_are_a_uniform_sample_of_everything_there_ever_was() -> None:
    # 100 traces offered, 7 at a time; 10 are kept. Over many seeds each is kept equally often,
    # early or late.
    traces = chain_traces(100)
    kept: Counter[str] = Counter()
    for seed in range(400):
        rounds = Rounds(buffer_with(), seed=seed, num_anchors=10, replay_batches=0)
        for start in range(0, 100, 7):
            rounds.round(*traces[start : start + 7])
        found = ids(rounds.anchors())
        assert len(found) == len(set(found)) == 10
        kept.update(found)
    assert rounds.state.num_offered == 100
    # Anchors of one seed exclude one another, so the statistic is a little smaller than
    # chi-square's: no matter.
    p_value = chisquare([kept[trace.trace_id] for trace in traces]).pvalue
    assert p_value > 1e-3
    by_tenth = [sum(kept[t.trace_id] for t in traces[i : i + 10]) for i in range(0, 100, 10)]
    assert chisquare(by_tenth).pvalue > 1e-3


def test_anchors_outlive_the_buffer() -> None:
    rounds = Rounds(buffer_with(max_traces=20), num_anchors=64, recent_fraction=0.5)
    rounds.round(*chain_traces(20))
    pool: list[Trace] = []
    for index in range(1, 6):
        pool = rounds.round(*chain_traces(20, start=100 * index))
    old = [trace for trace in pool if trace.finished_at < 500]
    assert 0 < len(old) <= 10, (
        "the buffer holds the last 20 alone; one replayed trace in eight is an anchor"
    )


def test_a_purge_begins_the_anchors_anew() -> None:
    buffer = buffer_with()
    rounds = Rounds(buffer, num_anchors=16)
    for index in range(10):
        rounds.round(*chain_traces(40, start=40 * index))
    buffer.purge()
    fresh = chain_traces(40, start=1000)
    pool = rounds.round(*fresh)
    assert set(ids(pool)) == set(ids(fresh))
    assert len(pool) == 5 * 40, "what the anchors do not give comes from the buffer"
    assert len(rounds.anchors()) == 16 and set(ids(rounds.anchors())) <= set(ids(fresh))
    assert rounds.state.num_offered == 40


class PurgedBuffer(MemoryTraceBuffer):
    """Somebody purges it just before, or just after, anchors are set."""

    when = ""

    def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
        if self.when == "before":
            self.purge()
        super().set_anchors(anchors)
        if self.when == "after":
            self.purge()
        self.when = ""


@pytest.mark.parametrize("when", ["while it trains", "before", "after"])
@pytest.mark.parametrize("num_earlier", [0, 40])
def test_what_is_purged_during_a_round_does_not_come_back(when: str, num_earlier: int) -> None:
    buffer = PurgedBuffer(target_id=TARGET_ID)
    rounds = Rounds(buffer, num_anchors=16)
    if num_earlier:
        rounds.round(*chain_traces(num_earlier))
    assert bool(rounds.anchors()) == bool(num_earlier)
    buffer.put(chain_traces(40, start=500))
    fresh, after = buffer.read(rounds.cursor, 1000)
    if when == "while it trains":
        buffer.purge()
    buffer.when = when
    rng = np.random.default_rng(0)
    rounds.state = rounds.mix.remember(fresh, rounds.cursor, rounds.state, rng)
    rounds.cursor = after
    assert buffer.anchors(range(64)) == []
    assert (rounds.state.num_offered, rounds.state.places) == (0, [])
    later = chain_traces(40, start=1000)
    rounds.round(*later)
    assert set(ids(rounds.anchors())) <= set(ids(later)) and len(rounds.anchors()) == 16


@pytest.mark.parametrize("when", ["while it trains", "as anchors are set"])
def test_of_a_round_only_what_was_purged_does_not_come_back(when: str) -> None:
    """One label goes, the other stays, and with it the anchors of earlier rounds."""

    class Purged(MemoryTraceBuffer):
        is_due = when == "as anchors are set"

        def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
            super().set_anchors(anchors)
            if self.is_due and any(
                trace is not None and trace.domain == "sql" for trace in anchors.values()
            ):
                self.is_due = False
                self.purge(domain="sql")
                super().set_anchors(anchors)  # the purge came first, the anchors a moment later

    buffer = Purged(target_id=TARGET_ID)
    rounds = Rounds(buffer, num_anchors=64)
    rounds.round(*chain_traces(20))
    chat = [replace(trace, domain="chat") for trace in chain_traces(10, start=500)]
    sql = [replace(trace, domain="sql") for trace in chain_traces(10, start=600)]
    buffer.put([*chat, *sql])
    fresh, after = buffer.read(rounds.cursor, 1000)
    if when == "while it trains":
        buffer.purge(domain="sql")
    rounds.state = rounds.mix.remember(fresh, rounds.cursor, rounds.state, np.random.default_rng(0))
    assert {trace.domain for trace in buffer.anchors(range(128))} == {"", "chat"}
    assert len(buffer.anchors(range(128))) == 30


class RecordingBuffer(MemoryTraceBuffer):
    """Notes the order of its calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.replaced: list[set[str]] = []

    def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
        before = set(ids(list(self._anchors.values())))
        super().set_anchors(anchors)
        self.replaced.append(before - set(ids(list(self._anchors.values()))))


def test_new_anchors_do_not_overwrite_those_a_repeated_round_would_need() -> None:
    buffer = RecordingBuffer(target_id="target-a")
    rounds = Rounds(buffer, num_anchors=8)
    for index in range(6):
        needed = set(ids(rounds.anchors()))
        rounds.round(*chain_traces(8, start=100 * index))
        assert not buffer.replaced[-1] & needed
    assert any(buffer.replaced), "and yet they are replaced in the end"
    assert len(buffer._anchors) <= 2 * 8


class FullBuffer(MemoryTraceBuffer):
    """Takes no more anchors while it is full."""

    is_full = False

    def set_anchors(self, anchors: Mapping[int, Trace]) -> None:
        if self.is_full:
            super().set_anchors(dict(list(anchors.items())[:2]))
            raise ReplayBufferError("replay buffer: out of memory")
        super().set_anchors(anchors)


def test_a_full_server_costs_anchors_not_the_round(caplog: pytest.LogCaptureFixture) -> None:
    buffer = FullBuffer(target_id="target-a")
    rounds = Rounds(buffer, num_anchors=16)
    rounds.round(*chain_traces(20))
    before, state = ids(rounds.anchors()), rounds.state
    buffer.is_full = True
    pool = rounds.round(*chain_traces(20, start=100))
    assert len(pool) == 5 * 20
    assert "no new anchors are kept of this round: replay buffer: out of memory" in caplog.text
    assert ids(rounds.anchors()) == before, "those that it did take are not mixed in"
    assert (rounds.state.num_offered, len(rounds.state.past)) == (state.num_offered, 2)
    buffer.is_full = False
    rounds.round(*chain_traces(20, start=200))
    assert ids(rounds.anchors()) != before


def test_anchors_survive_a_restart_of_the_trainer(tmp_path: Path, base: DraftRelease) -> None:
    buffer = MarkedBuffer(target_id="target-a", max_traces=32)
    buffer.put(chain_traces(32, domain="a"))
    trainer_at(tmp_path / "t", buffer).run_round(base)
    buffer.put(chain_traces(32, start=100, domain="b"))
    buffer.marked = Counter()
    again = trainer_at(tmp_path / "t", buffer)
    again.run_round(base)
    assert buffer.marked["anchors"] == 32 * 4 // 8
    assert again._working.state.replay.num_offered == 64


# What is kept in mind


def first_language_after(
    directory: Path, base: DraftRelease, home: dict[str, Any], **options: Any
) -> float:
    """α on the first language after it was learnt, and then another one alone was spoken for a long
    time."""
    num_rounds = int(options.pop("num_rounds", 6))
    buffer = buffer_with(max_traces=int(options.pop("max_traces", 20_000)))
    trainer = trainer_at(directory, buffer, **options)
    known, rounds = 0.0, 0
    while known < 0.95 and rounds < 8:
        buffer.put(chain_traces(64, start=64 * rounds, **home))
        known = alpha(trainer.run_round(base).path, chain_traces(8, start=5000))
        rounds += 1
    assert known >= 0.95
    away: dict[str, Any] = {"step": 7, "prompt_ids": [1, 1, 1, 1]}
    for part in range(num_rounds):
        buffer.put(chain_traces(24, start=1000 + 24 * part, **away))
        candidate = trainer.run_round(base).path
    assert alpha(candidate, chain_traces(8, start=6000, **away)) > 0.9
    return alpha(candidate, chain_traces(8, start=5000))


def test_the_first_language_stays_while_only_another_is_spoken(
    tmp_path: Path, base: DraftRelease
) -> None:
    forgetful = first_language_after(tmp_path / "a", base, {}, replay_batches=0, num_anchors=0)
    assert first_language_after(tmp_path / "b", base, {}) > max(0.8, forgetful + 0.3)


def test_anchors_keep_what_the_buffer_has_let_go_of(tmp_path: Path, base: DraftRelease) -> None:
    # After two rounds of the other language, the first has left the buffer.
    options = {"max_traces": 48, "num_rounds": 5}
    without = first_language_after(tmp_path / "a", base, {}, num_anchors=0, **options)
    with_anchors = first_language_after(tmp_path / "b", base, {}, **options)
    assert with_anchors > without + 0.15


def test_a_labelled_first_language_is_kept_by_its_domain_alone(
    tmp_path: Path, base: DraftRelease
) -> None:
    # Even where the buffer is small: every domain has room of its own, and an equal share.
    options = {"max_traces": 48, "num_rounds": 6, "num_anchors": 0}
    labelled = first_language_after(tmp_path / "a", base, {"domain": "home"}, **options)
    unlabelled = first_language_after(tmp_path / "b", base, {}, **options)
    assert labelled > max(0.9, unlabelled + 0.25)


# Contexts


def test_a_request_that_is_longer_than_the_limit_is_learnt_from_its_end(
    tmp_path: Path, base: DraftRelease
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, 100) for _ in range(64)]
    traces = [
        chain_traces(1, start=i, prompt_ids=[*prompt, *chain_traces(1, start=i)[0].prompt_ids])[0]
        for i, prompt in enumerate(prompts)
    ]
    traces = [
        chain_traces(1, start=i, prompt_ids=trace.prompt_ids, position=trace.position + 100)[0]
        for i, trace in enumerate(traces)
    ]
    outcome = trainer_at(tmp_path / "t", buffer_with(*traces), max_length=24).run_round(base)
    assert outcome.num_tokens == 64 * 5 * 12, "every row has enough context"
    assert outcome.loss_last < 1.5
    assert alpha(outcome.path, chain_traces(8, start=900)) > 0.5


def test_a_draft_that_sees_less_than_the_limit_trains_within_what_it_sees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "base")
    held_out = chain_traces(8, start=500, num_output=40, holdout=True)
    buffer = buffer_with(*chain_traces(64, num_output=40), *held_out)
    outcome = trainer_at(tmp_path / "t", buffer, max_length=1024).run_round(
        release_of(tmp_path / "base")
    )
    assert outcome.num_tokens == 64 * 5 * 16, "the last 16 positions of each"
    assert outcome.loss_last < outcome.loss_first / 2
    assert outcome.eval is not None and outcome.eval.alpha_candidate > outcome.eval.alpha_base + 0.3


def test_little_of_a_round_is_padding(tmp_path: Path, base: DraftRelease) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 0.7, 64), 4, 60).astype(int).tolist()
    traces = [chain_traces(1, start=i, num_output=length)[0] for i, length in enumerate(lengths)]
    outcome = trainer_at(tmp_path / "t", buffer_with(*traces)).run_round(base)
    assert 0 < outcome.padding < 0.15
    assert outcome.num_tokens > sum(lengths)
