"""`python -m osd.tiny.build DIRECTORY`: trains the tiny models into `DIRECTORY/target` and
`DIRECTORY/draft`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from osd.common.progress import stages
from osd.tiny import recipe
from osd.tiny.quiet import quiet_transformers
from osd.tiny.tokenizer import train_tokenizer
from osd.tiny.traffic import DOMAINS, requests

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def build(directory: Path, progress: bool) -> None:
    """Train tokenizer, target and draft, and save them."""
    with stages(progress) as begin:
        begin("tiny models: loading torch")
        from osd.tiny import training

        begin("tiny models: tokenizer")
        tokenizer = train_tokenizer(_texts(), recipe.VOCAB_SIZE)
        advance = begin("tiny models: target", recipe.TARGET_STEPS, "steps")
        target = training.train_target(tokenizer, advance)
        advance = begin("tiny models: draft", recipe.DRAFT_STEPS, "steps")
        draft = training.train_draft(tokenizer, target, advance)
    _save(target, tokenizer, directory / "target")
    _save(draft, tokenizer, directory / "draft")


def _texts() -> Iterator[str]:
    for domain in DOMAINS:
        for request in requests(domain, recipe.NUM_TOKENIZER_REQUESTS, recipe.TRAIN_SEED):
            yield request.prompt
            yield request.answer


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m osd.tiny.build", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    arguments = parser.parse_args()
    build(arguments.directory, progress=not arguments.quiet)


if __name__ == "__main__":
    main()
