"""`python -m benchmarks.prose.build DIRECTORY target|draft --recipe JSON ...`: trains one prose
model into `DIRECTORY`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.prose.corpus import DOMAINS, split
from benchmarks.prose.recipe import (
    DraftRecipe,
    TargetRecipe,
    draft_from_json,
    target_from_json,
)
from osd.common.progress import stages
from osd.tiny.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def build_target(
    directory: Path, recipe: TargetRecipe, corpus: Path | None, checkpoint: Path, progress: bool
) -> None:
    """Train tokenizer and target. `corpus`: the cache's by default."""
    with stages(progress) as begin:
        begin("prose models: loading torch")
        from benchmarks.prose import target

        begin("prose models: tokenizer")
        texts = {domain: split(domain, corpus).train for domain in DOMAINS}
        tokenizer = target.prose_tokenizer(texts, recipe.vocab_size)
        advance = begin("prose models: target", recipe.steps, "steps")
        model = target.fresh_target(recipe, tokenizer)
        target.train_target(
            model,
            [target.Windows(tokenizer, files, recipe.window_tokens) for files in texts.values()],
            steps=recipe.steps,
            batch=recipe.batch,
            learning_rate=recipe.learning_rate,
            seed=recipe.seed,
            checkpoint=checkpoint,
            report=advance,
        )
    _save(model, tokenizer, directory)
    checkpoint.unlink(missing_ok=True)


def build_draft(
    directory: Path, recipe: DraftRecipe, corpus: Path | None, target: Path, progress: bool
) -> None:
    """Distil a draft from the target's answers in the home domain and, if the recipe says so, in
    the other languages."""
    with stages(progress) as begin:
        begin("prose models: loading torch")
        from benchmarks.prose import draft

        model, tokenizer = draft.load(target)
        shares = draft.lessons_by_domain(recipe)
        advance = begin("prose models: target's answers", sum(shares.values()), "answers")
        lessons: list[Any] = []
        for domain, num in shares.items():
            prompts = draft.lesson_prompts(split(domain, corpus).train, num, domain, recipe.seed)
            lessons += draft.answered(model, tokenizer, prompts, recipe.seed, advance)
        advance = begin("prose models: draft", recipe.steps, "steps")
        student = draft.distil(model, tokenizer, lessons, recipe, advance)
    _save(student, tokenizer, directory)


def _save(model: LlamaForCausalLM, tokenizer: Any, directory: Path) -> None:
    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prose.build", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("what", choices=["target", "draft"])
    parser.add_argument("--recipe", required=True, help="sizes and steps as one line of JSON")
    parser.add_argument("--corpus", type=Path, help="directory of the domains' pages")
    parser.add_argument("--checkpoint", type=Path, help="where an interrupted target goes on")
    parser.add_argument("--target", type=Path, help="the target to distil")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    given = parser.parse_args()
    if given.what == "target":
        recipe = target_from_json(given.recipe)
        build_target(given.directory, recipe, given.corpus, given.checkpoint, not given.quiet)
    else:
        of_draft = draft_from_json(given.recipe)
        build_draft(given.directory, of_draft, given.corpus, given.target, not given.quiet)


if __name__ == "__main__":
    main()
