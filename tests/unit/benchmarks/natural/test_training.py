"""The recipe of the natural-text models, with sizes and steps that take seconds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.natural.build import build
from benchmarks.natural.recipe import Recipe
from benchmarks.natural.report import acceptance, count_steps, is_loop, share_of_loops
from benchmarks.natural.sampling import sampled_answers
from benchmarks.natural.text import HOME, split
from benchmarks.natural.traffic import MAX_TOKENS, requests
from benchmarks.natural.training import (
    distil_draft,
    lessons,
    nats_per_token,
    natural_tokenizer,
    text_examples,
    train_natural_target,
)
from osd.tiny.recipe import Shape
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.training import Example, make_model

SMALL = Recipe(
    vocab_size=512,
    window_tokens=48,
    target=Shape(hidden_size=64, intermediate_size=128, num_layers=1),
    target_steps=40,
    target_batch=8,
    draft=Shape(hidden_size=32, intermediate_size=64, num_layers=1),
    draft_answers=16,
    draft_steps=60,
    draft_batch=4,
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return natural_tokenizer(SMALL.vocab_size)


@pytest.fixture(scope="module")
def trained(tokenizer: Any) -> tuple[Any, float]:
    return train_natural_target(tokenizer, SMALL, lambda done: None)


def test_user_content_is_raw_text(tokenizer: Any) -> None:
    request = requests(HOME, 1, seed=3)[0]
    messages = [{"role": "user", "content": request.prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|>" + request.prompt
    assert tokenizer.decode(chat_prompt(tokenizer, request.prompt)[1:]) == request.prompt
    assert tokenizer.encode(request.prompt) == chat_prompt(tokenizer, request.prompt)


def test_training_windows_begin_with_lines_of_training_files(tokenizer: Any) -> None:
    files = split(HOME).train[:3]
    examples = list(text_examples(tokenizer, files, 48, Random(0)))
    assert len(examples) > 300
    ended = 0
    for example in examples:
        assert example.prompt_ids == [tokenizer.bos_token_id]
        assert len(example.answer_ids) <= 47
        is_end = example.answer_ids[-1] == tokenizer.eos_token_id
        ended += is_end
        text = tokenizer.decode(example.answer_ids[:-1] if is_end else example.answer_ids)
        assert any(f"\n{text}" in f"\n{file.text}" for file in files)
    assert ended <= 2 * len(files)


def test_target_learns_files_it_never_saw(tokenizer: Any, trained: tuple[Any, float]) -> None:
    target, last_loss = trained
    files = split(HOME).serve[-2:]
    before = nats_per_token(
        make_model(SMALL.target, tokenizer, seed=1), tokenizer, files, SMALL.window_tokens
    )
    after = nats_per_token(target, tokenizer, files, SMALL.window_tokens)
    assert before == pytest.approx(math.log(SMALL.vocab_size), abs=0.4)
    assert after < before - 1
    assert last_loss < before - 1


def test_draft_learns_from_the_targets_answers(tokenizer: Any, trained: tuple[Any, float]) -> None:
    target, _ = trained
    examples = lessons(tokenizer, target, [HOME], SMALL.draft_answers, seed=0)
    assert len(examples) == SMALL.draft_answers
    learnt = "\0".join(file.text for file in split(HOME).train)
    for example in examples:
        assert example.prompt_ids == [tokenizer.bos_token_id]
        assert len(example.answer_ids) > MAX_TOKENS / 2
        first_line = tokenizer.decode(example.answer_ids).split("\n")[0]
        assert first_line in learnt
    _, first_loss = distil_draft(
        tokenizer, target, examples, replace(SMALL, draft_steps=1), lambda done: None
    )
    _, last_loss = distil_draft(tokenizer, target, examples, SMALL, lambda done: None)
    assert 0 < last_loss < 0.7 * first_loss


def test_acceptance_counts_what_was_served(tokenizer: Any, trained: tuple[Any, float]) -> None:
    """A model that drafts for itself is always right at temperature 0."""
    target, _ = trained
    prompts = [chat_prompt(tokenizer, r.prompt) for r in requests(HOME, 4, seed=5)]
    answers = sampled_answers(target, prompts, 0.0, seed=0)
    assert all(len(answer.answer_ids) == MAX_TOKENS for answer in answers)
    alpha, rate = acceptance(target, answers)
    assert alpha > 0.99
    # 19 steps of four draft tokens and one more: 95 tokens in all.
    assert 0.97 < rate <= 1
    halves = [Example(a.prompt_ids, [a.answer_ids[0] - 1, *[0] * 40]) for a in answers]
    assert acceptance(target, halves)[0] < 0.1


def test_steps_are_counted_as_the_engine_counts_them() -> None:
    hits = [True, False] + [True] * 4 + [True, False, True]
    # Drafted 4, accepted 1, tested 2; then 4 of 4; then the target's own token, 0 of 1 tested; then
    # 1 of 1.
    assert count_steps(hits) == (6, 8, 16)
    assert count_steps([]) == (0, 0, 0)
    assert count_steps([False] * 3) == (0, 3, 12)


def test_sampling_follows_its_seed_and_leaves_the_global_one(
    tokenizer: Any, trained: tuple[Any, float]
) -> None:
    target, _ = trained
    prompts = [chat_prompt(tokenizer, r.prompt) for r in requests(HOME, 4, seed=5)]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = sampled_answers(target, prompts, 0.7, seed=1)
    assert torch.rand(1) == expected
    assert sampled_answers(target, prompts, 0.7, seed=1) == first
    assert sampled_answers(target, prompts, 0.7, seed=2) != first


def test_both_models_are_written_with_their_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    few = Recipe(
        vocab_size=400,
        target=SMALL.target,
        draft=SMALL.draft,
        target_steps=2,
        draft_steps=2,
        draft_answers=2,
    )
    build(tmp_path, few, progress=False)
    sizes = {}
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / role)
        sizes[role] = model.num_parameters()
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / role)) == 400
    assert sizes["draft"] < sizes["target"]
    assert (tmp_path / "target/tokenizer.json").read_bytes() == (
        tmp_path / "draft/tokenizer.json"
    ).read_bytes()


def test_answers_that_run_in_circles_are_told_from_others() -> None:
    circle, straight = [9, 1, 2, 3] * 6, [*range(96)]
    assert is_loop(circle)
    assert not is_loop([9, 1, 2, 3] * 5)
    assert not is_loop(straight)
    assert is_loop([7] * 9) and not is_loop([7] * 8)
    assert not is_loop([])
    answers = [Example([0], ids) for ids in (circle, straight, straight, straight)]
    assert share_of_loops(answers) == 0.25
