"""Sampled answers of a natural-text model, many prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.natural.traffic import MAX_TOKENS
from osd.tiny.training import Example


@torch.no_grad()
def sampled_answers(
    model: Any, prompts: Sequence[list[int]], temperature: float, seed: int, batch_size: int = 128
) -> list[Example]:
    """The model's answers, each with its end token unless it was cut at `MAX_TOKENS`. Temperature 0
    is greedy."""
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    answers: list[Example] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for i in range(0, len(prompts), batch_size):
            group = prompts[i : i + batch_size]
            length = max(map(len, group))
            input_ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in group])
            mask = torch.tensor(
                [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in group]
            )
            out = model.generate(
                input_ids=input_ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, **sampling
            )
            for prompt, ids in zip(group, out[:, length:].tolist(), strict=True):
                answers.append(Example(prompt, ids[: ids.index(end) + 1] if end in ids else ids))
    return answers
