"""The engine: answers a batch of prompts, with a tree of its own for each request and step.

    propose (a tree per draft, merged) ─► read (one pass of the target) ─► verify ─► keep the path
        ▲                                                                              │
        └──────────────────────────────────────────────────────────────────────────────┘

Without drafts a tree is its node 0 alone, and a step brings one token: no speculation. Several
drafts propose the same shape, and their trees are merged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from serving.trees import expand, fitting
from serving.trees.dice import RandomDice
from serving.trees.drafting import Drafting, feed_prompts, probabilities
from serving.trees.passes import Passes
from serving.trees.reading import Reading, tree_attention
from serving.trees.tree import Tree, merge
from serving.trees.verify import RULES, Probs, Verified, greedy


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStep:
    """What a step brought one request.

    Example:
        RequestStep(num_drafted=6, num_accepted=2, num_tokens=3)
    """

    num_drafted: int
    num_accepted: int
    num_tokens: int
    """Of the answer; the last step's may end within what was accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a request produced."""

    output_ids: tuple[int, ...]
    steps: tuple[RequestStep, ...]

    @property
    def tokens_per_step(self) -> float:
        return len(self.output_ids) / len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStep:
    """What a step cost."""

    num_requests: int
    num_passes: int
    """Of the target."""
    num_nodes: int
    """That the target computed, node 0 of each request among them."""
    draft_s: float
    target_s: float
    verify_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.target_s + self.verify_s


class TreeEngine:
    """Speculative decoding with token trees.

    widths: of the trees (`expand.py`), the same for each draft
    children, rule: names in `expand.CHILDREN` and `verify.RULES`; at temperature 0 children are the
        likeliest, and verification is greedy
    reading: the target's passes (`reading.py`)

    Raises `ConfigError` for what does not fit together.
    """

    def __init__(
        self,
        target: Any,
        drafts: Sequence[Any] = (),
        widths: Sequence[int] = (1,),
        *,
        temperature: float = 0.0,
        children: str = "sampled",
        rule: str = "multi-step",
        reading: Reading = tree_attention,
        seed: int = 0,
    ) -> None:
        fitting.check_models(target, drafts)
        self._widths = expand.check(widths)
        self._models, self._target, self._reading = [target, *drafts], target, reading
        self._temperature, self._dice = temperature, RandomDice(seed)
        self._rule = RULES[rule] if temperature else greedy
        how = children if temperature else "top"
        self._drafts = [
            Drafting(draft, self._widths, how, temperature or 1.0, self._dice) for draft in drafts
        ]
        self.steps: list[BatchStep] = []
        """Of the newest batch."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: Collection[int] = ()
    ) -> list[Answer]:
        """Answer prompts together; each ends at a token of `eos` or after `max_new_tokens`. Raises
        `ConfigError` for a prompt that does not fit the context with its answer and a tree."""
        depth = len(self._widths) if self._drafts else 0
        fitting.check_context(self._models, prompts, max_new_tokens, depth)
        self._begin(prompts, max_new_tokens)
        outputs: list[list[int]] = [[] for _ in prompts]
        taken: list[list[RequestStep]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        while live:
            trees, verified = self._step()
            for request, tree, found in zip(live, trees, verified, strict=True):
                new = _until(new_tokens(tree, found), max_new_tokens - len(outputs[request]), eos)
                outputs[request] += new
                taken[request].append(_step_of(tree, found, new))
            live = self._go_on(live, outputs, max_new_tokens, eos)
        return [
            Answer(output_ids=tuple(ids), steps=tuple(steps))
            for ids, steps in zip(outputs, taken, strict=True)
        ]

    def _begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Read the prompts, with room for the longest context and what a step adds to it."""
        depth = len(self._widths) + 1
        context = max(map(len, prompts)) + max_new_tokens + depth
        drafted = len(self._drafts) * expand.num_drafted(self._widths)
        branches = 1 + len(self._drafts) * int(np.prod(self._widths))
        self._passes = Passes(
            self._target, len(prompts), context + 1 + max(drafted, branches * depth)
        )
        feed_prompts(self._passes, prompts)
        for draft in self._drafts:
            draft.begin(prompts, context + drafted)
        self._roots = [prompt[-1] for prompt in prompts]
        self.steps = []

    def _step(self) -> tuple[list[Tree], list[Verified]]:
        """One step of all requests in flight."""
        began = time.perf_counter()
        trees = self._propose()
        proposed = time.perf_counter()
        passes, nodes = self._passes.num_passes, self._passes.num_fed
        logits, places = self._reading(self._passes, trees)
        read = time.perf_counter()
        verified = [
            self._rule(tree, _probs(one, self._temperature), self._dice)
            for tree, one in zip(trees, logits, strict=True)
        ]
        self._accept(trees, verified, places)
        step = BatchStep(
            num_requests=len(trees),
            num_passes=self._passes.num_passes - passes,
            num_nodes=self._passes.num_fed - nodes,
            draft_s=proposed - began,
            target_s=read - proposed,
            verify_s=time.perf_counter() - read,
        )
        self.steps.append(step)
        return trees, verified

    def _propose(self) -> list[Tree]:
        proposals = [draft.propose() for draft in self._drafts]
        if not proposals:
            return [Tree(root) for root in self._roots]
        return [merge(trees) for trees in zip(*proposals, strict=True)]

    def _accept(
        self, trees: Sequence[Tree], verified: Sequence[Verified], places: Sequence[Sequence[int]]
    ) -> None:
        """Keep the accepted paths, in the target and in the drafts."""
        pairs = list(zip(verified, places, strict=True))
        self._passes.keep([[of[node] for node in found.path] for found, of in pairs])
        self._roots = [found.token for found in verified]
        new = [new_tokens(tree, found) for tree, found in zip(trees, verified, strict=True)]
        for draft in self._drafts:
            draft.accept(new)

    def _go_on(
        self,
        live: Sequence[int],
        outputs: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos: Collection[int],
    ) -> list[int]:
        """The requests that are not at their end; the others leave the batch."""
        rows = [
            row
            for row, request in enumerate(live)
            if len(outputs[request]) < max_new_tokens and outputs[request][-1] not in eos
        ]
        if 0 < len(rows) < len(live):
            self._passes.select(rows)
            self._roots = [self._roots[row] for row in rows]
            for draft in self._drafts:
                draft.select(rows)
        return [live[row] for row in rows]


def new_tokens(tree: Tree, found: Verified) -> list[int]:
    """What a step continues the context by."""
    return [*(tree.tokens[node] for node in found.path[1:]), found.token]


def _probs(logits_NV: Tensor, temperature: float) -> Probs:
    """The target's distributions, each computed when it is asked for. At temperature 0 any will do
    that has the same likeliest token."""

    @cache
    def of(node: int) -> np.ndarray:
        return np.asarray(probabilities(logits_NV[node], temperature or 1.0))

    return of


def _until(tokens: list[int], num: int, eos: Collection[int]) -> list[int]:
    """At most `num`, and none behind an end."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), num)
    return tokens[: min(num, end)]


def _step_of(tree: Tree, found: Verified, new: Sequence[int]) -> RequestStep:
    return RequestStep(
        num_drafted=tree.num_drafted, num_accepted=found.num_accepted, num_tokens=len(new)
    )
