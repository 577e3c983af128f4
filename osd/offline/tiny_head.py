"""`python -m osd.offline.tiny_head DIRECTORY --target TARGET`: trains the tiny EAGLE-3 head, on its
home traffic alone, into DIRECTORY.

It stands here and not beside the other tiny models because the trainer makes it.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from osd.common.progress import stages

if TYPE_CHECKING:
    from osd.records import Trace

NUM_STEPS = 150
BATCH = 12
LEARNING_RATE = 0.02
NUM_DEPTHS = 4
TAPS = (2, 4, 5)
"""vLLM's default for eight layers, named, so that a target with idle layers behind them has the
same."""


def build(directory: Path, target: Path, progress: bool) -> None:
    """Train the head and save it."""
    with stages(progress) as begin:
        begin("tiny head: loading torch")
        from osd.offline.first_head import train_first_head
        from osd.tiny.quiet import quiet_transformers
        from trainer.sampling.teacher import Teacher

        begin("tiny head: texts")
        texts = _texts(target)
        advance = begin("tiny head: training", NUM_STEPS, "steps")
        with quiet_transformers():
            train_first_head(
                directory / "head",
                Teacher(target, top_k=16),
                texts,
                num_steps=NUM_STEPS,
                batch_size=BATCH,
                learning_rate=LEARNING_RATE,
                num_depths=NUM_DEPTHS,
                taps=TAPS,
                report=advance,
            )


def _texts(target: Path) -> list[Trace]:
    """Home traffic, as the tiny draft model is trained on."""
    from transformers import PreTrainedTokenizerFast

    from osd.records import Trace
    from osd.tiny.recipe import TRAIN_SEED
    from osd.tiny.traffic import HOME
    from osd.tiny.training import examples

    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    pool = islice(examples(tokenizer, HOME, TRAIN_SEED + 1), NUM_STEPS * BATCH)
    return [Trace.of_text(e.prompt_ids, e.answer_ids) for e in pool]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m osd.offline.tiny_head", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    given = parser.parse_args()
    build(given.directory, given.target, progress=not given.quiet)


if __name__ == "__main__":
    main()
