"""What `osd bench trees` measures, in this process: rows of plain numbers.

Legend: S tokens, V vocabulary.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.models import copy_with_noise
from benchmarks.record import Row
from benchmarks.trees import MULTI_STEP, NAIVE
from osd.tiny.models import ensure, ensure_cost_shaped
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.traffic import HOME, requests
from serving.trees import fitting
from serving.trees.dice import Dice, RandomDice
from serving.trees.drafting import probabilities
from serving.trees.engine import Answer, TreeEngine
from serving.trees.expand import grow
from serving.trees.tree import Tree
from serving.trees.verify import multi_step

SEED = 78_000
DRAWS = 4
"""Trees drawn at each position, where what is accepted is not known by arithmetic."""


class Bench:
    """The tiny target, its drafts by name, and home traffic.

    noise: draft -> noise added to its weights (`benchmarks/models.py`)
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
        """How often the next token of the target is among k that the draft proposes: rows {"rule",
        "k", "success"}, with a mean over the positions of each request."""
        engine = TreeEngine(self.target, temperature=temperature)
        texts = self._answers(engine, num_tokens, len(self.prompts))
        found: dict[tuple[str, int], list[float]] = {}
        by_rule = rules(temperature)
        for prompt, answer in zip(self.prompts, texts, strict=True):
            pairs = list(self._distributions(prompt, answer, draft, temperature))
            for k in ks:
                for rule, success in by_rule.items():
                    mean = float(np.mean([success(p_V, q_V, k) for p_V, q_V in pairs]))
                    found.setdefault((rule, k), []).append(mean)
        return [{"rule": rule, "k": k, "success": means} for (rule, k), means in found.items()]

    def _answers(self, engine: TreeEngine, num_tokens: int, batch: int) -> list[Answer]:
        groups = [self.prompts[i : i + batch] for i in range(0, len(self.prompts), batch)]
        return [one for group in groups for one in engine.generate(group, num_tokens, self.eos)]

    @torch.no_grad()
    def _distributions(
        self, prompt: Sequence[int], answer: Answer, draft: str, temperature: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """p and q at each token of an answer."""
        ids = torch.tensor([[*prompt, *answer.output_ids]])
        models = (self.target, self.drafts[draft])
        logits = [model(ids).logits[0, len(prompt) - 1 : -1] for model in models]
        rows = [probabilities(one, temperature or 1.0) for one in logits]
        yield from zip(*rows, strict=True)


def _noisy(source: Path, directory: Path, noise: float) -> Path:
    if not noise:
        return source
    copy_with_noise(source, directory, noise)
    shutil.copyfile(source / "tokenizer.json", directory / "tokenizer.json")
    return directory


def _accepted(answer: Answer) -> float:
    return float(np.mean([step.num_accepted for step in answer.steps]))


Success = Callable[[np.ndarray, np.ndarray, int], float]
"""p, q and k -> the probability that one of k children of a node is accepted."""


def likeliest_among_top(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Greedy: whether the target's likeliest token is among the draft's k likeliest."""
    return float(p_V.argmax() in np.argsort(-q_V, kind="stable")[:k])


def mass_of_top(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Of the draft's k likeliest under the target: chosen children, and naive sampling of them."""
    return float(p_V[np.argsort(-q_V, kind="stable")[:k]].sum())


def multi_step_of_drawn(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Of k independent draws: each trial accepts sum min(p, q), and what is left of p after a
    rejection does not depend on which token was rejected."""
    rejected = 1.0
    for _ in range(k):
        accepted = float(np.minimum(p_V, q_V).sum())
        rejected *= 1.0 - accepted
        left_V = np.maximum(p_V - q_V, 0.0)
        if left_V.sum() <= 0:
            return 1.0
        p_V = left_V / left_V.sum()
    return 1.0 - rejected


def naive_of_drawn(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """The target's own draw is one of k independent draws."""
    return float(p_V @ (1.0 - (1.0 - q_V) ** k))


def multi_step_of_distinct(dice: Dice, p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Of k draws without replacement: the mean of `DRAWS` trees."""
    found = []
    for _ in range(DRAWS):
        tree = Tree(0)
        grow(tree, [0], [q_V], k, "distinct", dice)
        found.append(multi_step(tree, lambda node: p_V, dice).num_accepted > 0)
    return float(np.mean(found))


def rules(temperature: float) -> dict[str, Success]:
    """Those of greedy and of stochastic decoding."""
    if not temperature:
        return {"greedy": likeliest_among_top}
    return {
        MULTI_STEP: multi_step_of_drawn,
        "multi-step, distinct": partial(multi_step_of_distinct, RandomDice()),
        NAIVE: naive_of_drawn,
        "chosen": mass_of_top,
    }
