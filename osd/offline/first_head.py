"""Trains a first head on texts: the target says what it thinks of every token of them.

texts ─► the target: a row at each token ─► fresh head ─► steps on packed batches ─► directory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import torch

from osd.config.schema import TrainerConfig
from osd.records import Trace
from osd.tiny.training import train
from trainer.adapter import merged
from trainer.distiller import Distiller
from trainer.draft import export_draft, load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.eagle3.fresh import write_fresh_head
from trainer.loss import weighted_mean
from trainer.sampling.teacher import Teacher

ALIKE = 8
"""Batches whose texts are sorted by length together."""


def train_first_head(
    out: Path,
    teacher: Teacher,
    texts: Sequence[Trace],
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    num_depths: int,
    taps: tuple[int, ...],
    report: Callable[[int], None] = lambda num_steps: None,
) -> None:
    """Write a head for the teacher's target to `out`, trained for so many steps, with the target's
    whole vocabulary.

    texts: prompts with answers, without rows; those of more steps than there are come again
    """
    vocab_size = teacher.model.vocab_size
    fresh = write_fresh_head(
        out.with_name(f"{out.name}.fresh"),
        teacher.model.hf,
        counts(texts, vocab_size),
        draft_vocab_size=vocab_size,
        taps=taps,
    )
    config = TrainerConfig(device="cpu")
    distiller = Distiller(load_draft(fresh, TargetFeatures(teacher, num_depths)), config)

    def loss_of(some: Sequence[Trace]) -> torch.Tensor:
        batch = distiller.collate(teacher.label(some))
        return weighted_mean(distiller.losses(batch), batch.weight_N)

    # The recipe of the tiny draft models, whose types say Llama.
    model, data = cast(Any, distiller.model), cast(Any, _batches(texts, batch_size))
    train(model, data, cast(Any, loss_of), num_steps, learning_rate, report)
    export_draft(distiller.model, fresh, out, merged(distiller.model.hf))


def counts(texts: Sequence[Trace], num_tokens: int) -> torch.Tensor:
    """int64 [V]: how often the answers hold each token."""
    ids = np.concatenate([text.output_ids for text in texts])
    return torch.from_numpy(np.bincount(ids, minlength=num_tokens))


def _batches(texts: Sequence[Trace], size: int) -> Iterator[list[Trace]]:
    """Batches of texts of similar length in random order, over and over."""
    rng = Random(0)
    while True:
        for start in range(0, len(texts), ALIKE * size):
            some = sorted(texts[start : start + ALIKE * size], key=_length)
            groups = [some[i : i + size] for i in range(0, len(some), size)]
            rng.shuffle(groups)
            yield from groups


def _length(text: Trace) -> int:
    return len(text.prompt_ids) + len(text.output_ids)
