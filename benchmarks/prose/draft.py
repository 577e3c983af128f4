"""Distils drafts from the prose target's own answers.

Legend as in `osd.tiny.training`: A predicted tokens of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.natural.sampling import sampled_answers
from benchmarks.natural.text import SourceFile
from benchmarks.prose.corpus import HOME, LANGUAGES
from benchmarks.prose.recipe import DraftRecipe
from benchmarks.prose.target import has_bfloat16
from benchmarks.prose.traffic import TEMPERATURE, pieces
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.training import Batch, Example, Report, answer_logits, batches, make_model, train

GROUP = 128
"""Answers made at a time."""


def load(target: Path) -> tuple[Any, Any]:
    """(model, tokenizer)"""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(target)


def lessons_by_domain(recipe: DraftRecipe) -> dict[str, int]:
    """Domain -> answers to learn from."""
    others = [language for language in LANGUAGES if language != HOME]
    each = round(recipe.answers * recipe.foreign / len(others))
    foreign = {language: each for language in others if each}
    return {HOME: recipe.answers - sum(foreign.values()), **foreign}


def lesson_prompts(files: Sequence[SourceFile], num: int, domain: str, seed: int) -> list[str]:
    """`num` beginnings out of training pages; again from the first where there are fewer."""
    found = [piece for file in files for piece in pieces(file.text)]
    Random(f"{domain}/lessons/{seed}").shuffle(found)
    return [found[i % len(found)] for i in range(num)]


def answered(
    target: Any, tokenizer: Any, prompts: Sequence[str], seed: int, report: Report
) -> list[Example]:
    """Prompts with the target's answers; all of it is to learn."""
    found = []
    for start in range(0, len(prompts), GROUP):
        some = [chat_prompt(tokenizer, prompt) for prompt in prompts[start : start + GROUP]]
        for one in sampled_answers(target, some, TEMPERATURE, 1000 * seed + start, GROUP):
            found.append(Example(one.prompt_ids[:1], one.prompt_ids[1:] + one.answer_ids))
        report(len(some))
    return found


def distil(
    target: Any, tokenizer: Any, lessons: Sequence[Example], recipe: DraftRecipe, report: Report
) -> LlamaForCausalLM:
    """A fresh draft that has learnt the target's distributions on the lessons."""
    model = make_model(recipe.shape, tokenizer, seed=200 + recipe.seed)
    rng = Random(recipe.seed)
    data = batches(_again_and_again(lessons, rng), recipe.batch, rng)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            with torch.no_grad():
                teacher_AV = answer_logits(target, batch)
            student_AV = answer_logits(model, batch)
        student_AV, teacher_AV = (one.float().log_softmax(-1) for one in (student_AV, teacher_AV))
        return F.kl_div(student_AV, teacher_AV, log_target=True, reduction="batchmean")

    train(model, data, loss_of, recipe.steps, recipe.learning_rate, report)
    return model


def _again_and_again(examples: Sequence[Example], rng: Random) -> Iterator[Example]:
    while True:
        yield from rng.sample(examples, len(examples))
