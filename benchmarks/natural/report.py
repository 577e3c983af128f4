"""What the natural-text models can do, class by class:
`python -m benchmarks.natural.report [--out FILE.json]`.

It gives the target's perplexity on unseen files, the share of its answers that repeat themselves,
the acceptance of the frozen draft, and that of a draft of the same size which was distilled from
all classes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.natural.models import ensure_natural
from benchmarks.natural.recipe import NATURAL
from benchmarks.natural.sampling import sampled_answers
from benchmarks.natural.text import PACKAGES, split
from benchmarks.natural.traffic import TEMPERATURE, requests
from benchmarks.natural.training import distil_draft, lessons, nats_per_token
from osd.common.progress import stages
from osd.tiny.models import TinyModels
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.training import Example, answer_logits, collate

SEED = 1000
"""Order of the prompts that are measured."""

K = 4
"""Draft tokens per step."""

LOOP_TOKENS, LOOP_TIMES = 4, 5
"""An answer runs in circles where some four tokens in a row occur more than five times."""

CEILING_LESSONS_PER_CLASS = 512
CEILING_STEPS = 700


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFigures:
    """One class of traffic. Acceptance is at the temperature the traffic is meant for."""

    perplexity: float
    """Per token, of the target, on the files that are served."""
    loops_greedy: float
    """Share of the answers at temperature 0 that run in circles."""
    loops_sampled: float
    frozen: tuple[float, float]
    """Conditional acceptance, and accepted over drafted tokens at k = `K`, of the draft that was
    built."""
    ceiling: tuple[float, float]
    """The same of a draft distilled from all classes."""


def measure(models: TinyModels, num_requests: int, progress: bool) -> dict[str, ClassFigures]:
    """Figures of every class, from `num_requests` served prompts each. Takes some minutes on two
    cores."""
    tokenizer: Any = AutoTokenizer.from_pretrained(models.target)
    target, frozen = _load(models.target), _load(models.draft)
    with stages(progress) as begin:
        begin("tiny models: lessons of all classes")
        everything = lessons(
            tokenizer, target, [*PACKAGES], CEILING_LESSONS_PER_CLASS * len(PACKAGES), seed=1
        )
        recipe = replace(NATURAL, draft_steps=CEILING_STEPS)
        advance = begin("tiny models: ceiling draft", CEILING_STEPS, "steps")
        ceiling, _ = distil_draft(tokenizer, target, everything, recipe, advance)
        advance = begin("tiny models: classes", len(PACKAGES), "classes")
        figures = {}
        for package in PACKAGES:
            prompts = [
                chat_prompt(tokenizer, r.prompt) for r in requests(package, num_requests, SEED)
            ]
            sampled = sampled_answers(target, prompts, TEMPERATURE, SEED)
            figures[package] = ClassFigures(
                perplexity=math.exp(
                    nats_per_token(target, tokenizer, split(package).serve, NATURAL.window_tokens),
                ),
                loops_greedy=share_of_loops(sampled_answers(target, prompts, 0.0, SEED)),
                loops_sampled=share_of_loops(sampled),
                frozen=acceptance(frozen, sampled),
                ceiling=acceptance(ceiling, sampled),
            )
            advance(1)
    return figures


def share_of_loops(answers: Sequence[Example]) -> float:
    """Share of the answers that run in circles."""
    return sum(is_loop(answer.answer_ids) for answer in answers) / len(answers)


def is_loop(ids: Sequence[int]) -> bool:
    """Whether some `LOOP_TOKENS` tokens in a row occur more than `LOOP_TIMES` times, overlaps
    included."""
    grams = Counter(zip(*(ids[i:] for i in range(LOOP_TOKENS)), strict=False))
    return max(grams.values(), default=0) > LOOP_TIMES


@torch.no_grad()
def acceptance(draft: Any, answers: Sequence[Example]) -> tuple[float, float]:
    """(accepted over tested, accepted over drafted tokens) had the draft proposed `K` tokens
    greedily at each step.

    A greedy draft token is accepted exactly when it is the token that was served. The first token
    of an answer comes from the prompt's step, without a draft.
    """
    accepted = tested = drafted = 0
    for i in range(0, len(answers), 32):
        batch = collate(answers[i : i + 32])
        is_hit = answer_logits(draft, batch).argmax(-1) == batch.labels
        for hits in is_hit.split([len(e.answer_ids) for e in answers[i : i + 32]]):
            counts = count_steps(hits[1:].tolist())
            accepted, tested, drafted = (
                accepted + counts[0],
                tested + counts[1],
                drafted + counts[2],
            )
    return accepted / tested, accepted / drafted


def count_steps(hits: list[bool]) -> tuple[int, int, int]:
    """(accepted, tested, drafted) tokens of one answer; `hits`: where the draft's argmax is the
    served token."""
    accepted = tested = drafted = at = 0
    while at < len(hits):
        window = hits[at : at + K]
        num_accepted = window.index(False) if False in window else len(window)
        accepted += num_accepted
        tested += min(num_accepted + 1, len(window))
        drafted += K
        at += num_accepted + 1
    return accepted, tested, drafted


def _load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.natural.report", description=__doc__
    )
    parser.add_argument("--out", type=Path, help="write the figures there too")
    parser.add_argument("--requests", type=int, default=100, help="prompts per class")
    arguments = parser.parse_args()
    figures = {
        name: asdict(f)
        for name, f in measure(ensure_natural(), arguments.requests, progress=True).items()
    }
    text = json.dumps(figures, indent=2)
    sys.stdout.write(f"{text}\n")
    if arguments.out:
        arguments.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
