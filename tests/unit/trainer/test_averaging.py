"""Candidates are made of weights averaged over the rounds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from osd.records import DraftRelease, Trace
from tests.support.tiny_drafts import VOCAB_SIZE, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import alpha, buffer_with, same_weights, trainer_at, weights
from trainer.loop import Trainer


def sly(traces: list[Trace], rng: np.random.Generator) -> list[Trace]:
    """The served token stays the likeliest in every row, a random one is almost as likely."""
    poisoned = []
    for trace in traces:
        served_N = np.concatenate([trace.prompt_ids, trace.output_ids])[trace.position]
        random_N = (served_N + rng.integers(1, VOCAB_SIZE, len(served_N))) % VOCAB_SIZE
        logprobs_N2 = np.tile(np.log([0.53, 0.45]), (len(served_N), 1))
        poisoned.append(
            replace(
                trace,
                target_ids=np.stack([served_N, random_N], 1),
                target_logprobs=logprobs_N2,
                tail_logprob=np.full(len(served_N), np.log(0.02)),
            )
        )
    return poisoned


def rounds_of(trainer: Trainer, base: DraftRelease, num: int) -> DraftRelease:
    """The last of so many candidates, each published."""
    for _ in range(num):
        base = release_of(Path(trainer.run_round(base).path), version=base.version + 1)
    return base


def test_a_candidate_is_the_last_one_moved_towards_what_was_learnt(tmp_path: Path) -> None:
    base = release_of(save_draft(tmp_path / "base"))
    buffer = buffer_with(*chain_traces(32))
    plain = trainer_at(tmp_path / "plain", buffer, averaging_rate=1.0)
    averaged = trainer_at(tmp_path / "averaged", buffer, averaging_rate=0.25)
    before, expected = base, weights(base.path)
    for number in range(3):
        buffer.put(chain_traces(32, start=100 * (number + 1)))
        plain_one, before = rounds_of(plain, base, 1), rounds_of(averaged, before, 1)
        base = plain_one
        learnt, found = weights(plain_one.path), weights(before.path)
        for name, value in found.items():
            expected[name] = 0.75 * expected[name] + 0.25 * learnt[name]
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def test_the_average_survives_a_kill(tmp_path: Path) -> None:
    base = release_of(save_draft(tmp_path / "base"))

    def last(name: str, *, is_killed: bool) -> str:
        buffer = buffer_with()
        for number in range(3):
            buffer.put(chain_traces(16, start=100 * number))
            if is_killed or not number:
                trainer = trainer_at(tmp_path / name, buffer, averaging_rate=0.3)
            if is_killed:
                shutil.rmtree(tmp_path / name / "candidates", ignore_errors=True)
            path = trainer.run_round(base).path
        return path

    assert same_weights(last("whole", is_killed=False), last("killed", is_killed=True))


def test_an_average_of_earlier_settings_does_not_come_back(tmp_path: Path) -> None:
    base, buffer = release_of(save_draft(tmp_path / "base")), buffer_with()
    for number, rate in enumerate((0.25, 1.0, 0.25)):
        buffer.put(chain_traces(16, start=100 * number))
        trainer = trainer_at(tmp_path / "t", buffer, averaging_rate=rate)
        base = rounds_of(trainer, base, 1)
        if rate == 1:
            assert load_file(tmp_path / "t" / "checkpoints" / "2" / "average.safetensors") == {}
    learnt = weights(tmp_path / "t" / "checkpoints" / "3")
    for name, value in weights(base.path).items():  # an average begins anew, with this round's
        torch.testing.assert_close(value, learnt[name])


def test_another_base_begins_another_average(tmp_path: Path) -> None:
    base, buffer = release_of(save_draft(tmp_path / "base")), buffer_with(*chain_traces(64))
    trainer = trainer_at(tmp_path / "t", buffer, averaging_rate=0.01)
    rounds_of(trainer, base, 1)
    other = release_of(save_draft(tmp_path / "other", seed=9), version=7)
    buffer.put(chain_traces(8, start=200))
    found, begun = weights(trainer.run_round(other).path), weights(other.path)
    for name, value in found.items():
        torch.testing.assert_close(value, begun[name], atol=5e-3, rtol=0)


def test_poison_that_the_text_does_not_contradict_harms_less(tmp_path: Path) -> None:
    known = chain_traces(16, start=900)

    def alphas(rate: float) -> list[float]:
        """Of the candidates of seven poisoned rounds, after six that taught the language."""
        rng, buffer = np.random.default_rng(3), buffer_with()
        base = release_of(save_draft(tmp_path / f"base-{rate}"))
        trainer = trainer_at(
            tmp_path / f"{rate}",
            buffer,
            averaging_rate=rate,
            learning_rate=2e-2,
            replay_batches=0,
        )
        found = []
        for number in range(13):
            new = chain_traces(64 if number < 6 else 16, start=2000 + 64 * number)
            buffer.put(new if number < 6 else sly(new, rng))
            base = rounds_of(trainer, base, 1)
            found.append(alpha(base.path, known))
        assert found[5] > 0.97
        return found[6:]

    plain, averaged = alphas(1.0), alphas(0.3)
    assert min(plain) < 0.9
    assert min(averaged) > min(plain) + 0.1
