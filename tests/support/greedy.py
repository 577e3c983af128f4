"""Greedy answers of a tiny model, many prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from osd.tiny.training import Example

MAX_ANSWER_TOKENS = 128


@torch.no_grad()
def greedy_answers(model: Any, prompts: Sequence[list[int]], batch_size: int = 64) -> list[Example]:
    """The model's answers at temperature 0, each with its end token unless it was cut at
    `MAX_ANSWER_TOKENS`."""
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    answers: list[Example] = []
    for i in range(0, len(prompts), batch_size):
        group = prompts[i : i + batch_size]
        length = max(map(len, group))
        input_ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in group])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in group])
        out = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=False,
        )
        for prompt, ids in zip(group, out[:, length:].tolist(), strict=True):
            answers.append(Example(prompt, ids[: ids.index(end) + 1] if end in ids else ids))
    return answers
