"""What the draft samples, which of it is trained on, and that it goes nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from buffers.memory import MemoryTraceBuffer
from osd.records import BY_STUDENT, DraftRelease, RoundOutcome, Trace
from tests.support.tiny_drafts import (
    TARGET_ID,
    VOCAB_SIZE,
    chain_traces,
    release_of,
    save_draft,
    tiny_llama,
)
from tests.support.tiny_rounds import GATE, alpha, buffer_with, config, same_weights
from trainer.batch import collate
from trainer.loop import Trainer
from trainer.sampling.student import MAX_TOKENS, StudentSampler, sample
from trainer.sampling.teacher import Teacher

PROMPT = [3, 17, 40, 9]
"""After it the sharp draft is undecided: its likeliest token has a probability below 0.5."""


@pytest.fixture(scope="module")
def student() -> LlamaForCausalLM:
    return tiny_llama(seed=5, scale=0.3)


def prompted(num: int, *, num_output: int = 1, **fields: Any) -> list[Trace]:
    """`num` requests with the same prompt."""
    return [
        replace(trace, prompt_ids=PROMPT, **fields)
        for trace in chain_traces(num, num_output=num_output)
    ]


def without_rows(trace: Trace) -> Trace:
    return trace.with_rows(trace.position < 0)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def probabilities(student: LlamaForCausalLM, temperature: float) -> np.ndarray:
    """[V] after the prompt."""
    with torch.no_grad():
        logits_V = student(torch.tensor([PROMPT])).logits[0, -1]
    return (logits_V / temperature).softmax(-1).numpy()


def distance(answers: list[np.ndarray], expected_V: np.ndarray) -> float:
    """Total variation between the first tokens and what was expected."""
    counts_V = np.bincount([int(a[0]) for a in answers], minlength=VOCAB_SIZE)
    return float(np.abs(counts_V / counts_V.sum() - expected_V).sum() / 2)


# The text


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_text_comes_from_the_drafts_distribution_at_the_temperature_of_the_request(
    student: LlamaForCausalLM, temperature: float
) -> None:
    num = 4000
    answers = sample(student, prompted(num, temperature=temperature), 64, (), rng())
    right = probabilities(student, temperature)
    by_chance = float(np.sqrt(2 * right * (1 - right) / (np.pi * num)).sum() / 2)
    assert distance(answers, right) < 2 * by_chance, "the mean of an exact sampler is by_chance"
    other = probabilities(student, 1.4 - temperature)
    assert distance(answers, other) > 5 * by_chance


def test_each_request_is_answered_at_its_own_temperature_top_p_and_top_k(
    student: LlamaForCausalLM,
) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0},
    ]
    traces = [replace(prompted(1)[0], **kinds[i % 4]) for i in range(800)]
    answers = sample(student, traces, 64, (), rng())
    seen = [{int(a[0]) for a in answers[kind::4]} for kind in range(4)]
    likeliest = np.argsort(-probabilities(student, 1.0)).tolist()
    assert seen[0] == seen[2] == {likeliest[0]}
    assert seen[1] == set(likeliest[:2])
    assert len(seen[3]) > 10


def test_prompts_of_several_lengths_are_continued_as_if_each_were_alone(
    student: LlamaForCausalLM,
) -> None:
    traces = [
        replace(without_rows(trace), prompt_ids=np.arange(1, 2 + 5 * i) % VOCAB_SIZE)
        for i, trace in enumerate(chain_traces(6, num_output=9))
    ]
    for trace, answer in zip(traces, sample(student, traces, 64, (), rng()), strict=True):
        tokens = trace.prompt_ids.tolist()
        for _ in range(9):
            with torch.no_grad():
                tokens.append(int(student(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answer.tolist() == tokens[-9:]


def test_an_answer_ends_where_the_targets_would_and_is_no_longer_than_the_served_one(
    student: LlamaForCausalLM,
) -> None:
    (whole,) = sample(student, prompted(1, num_output=20), 64, (), rng())
    assert len(whole) == 20
    end = int(whole[5])
    (ended,) = sample(student, prompted(1, num_output=20), 64, (end, 63), rng())
    assert ended.tolist() == whole[: whole.tolist().index(end) + 1].tolist()
    lengths = [
        len(a) for n in (3, 200) for a in sample(student, prompted(1, num_output=n), 256, (), rng())
    ]
    assert lengths == [3, MAX_TOKENS]


def test_the_draft_sees_the_end_of_a_prompt_that_is_too_long(student: LlamaForCausalLM) -> None:
    long = replace(
        without_rows(prompted(1, num_output=4)[0]), prompt_ids=np.arange(300) % VOCAB_SIZE
    )
    short = replace(long, prompt_ids=long.prompt_ids[-28:])
    seen = [sample(student, [trace], 32, (), rng())[0].tolist() for trace in (long, short)]
    assert seen[0] == seen[1]


def test_no_prompt_runs_out_of_a_draft_with_learnt_positions() -> None:
    """Those of a GPT-2 end with its context, whatever else is sampled beside a long prompt."""
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    student = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **shape)).eval()
    short, long = (without_rows(prompted(1, num_output=n)[0]) for n in (2, 20))
    short = replace(short, prompt_ids=np.arange(300) % VOCAB_SIZE)
    lengths = [len(answer) for answer in sample(student, [short, long], 32, (), rng())]
    assert lengths == [2, 20]


def test_a_draft_that_diverged_answers_something(student: LlamaForCausalLM) -> None:
    broken = tiny_llama(seed=5)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    (answer,) = sample(broken, prompted(1, num_output=4, temperature=1.0), 64, (), rng())
    assert len(answer) == 4, "the loss of the round tells, in the words it has for that"


# Which of it is trained on


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("target") / "target", seed=3, scale=0.3)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_a_mix_has_the_share_it_says_and_leaves_the_others_as_they_are(
    student: LlamaForCausalLM, target: Path, fraction: float
) -> None:
    sampler = StudentSampler(
        config(sampling="mixed", student_fraction=fraction), Teacher(target, top_k=8)
    )
    traces = chain_traces(40)
    mixed, cost = sampler.replace(student, traces, 64, rng())
    new = [i for i, (a, b) in enumerate(zip(mixed, traces, strict=True)) if a is not b]
    assert len(new) == cost.num_traces == round(40 * fraction)
    assert new != list(range(len(new))), "they are drawn"
    assert cost.sampling_cpu_s > 0 and cost.scoring_cpu_s > 0
    for i in new:
        assert (mixed[i].draft_version == BY_STUDENT).all()
        assert mixed[i].prompt_ids.tolist() == traces[i].prompt_ids.tolist()
        assert mixed[i].output_ids.tolist() != traces[i].output_ids.tolist()


def test_every_token_of_the_answer_carries_loss_and_none_of_the_prompt(
    student: LlamaForCausalLM, target: Path
) -> None:
    sampler = StudentSampler(config(sampling="student"), Teacher(target, top_k=8))
    traces, _ = sampler.replace(student, chain_traces(5, temperature=1.0), 64, rng())
    batch = collate(traces, 64, VOCAB_SIZE, packed=False)
    for index, trace in enumerate(traces):
        here_N = batch.trace_N == index
        assert batch.label_ids_N[here_N].tolist() == trace.output_ids.tolist()
        assert int(batch.row_s_N[here_N].min()) == len(trace.prompt_ids) - 1
    assert torch.allclose(batch.weight_N, torch.full((60,), 1 / 60)), "each counts alike"


def test_a_trace_without_a_prompt_stays_as_it_was_served(
    student: LlamaForCausalLM, target: Path
) -> None:
    sampler = StudentSampler(config(sampling="student"), Teacher(target, top_k=8))
    whole, bare = chain_traces(2)
    kept = bare.with_rows(bare.position > 4)
    bare = replace(kept, prompt_ids=[], position=kept.position - 4)
    mixed, cost = sampler.replace(student, [bare, whole], 64, rng())
    assert mixed[0] is bare and mixed[1] is not whole
    assert cost.num_traces == 1


# Rounds


def served(target: Path, num: int, *, start: int = 0, holdout: bool = False) -> list[Trace]:
    """Requests that the target answered itself: those held out greedily, the others at temperature
    1, where a draft that knows nothing writes text of all kinds."""
    teacher = Teacher(target, top_k=8)
    asked = chain_traces(num, start=start, holdout=holdout, temperature=0.0 if holdout else 1.0)
    answers = sample(teacher.model.hf, asked, 64, (), rng())
    texts = [replace(without_rows(a), output_ids=o) for a, o in zip(asked, answers, strict=True)]
    return teacher.label(texts)


class Round:
    """A round with its buffer."""

    def __init__(self, directory: Path, target: Path, sampling: str) -> None:
        self.buffer: MemoryTraceBuffer = buffer_with(
            *served(target, 64), *served(target, 12, start=500, holdout=True)
        )
        self.base: DraftRelease = release_of(save_draft(directory / "base"))
        self.trainer = Trainer(
            config(sampling=sampling),
            GATE,
            4,
            self.buffer,
            directory / "t",
            TARGET_ID,
            teacher=Teacher(target, top_k=8),
        )

    def run(self) -> RoundOutcome:
        return self.trainer.run_round(self.base)


@pytest.mark.parametrize("sampling, share", [("teacher", 0.0), ("mixed", 0.5), ("student", 1.0)])
def test_a_round_makes_a_better_draft_and_says_what_sampling_took(
    tmp_path: Path, target: Path, sampling: str, share: float
) -> None:
    round_ = Round(tmp_path, target, sampling)
    outcome = round_.run()
    assert outcome.discarded == ""
    assert outcome.num_steps == 40, "as many as without: student text takes the place of served"
    assert outcome.num_student_traces == share * 320
    cpu = (outcome.sampling_cpu_s, outcome.scoring_cpu_s)
    assert all(s > 0 for s in cpu) if share else cpu == (0.0, 0.0)
    assert outcome.eval is not None and outcome.eval.diff_low > 0.05


def test_what_was_sampled_is_neither_stored_nor_judged_on(tmp_path: Path, target: Path) -> None:
    round_ = Round(tmp_path, target, "student")
    judged_on = round_.buffer.holdout(100)
    outcome = round_.run()
    anchors = round_.buffer.anchors(range(512))
    stored, _ = round_.buffer.read({}, 10_000)
    assert len(anchors) == len(stored) == 64
    assert [t.trace_id for t in round_.buffer.holdout(100)] == [t.trace_id for t in judged_on]
    for trace in (*anchors, *stored, *round_.buffer.holdout(100)):
        assert not (trace.draft_version == BY_STUDENT).any()
    assert outcome.eval is not None and outcome.eval.num_traces == 12
    assert outcome.eval.alpha_candidate == pytest.approx(alpha(outcome.path, judged_on))


def test_the_same_round_samples_the_same_text(tmp_path: Path, target: Path) -> None:
    found = [Round(tmp_path / name, target, "mixed").run() for name in ("a", "b")]
    assert same_weights(found[0].path, found[1].path)
