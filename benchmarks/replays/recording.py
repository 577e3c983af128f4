"""A target's answers with its distribution at every output token, served once and replayed for
every draft.

At temperature 0 the served tokens do not depend on the draft. So a replay of the draft over one
recording gives exactly the counts and captures of a service; tests compare served and replayed
counts. At a higher temperature the distribution of the served tokens does not depend on the draft
(a token x of a greedy draft is served with the target's p(x), proposed or not), so a sampled
recording gives the counts of one such service.

Legend: T output tokens, K top-k, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd.records import ACCEPTED, PLAIN, REJECTED, Trace

BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One request and all the target said."""

    name: str
    prompt_ids: np.ndarray
    """int32 [P]"""
    output_ids: np.ndarray
    """int32 [T]"""
    target_ids: np.ndarray
    """int32 [T, K], most likely first"""
    target_logprobs: np.ndarray
    """float16 [T, K]"""
    tail_logprob: np.ndarray
    """float32 [T]"""
    temperature: float = 0.0
    """At which the answer was sampled."""

    def bare_trace(self, target_id: str) -> Trace:
        """The tokens alone, without rows."""
        return Trace.of_text(
            self.prompt_ids, self.output_ids, trace_id=self.name, target_id=target_id
        )


@torch.no_grad()
def record(
    target: Path,
    prompts: Sequence[str],
    *,
    top_k: int,
    max_tokens: int,
    progress: Callable[[int], None],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Recorded]:
    """The target's answers to chat prompts, greedy at temperature 0. Names are the prompts'
    numbers.

    The distributions are those before temperature, as capture stores them.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ids: list[list[int]] = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    found: list[Recorded | None] = [None] * len(prompts)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            answers = _generate(model, tokenizer, [ids[i] for i in some], max_tokens, temperature)
            for i, output_ids in zip(some, answers, strict=True):
                found[i] = _with_distributions(model, f"r{i}", ids[i], output_ids, top_k)
            progress(len(some))
    return [one for one in found if one is not None]


def trace_of(
    recorded: Recorded,
    kind_T: np.ndarray,
    *,
    at: float,
    target_id: str,
    accepted_fraction: float,
    plain_fraction: float,
    rng: np.random.Generator,
    draft_version: int = 1,
) -> Trace:
    """What capture would have kept of an answer whose tokens came about as `kind_T` says (int8 [T],
    see `kinds`)."""
    keep_prob_T = np.array([1.0, accepted_fraction, plain_fraction])[kind_T]
    kept = np.flatnonzero(rng.random(len(kind_T)) < keep_prob_T)
    return Trace(
        trace_id=recorded.name,
        target_id=target_id,
        finished_at=at,
        prompt_ids=recorded.prompt_ids,
        output_ids=recorded.output_ids,
        temperature=recorded.temperature,
        position=len(recorded.prompt_ids) + kept,
        kind=kind_T[kept],
        draft_ids=np.where(kind_T[kept] == ACCEPTED, recorded.output_ids[kept], -1),
        target_ids=recorded.target_ids[kept],
        target_logprobs=recorded.target_logprobs[kept],
        tail_logprob=recorded.tail_logprob[kept],
        keep_prob=keep_prob_T[kept],
        draft_version=np.full(len(kept), draft_version),
    )


def kinds(is_match_GT: np.ndarray, k: int, num_output: int) -> np.ndarray:
    """int8 [T]: what became of each output token with k draft tokens in every step, from a draft
    that was right at depth g of a step where `is_match_GT` says, from the second output token on
    ([T] where all depths propose alike). The first comes from prefill; after k accepted tokens one
    is free."""
    of_depth_GT = np.atleast_2d(is_match_GT)
    kind_T = np.full(num_output, PLAIN, np.int8)
    at = 1
    while at < num_output:
        for depth in range(min(k, num_output - at)):
            is_match = bool(of_depth_GT[min(depth, len(of_depth_GT) - 1), at - 1])
            kind_T[at] = ACCEPTED if is_match else REJECTED
            at += 1
            if not is_match:
                break
        else:
            at += 1  # the bonus token, if the answer has one more
    return kind_T


def _generate(
    model: torch.nn.Module,
    tokenizer: Any,
    ids: list[list[int]],
    max_tokens: int,
    temperature: float,
) -> list[np.ndarray]:
    """Answers to prompts padded on the left, cut after the first end-of-sequence token."""
    length = max(map(len, ids))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    input_ids = torch.full((len(ids), length), pad)
    mask = torch.zeros_like(input_ids)
    for row, one in enumerate(ids):
        input_ids[row, length - len(one) :] = torch.tensor(one)
        mask[row, length - len(one) :] = 1
    # top_k 0: transformers would otherwise sample from the 50 likeliest alone.
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    answers = model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        eos_token_id=end,
        pad_token_id=pad,
        **sampling,
    )
    cut = []
    for answer in answers[:, length:].numpy():
        ends = np.flatnonzero(answer == end)
        cut.append(answer[: ends[0] + 1] if len(ends) else answer)
    return cut


def _with_distributions(
    model: torch.nn.Module, name: str, prompt_ids: list[int], output_ids: np.ndarray, top_k: int
) -> Recorded:
    tokens = torch.tensor([*prompt_ids, *output_ids.tolist()])[None]
    logits_TV = model(tokens).logits[0, len(prompt_ids) - 1 : -1].float()
    logp_TV = logits_TV.log_softmax(-1)
    top = logp_TV.topk(min(top_k, logp_TV.shape[-1]), -1)
    tail_T = logp_TV.scatter(1, top.indices, -torch.inf).logsumexp(-1)
    return Recorded(
        name=name,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        output_ids=output_ids.astype(np.int32),
        target_ids=top.indices.numpy().astype(np.int32),
        target_logprobs=top.values.numpy().astype(np.float16),
        tail_logprob=tail_T.numpy().astype(np.float32),
    )
