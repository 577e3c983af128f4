"""What `osd bench trees` measures, in this process: rows of plain numbers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.engines.models import copy_with_noise
from benchmarks.record import Row
from benchmarks.trees.success_rules import successes
from osd.tiny.models import ensure, ensure_cost_shaped
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.traffic import HOME, requests
from serving.trees import fitting
from serving.trees.engine import Answer, TreeEngine

SEED = 78_000


class Bench:
    """The tiny target, its drafts by name, and home traffic.

    noise: draft -> noise added to its weights (`benchmarks/engines/models.py`)
    """

    def __init__(self, directory: Path, noise: dict[str, float], num_requests: int) -> None:
        logging.disable_progress_bar()
        torch.set_num_threads(1)
        tiny = ensure()
        paths = [_noisy(tiny.draft, directory / name, by) for name, by in noise.items()]
        self.target, drafts = fitting.load(tiny.target, paths)
        self.drafts = dict(zip(noise, drafts, strict=True))
        tokenizer: Any = AutoTokenizer.from_pretrained(tiny.target)
        self.prompts = [
            chat_prompt(tokenizer, one.prompt) for one in requests(HOME, num_requests, SEED)
        ]
        self.eos = {int(tokenizer.eos_token_id)}

    def use_costly_target(self) -> None:
        """The same function at the cost of a far larger model."""
        self.target = fitting.load(ensure_cost_shaped())[0]

    def steps(self, draft: str, num_tokens: int, batch: int, **options: Any) -> Row:
        """Per request: tokens per step and accepted tokens per step."""
        engine = TreeEngine(self.target, [self.drafts[draft]], **options)
        found = self._answers(engine, num_tokens, batch)
        return {
            "tokens_per_step": [answer.tokens_per_step for answer in found],
            "accepted_per_step": [_accepted(answer) for answer in found],
        }

    def times(self, draft: str, widths: Sequence[int], batch: int, num_tokens: int) -> Row:
        """Median seconds of the steps in which all requests take part, at temperature 0; those of
        the target with verification."""
        drafts = [self.drafts[draft]] if widths else []
        engine = TreeEngine(self.target, drafts, widths or (1,))
        engine.generate(self.prompts[:batch], num_tokens)
        steps = [step for step in engine.steps if step.num_requests == batch]
        return {
            "draft_s": median(step.draft_s for step in steps),
            "target_s": median(step.target_s + step.verify_s for step in steps),
            "step_s": median(step.seconds for step in steps),
            "num_steps": len(steps),
        }

    def successes(
        self, draft: str, temperature: float, num_tokens: int, ks: Sequence[int]
    ) -> list[Row]:
        """Rows as of `success_rules.successes`, of the target's own answers."""
        engine = TreeEngine(self.target, temperature=temperature)
        answers = self._answers(engine, num_tokens, len(self.prompts))
        texts = [
            (prompt, answer.output_ids)
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        return successes(self.target, self.drafts[draft], texts, temperature, ks)

    def _answers(self, engine: TreeEngine, num_tokens: int, batch: int) -> list[Answer]:
        groups = [self.prompts[i : i + batch] for i in range(0, len(self.prompts), batch)]
        return [one for group in groups for one in engine.generate(group, num_tokens, self.eos)]


def _noisy(source: Path, directory: Path, noise: float) -> Path:
    if not noise:
        return source
    copy_with_noise(source, directory, noise)
    shutil.copyfile(source / "tokenizer.json", directory / "tokenizer.json")
    return directory


def _accepted(answer: Answer) -> float:
    return float(np.mean([step.num_accepted for step in answer.steps]))
