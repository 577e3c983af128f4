"""Trains the prose target on all domains alike, in a way that an interrupted run goes on where it
was.

    step number ─► places in the text ─► batch ─► loss ─► Muon, AdamW ─► at times a checkpoint

The text of a step follows from its number alone, so a checkpoint holds weights, optimizers and the
step. Legend as in `osd.tiny.training`: B sequences, A predicted tokens of the batch, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.natural.text import SourceFile
from benchmarks.prose.checkpoint import resume, save
from osd.tiny.muon import Muon
from osd.tiny.tokenizer import train_tokenizer
from osd.tiny.training import Batch, Example, Report, answer_logits, collate, make_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RAW_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
"""What a user says is text to continue, with nothing around it."""
TOKENIZER_CHARS = 400_000
"""Characters of each domain the vocabulary is learnt from."""
MAX_CHARS_PER_TOKEN = 8
"""More text than this per token is never needed to fill a window."""
CHECKPOINT_EVERY_S = 120.0


def prose_tokenizer(texts: Mapping[str, Sequence[SourceFile]], vocab: int) -> Any:
    """A vocabulary of all domains alike. `texts`: domain -> training pages."""
    tokenizer = train_tokenizer(
        ("".join(f.text for f in files)[:TOKENIZER_CHARS] for files in texts.values()), vocab
    )
    tokenizer.chat_template = RAW_CHAT_TEMPLATE
    return tokenizer


@dataclass(frozen=True, slots=True)
class Windows:
    """Training texts of a domain, which begin with a word; a page's end is the end token."""

    tokenizer: PreTrainedTokenizerFast
    files: Sequence[SourceFile]
    tokens: int

    def draw(self, rng: Random) -> Example:
        """A text at a random place; pages come as often as they are long."""
        text = rng.choices(self.files, [len(file.text) for file in self.files])[0].text
        near = rng.randrange(-self.tokens, len(text) - 1)
        start = (
            text.rfind(" ", 0, near) + 1 if rng.random() < 0.5 else text.rfind("\n", 0, near) + 1
        )
        start = start if near > 0 else 0
        piece = text[start : start + self.tokens * MAX_CHARS_PER_TOKEN]
        ids = [*self.tokenizer.encode(piece, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Example([self.tokenizer.bos_token_id], ids[: self.tokens - 1])


def train_target(
    model: LlamaForCausalLM,
    windows: Sequence[Windows],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    checkpoint: Path,
    report: Report,
    every_s: float = CHECKPOINT_EVERY_S,
) -> float:
    """Train on all windows in turn, from `checkpoint` on where there is one. Muon for matrices and
    AdamW for the rest, after a warm-up linearly to zero (as `osd.tiny.training.train`).

    Returns the mean of the last ten losses in nats per token.
    """

    def batch_of(step: int) -> Batch:
        rng = Random(f"{seed}/{step}")
        places = [windows[(step * batch + i) % len(windows)] for i in range(batch)]
        return collate([one.draw(rng) for one in places])

    def loss_of(one: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            logits_AV = answer_logits(model, one)
        return F.cross_entropy(logits_AV.float(), one.labels)

    optimizers = _optimizers(model, learning_rate)
    first, losses = resume(checkpoint, model, optimizers)
    report(first)
    warmup, saved = max(1, steps // 20), time.monotonic()
    model.train()
    for step in range(first, steps):
        loss = loss_of(batch_of(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()
        losses = [*losses[-9:], loss.item()]
        report(1)
        if time.monotonic() - saved >= every_s:
            save(checkpoint, model, optimizers, step + 1, losses)
            saved = time.monotonic()
    model.eval()
    assert all(map(math.isfinite, losses)), "training diverged"
    return sum(losses) / len(losses)


def has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16 itself: then it trains in half the time."""
    given = torch.cpu.get_capabilities()
    return bool(given.get("avx512_bf16") or given.get("amx_bf16"))


def _optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[Any]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fresh_target(recipe: Any, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Untrained, with first weights of the recipe's seed."""
    return make_model(recipe.shape, tokenizer, seed=100 + recipe.seed)
