"""`python -m benchmarks.natural.build DIRECTORY`: trains the natural-text models into
`DIRECTORY`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.natural.recipe import NATURAL, Recipe, recipe_from_json
from benchmarks.natural.text import HOME
from osd.common.progress import stages
from osd.tiny.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def build(directory: Path, recipe: Recipe, progress: bool) -> None:
    """Train tokenizer, target and draft, and save them."""
    with stages(progress) as begin:
        begin("tiny models: loading torch")
        from benchmarks.natural import training

        begin("tiny models: tokenizer")
        tokenizer = training.natural_tokenizer(recipe.vocab_size)
        advance = begin("tiny models: target", recipe.target_steps, "steps")
        target, _ = training.train_natural_target(tokenizer, recipe, advance)
        begin("tiny models: target's answers")
        examples = training.lessons(tokenizer, target, [HOME], recipe.draft_answers, seed=0)
        advance = begin("tiny models: draft", recipe.draft_steps, "steps")
        draft, _ = training.distil_draft(tokenizer, target, examples, recipe, advance)
    _save(target, tokenizer, directory / "target")
    _save(draft, tokenizer, directory / "draft")


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.natural.build", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--recipe",
        type=recipe_from_json,
        default=NATURAL,
        help="sizes and steps as one line of JSON",
    )
    arguments = parser.parse_args()
    build(arguments.directory, arguments.recipe, progress=not arguments.quiet)


if __name__ == "__main__":
    main()
