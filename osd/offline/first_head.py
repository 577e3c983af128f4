"""Trains a first head on texts: the target says what it thinks of every token of them.

texts ─► the target: a row at each token ─► fresh head ─► steps on packed batches ─► directory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from osd.config.schema import TrainerConfig
from osd.records import Trace
from trainer.adapter import merged
from trainer.distiller import Distiller
from trainer.draft import export_draft, load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.eagle3.fresh import write_fresh_head
from trainer.sampling.teacher import Teacher


def train_first_head(
    out: Path,
    teacher: Teacher,
    texts: Sequence[Trace],
    config: TrainerConfig,
    *,
    num_steps: int,
    num_depths: int,
    draft_vocab_size: int,
    taps: tuple[int, ...] = (),
    on_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """Write a head for the teacher's target to `out`, trained for so many steps.

    texts: prompts with answers, without rows. The draft vocabulary is that of the answers, the
    most frequent tokens first, then those that no answer holds.
    """
    counts_V = counts(texts, teacher.model.vocab_size)
    fresh = write_fresh_head(
        out.with_name(f"{out.name}.fresh"),
        teacher.model.hf,
        counts_V,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        seed=config.seed,
    )
    distiller = Distiller(load_draft(fresh, TargetFeatures(teacher, num_depths)), config)
    batches = islice(_batches(texts, config), num_steps)
    for index, some in enumerate(batches):
        left = 1 - index / num_steps
        loss = distiller.step(distiller.collate(teacher.label(some)), index, left)
        assert loss is not None, "training diverged"
        on_step(loss)
    export_draft(distiller.model, fresh, out, merged(distiller.model.hf))


def counts(texts: Sequence[Trace], num_tokens: int) -> torch.Tensor:
    """int64 [V]: how often the answers hold each token."""
    ids = np.concatenate([text.output_ids for text in texts])
    return torch.from_numpy(np.bincount(ids, minlength=num_tokens))


def _batches(texts: Sequence[Trace], config: TrainerConfig) -> Iterator[list[Trace]]:
    """Batches in random order, over and over."""
    rng, size = np.random.default_rng(config.seed), config.batch_size
    while True:
        order = rng.permutation(len(texts))
        yield from ([texts[i] for i in order[j : j + size]] for j in range(0, len(order), size))
