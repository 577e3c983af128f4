"""Trains the tiny target on generated traffic, then distils the tiny draft from the target.

Legend: B sequences, T tokens per sequence, A answer tokens of the batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from osd.tiny import recipe
from osd.tiny.muon import Muon
from osd.tiny.recipe import Shape
from osd.tiny.tokenizer import chat_prompt
from osd.tiny.traffic import HOME, stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Report = Callable[[int], None]
"""Called with the number of steps done since the last call."""


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation as ids. The answer includes its end token."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded `input_ids` [B, T]. `is_source` [B, T] marks positions that predict an answer
    token."""

    input_ids: Tensor
    is_source: Tensor

    @property
    def labels(self) -> Tensor:
        """Answer tokens [A], in the order in which `is_source` selects."""
        return self.input_ids.roll(-1, dims=1)[self.is_source]


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A fresh Llama of this shape with tied embeddings, float32."""
    torch.manual_seed(seed)
    heads = shape.hidden_size // shape.head_dim
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=shape.head_dim,
        max_position_embeddings=recipe.MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def examples(tokenizer: PreTrainedTokenizerFast, domain: str, seed: int) -> Iterator[Example]:
    """The endless traffic of a domain, as ids."""
    for request in stream(domain, seed):
        answer_ids = tokenizer.encode(request.answer, add_special_tokens=False)
        yield Example(chat_prompt(tokenizer, request.prompt), [*answer_ids, tokenizer.eos_token_id])


def collate(group: Sequence[Example]) -> Batch:
    """Put examples of similar length into one batch. No position attends to the padding."""
    length = max(len(e.prompt_ids) + len(e.answer_ids) for e in group)
    input_ids = torch.zeros(len(group), length, dtype=torch.long)
    is_source = torch.zeros(len(group), length, dtype=torch.bool)
    for row, example in enumerate(group):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.answer_ids)
        input_ids[row, :end] = torch.tensor(example.prompt_ids + example.answer_ids)
        is_source[row, start - 1 : end - 1] = True
    return Batch(input_ids, is_source)


def batches(pool: Iterator[Example], batch_size: int, rng: Random) -> Iterator[Batch]:
    """Batches of examples of similar length, in random order."""
    while chunk := sorted(
        islice(pool, 8 * batch_size), key=lambda e: len(e.prompt_ids) + len(e.answer_ids)
    ):
        groups = [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
        rng.shuffle(groups)
        yield from map(collate, groups)


def answer_logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Logits [A, V] that predict the answer tokens."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden[batch.is_source])


def train(
    model: LlamaForCausalLM,
    data: Iterator[Batch],
    loss_of: Callable[[Batch], Tensor],
    steps: int,
    learning_rate: float,
    report: Report,
) -> float:
    """Train with Muon for matrices and AdamW for the rest, after a warm-up linearly to zero.

    Returns the mean of the last ten losses.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[Any] = [
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(
            others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]
    warmup = max(1, steps // 20)
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(islice(data, steps)):
        scale = min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        report(1)
    model.eval()
    last = losses[-10:]
    assert all(map(math.isfinite, last)), "training diverged"
    return sum(last) / len(last)


def train_target(tokenizer: PreTrainedTokenizerFast, report: Report) -> LlamaForCausalLM:
    """The target, trained on all domains."""
    model = make_model(recipe.TARGET, tokenizer, seed=1)
    pools = {domain: examples(tokenizer, domain, recipe.TRAIN_SEED) for domain in recipe.TARGET_MIX}
    mixed = (next(pools[domain]) for domain in cycle(recipe.TARGET_MIX))
    data = batches(mixed, recipe.TARGET_BATCH, Random(0))

    def loss_of(batch: Batch) -> Tensor:
        return F.cross_entropy(answer_logits(model, batch), batch.labels)

    train(model, data, loss_of, recipe.TARGET_STEPS, recipe.TARGET_LEARNING_RATE, report)
    return model


def train_draft(
    tokenizer: PreTrainedTokenizerFast, target: LlamaForCausalLM, report: Report
) -> LlamaForCausalLM:
    """The draft, distilled from the target's distributions on the home domain alone."""
    model = make_model(recipe.DRAFT, tokenizer, seed=2)
    pool = examples(tokenizer, HOME, recipe.TRAIN_SEED + 1)
    data = batches(pool, recipe.DRAFT_BATCH, Random(0))

    def loss_of(batch: Batch) -> Tensor:
        with torch.no_grad():
            teacher = answer_logits(target, batch).log_softmax(-1)
        student = answer_logits(model, batch).log_softmax(-1)
        return F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    train(model, data, loss_of, recipe.DRAFT_STEPS, recipe.DRAFT_LEARNING_RATE, report)
    return model
