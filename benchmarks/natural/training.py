"""Trains the natural target on the standard library's source, and distils drafts from its answers.

Legend as in `osd.tiny.training`: B sequences, T tokens per sequence, A predicted tokens of the
batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.natural.recipe import Recipe
from benchmarks.natural.sampling import sampled_answers
from benchmarks.natural.text import PACKAGES, SourceFile, split
from benchmarks.natural.traffic import TEMPERATURE, training_prompts
from osd.tiny.tokenizer import chat_prompt, train_tokenizer
from osd.tiny.training import (
    Batch,
    Example,
    Report,
    answer_logits,
    batches,
    collate,
    make_model,
    train,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RAW_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
"""What a user says is text to continue, with nothing around it."""

CHARS_PER_TOKEN = 3
"""Roughly, in source code; decides only how far apart training windows begin."""

_MAX_CHARS_PER_TOKEN = 12
"""More text than this per token is never needed to fill a window."""


def natural_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A vocabulary of the training files of all classes."""
    tokenizer = train_tokenizer(
        (file.text for p in PACKAGES for file in split(p).train), vocab_size
    )
    tokenizer.chat_template = RAW_CHAT_TEMPLATE
    return tokenizer


def text_examples(
    tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile], window_tokens: int, rng: Random
) -> Iterator[Example]:
    """One pass over the files in windows that begin with a line, in random order; a file's end is
    the end token."""
    stride = window_tokens * CHARS_PER_TOKEN
    places = [
        (file.text, at)
        for file in files
        for at in range(rng.randrange(stride) - stride, len(file.text), stride)
    ]
    rng.shuffle(places)
    for text, near in places:
        start = text.find("\n", near) + 1 if near > 0 else 0
        piece = text[start : start + window_tokens * _MAX_CHARS_PER_TOKEN]
        ids = [*tokenizer.encode(piece, add_special_tokens=False), tokenizer.eos_token_id]
        yield Example([tokenizer.bos_token_id], ids[: window_tokens - 1])


def endless(
    tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile], window_tokens: int, seed: str
) -> Iterator[Example]:
    """Pass after pass over the files, each with windows of its own."""
    rng = Random(seed)
    while True:
        yield from text_examples(tokenizer, files, window_tokens, rng)


def train_natural_target(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe, report: Report
) -> tuple[LlamaForCausalLM, float]:
    """The target, which has read all classes in equal parts, and the mean of its last losses in
    nats per token."""
    model = make_model(recipe.target, tokenizer, seed=1)
    pools = {p: endless(tokenizer, split(p).train, recipe.window_tokens, p) for p in PACKAGES}
    mixed = (next(pools[p]) for p in cycle(PACKAGES))
    data = batches(mixed, recipe.target_batch, Random(0))

    def loss_of(batch: Batch) -> Tensor:
        return F.cross_entropy(answer_logits(model, batch), batch.labels)

    loss = train(model, data, loss_of, recipe.target_steps, recipe.target_learning_rate, report)
    return model, loss


def lessons(
    tokenizer: PreTrainedTokenizerFast,
    target: LlamaForCausalLM,
    packages: Sequence[str],
    n: int,
    seed: int,
) -> list[Example]:
    """`n` training prompts of the classes in equal parts, continued by the target. Prompt and
    answer are to learn."""
    each = math.ceil(n / len(packages))
    texts = [
        t
        for p in packages
        for t in training_prompts(split(p).train, each, Random(f"{p}/lessons/{seed}"))
    ]
    answers = sampled_answers(
        target, [chat_prompt(tokenizer, text) for text in texts], TEMPERATURE, seed
    )
    return [Example(a.prompt_ids[:1], a.prompt_ids[1:] + a.answer_ids) for a in answers]


def distil_draft(
    tokenizer: PreTrainedTokenizerFast,
    target: LlamaForCausalLM,
    examples: Sequence[Example],
    recipe: Recipe,
    report: Report,
) -> tuple[LlamaForCausalLM, float]:
    """A fresh draft that has learnt the target's distributions on `examples`, and its last KL in
    nats per token."""
    model = make_model(recipe.draft, tokenizer, seed=2)
    rng = Random(0)
    data = batches(_again_and_again(examples, rng), recipe.draft_batch, rng)

    def loss_of(batch: Batch) -> Tensor:
        with torch.no_grad():
            teacher = answer_logits(target, batch).log_softmax(-1)
        student = answer_logits(model, batch).log_softmax(-1)
        return F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    loss = train(model, data, loss_of, recipe.draft_steps, recipe.draft_learning_rate, report)
    return model, loss


def _again_and_again(examples: Sequence[Example], rng: Random) -> Iterator[Example]:
    while True:
        yield from rng.sample(examples, len(examples))


@torch.no_grad()
def nats_per_token(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[SourceFile],
    window_tokens: int,
) -> float:
    """Mean negative log-likelihood of the files' tokens, in windows of `window_tokens`."""
    total, count = 0.0, 0
    examples = list(text_examples(tokenizer, files, window_tokens, Random(0)))
    for i in range(0, len(examples), 32):
        batch = collate(examples[i : i + 32])
        total += F.cross_entropy(answer_logits(model, batch), batch.labels, reduction="sum").item()
        count += len(batch.labels)
    return total / count
