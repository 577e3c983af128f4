"""Exact speculative sampling in plain PyTorch on two models: the reference for the engine's tests.

Clarity over speed: no KV cache, one request at a time, every forward pass over the whole sequence.

    prefill ─► first token ─► ┌─► draft proposes up to k ─► target verifies in one pass ─┐ ─► ...
                              └───────────────── accepted tokens, and one more ◄─────────┘
The first output token is never drafted: prefill produces it, as in vLLM.

Legend: S tokens, V vocabulary, N rows, K top-k. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from osd.records import ACCEPTED, PLAIN, REJECTED, Trace

Model = Callable[..., Any]
"""A Hugging Face causal model, or anything that gives an object with `logits` [1, S, V] for ids [1,
S]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The target's distribution at one output token."""

    position: int
    """Index t into prompt + output: the distribution of token t given the tokens before it."""
    kind: int
    """REJECTED, ACCEPTED, or PLAIN (nothing was proposed: first token, bonus token)."""
    draft_id: int
    """The proposed token; -1 where there was none."""
    target_logprobs_V: Tensor
    """float64: raw log-softmax, before temperature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One draft and its verification."""

    draft_ids: tuple[int, ...]
    num_tested: int
    """Draft tokens looked at: the accepted ones, and the first rejected one if any."""
    num_accepted: int


@dataclass(kw_only=True, slots=True)
class Generation:
    """What a request produced."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """One per output token."""

    def trace(
        self, *, trace_id: str, target_id: str, top_k: int, finished_at: float = 0.0, **fields: Any
    ) -> Trace:
        """The trace that capture records when it keeps every row. `fields`: others of `Trace`."""
        logprobs_NV = torch.stack([row.target_logprobs_V for row in self.rows])
        top = logprobs_NV.topk(top_k, dim=-1)
        tail_NV = logprobs_NV.scatter(1, top.indices, -torch.inf)
        num_rows = len(self.rows)
        return Trace(
            trace_id=trace_id,
            target_id=target_id,
            finished_at=finished_at,
            prompt_ids=np.array(self.prompt_ids),
            output_ids=np.array(self.output_ids),
            position=np.array([row.position for row in self.rows]),
            kind=np.array([row.kind for row in self.rows]),
            draft_ids=np.array([row.draft_id for row in self.rows]),
            target_ids=top.indices.numpy(),
            target_logprobs=top.values.numpy(),
            tail_logprob=tail_NV.logsumexp(-1).numpy(),
            keep_prob=np.ones(num_rows),
            draft_version=np.ones(num_rows),
            num_drafts=len(self.steps),
            num_draft_tokens=sum(len(step.draft_ids) for step in self.steps),
            num_accepted_tokens=sum(step.num_accepted for step in self.steps),
            **fields,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters with vLLM's meanings. Temperature 0 is greedy, top_k 0 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def probs(self, logits_V: Tensor) -> Tensor:
        """float64 [V]: the distribution after temperature, then top-k, then top-p, renormalised."""
        logits_V = logits_V.double()
        if self.temperature == 0:
            return one_hot(int(logits_V.argmax()), len(logits_V))
        logits_V = logits_V / self.temperature
        if 0 < self.top_k < len(logits_V):
            logits_V = logits_V.masked_fill(
                logits_V < logits_V.topk(self.top_k).values[-1], -torch.inf
            )
        probs_V = logits_V.softmax(-1)
        if self.top_p < 1:
            ordered = probs_V.sort(descending=True)
            is_beyond = ordered.values.cumsum(-1) - ordered.values >= self.top_p
            probs_V = probs_V.index_fill(0, ordered.indices[is_beyond], 0.0)
        return probs_V / probs_V.sum()


class SpeculativeSampler:
    """Speculative decoding whose output follows the target's distribution exactly.

    drafting="greedy" proposes the draft's argmax and treats q as one-hot there (vLLM's default): x
    is accepted with probability p(x), else p without x is drawn from. "probabilistic" draws
    proposals from q.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        k: int,
        drafting: Literal["greedy", "probabilistic"] = "greedy",
    ) -> None:
        self._target, self._draft, self._k, self._drafting = target, draft, k, drafting

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        generator: torch.Generator | None = None,
        eos: Collection[int] = (),
    ) -> Generation:
        """Answer a prompt with up to `max_new_tokens`, stopping after a token in `eos`."""
        generation = Generation(prompt_ids=list(prompt_ids))
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        output = generation.output_ids
        while len(output) < max_new_tokens and not (output and output[-1] in eos):
            num_drafted = min(self._k, max_new_tokens - len(output)) if output else 0
            self._step(generation, sampling, num_drafted, max_new_tokens, generator, eos)
        return generation

    def _step(
        self,
        generation: Generation,
        sampling: Sampling,
        num_drafted: int,
        max_new_tokens: int,
        generator: torch.Generator | None,
        eos: Collection[int],
    ) -> None:
        """Draft, verify in one pass of the target, and append what comes out."""
        context = generation.prompt_ids + generation.output_ids
        draft_ids, q_probs = self._propose(context, sampling, num_drafted, generator)
        logits_SV = logits(self._target, context + draft_ids)[len(context) - 1 :]
        num_accepted, is_open = 0, True
        for i, draft_id in enumerate(draft_ids):
            p_V = sampling.probs(logits_SV[i])
            is_accepted = bool(_uniform(generator) < acceptance(p_V, q_probs[i], draft_id))
            token = draft_id if is_accepted else _draw(residual(p_V, q_probs[i]), generator)
            _append(
                generation, token, ACCEPTED if is_accepted else REJECTED, draft_id, logits_SV[i]
            )
            num_accepted += is_accepted
            is_open = (
                is_accepted and token not in eos and len(generation.output_ids) < max_new_tokens
            )
            if not is_open:
                break
        if draft_ids:
            step = Step(draft_ids=tuple(draft_ids), num_tested=i + 1, num_accepted=num_accepted)
            generation.steps.append(step)
        if is_open:
            last_V = logits_SV[len(draft_ids)]
            _append(generation, _draw(sampling.probs(last_V), generator), PLAIN, -1, last_V)

    def _propose(
        self,
        context: list[int],
        sampling: Sampling,
        num_drafted: int,
        generator: torch.Generator | None,
    ) -> tuple[list[int], list[Tensor]]:
        """Draft tokens, and the distribution each was drawn from."""
        draft_ids: list[int] = []
        q_probs: list[Tensor] = []
        for _ in range(num_drafted):
            logits_V = logits(self._draft, context + draft_ids)[-1]
            if self._drafting == "greedy":
                q_V = one_hot(int(logits_V.argmax()), len(logits_V))
            else:
                q_V = sampling.probs(logits_V)
            draft_ids.append(_draw(q_V, generator))
            q_probs.append(q_V)
        return draft_ids, q_probs


def acceptance(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """min(1, p/q): the probability of accepting a proposal drawn from q (arXiv 2211.17192,
    algorithm 1)."""
    return min(1.0, float(p_V[token] / q_V[token]))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(0, p − q)): the distribution after a rejection (same source).

    It is p without x where q is one-hot at x.
    """
    left_V = (p_V - q_V).clamp(min=0)
    mass = left_V.sum()
    # p = q up to rounding: a rejection has probability zero, and any draw is as good.
    return left_V / mass if mass > 0 else p_V


def one_hot(token: int, vocab_size: int) -> Tensor:
    """All mass on one token, float64 [V]."""
    probs_V = torch.zeros(vocab_size, dtype=torch.float64)
    probs_V[token] = 1.0
    return probs_V


@torch.no_grad()
def logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Raw logits [S, V] on the CPU: those at s are for token s + 1."""
    return model(torch.tensor([list(ids)], device=getattr(model, "device", "cpu"))).logits[0].cpu()


def target_logprobs(model: Model, ids: Sequence[int]) -> Tensor:
    """Raw log-softmax, float64 [S, V], of one plain forward pass. Row s is for token s + 1."""
    return logits(model, ids).double().log_softmax(-1)


def _append(generation: Generation, token: int, kind: int, draft_id: int, logits_V: Tensor) -> None:
    position = len(generation.prompt_ids) + len(generation.output_ids)
    logprobs_V = logits_V.double().log_softmax(-1)
    generation.rows.append(
        Row(position=position, kind=kind, draft_id=draft_id, target_logprobs_V=logprobs_V)
    )
    generation.output_ids.append(token)


def _uniform(generator: torch.Generator | None) -> Tensor:
    return torch.rand((), generator=generator, dtype=torch.float64)


def _draw(probs_V: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(probs_V, 1, generator=generator))
