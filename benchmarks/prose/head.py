"""An EAGLE-3 head for the prose target, trained on the target's own English answers alone, as its
draft model is: built on first use, then found in the cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.prose.corpus import HOME, split
from benchmarks.prose.models import ensure_target
from benchmarks.prose.recipe import DRAFT_SOURCES, TargetRecipe
from osd.offline.tiny_head import BATCH, LEARNING_RATE, NUM_DEPTHS, NUM_STEPS, TAPS
from osd.tiny.cache import build_once

REPOSITORY = Path(__file__).parents[2]
SOURCES = (
    Path(__file__),
    *DRAFT_SOURCES,
    REPOSITORY / "osd" / "offline" / "first_head.py",
    REPOSITORY / "trainer" / "eagle3" / "fresh.py",
)
"""Files whose text changes the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRecipe:
    """Steps of a head. Tests use fewer."""

    answers: int = 1024
    """Of the target, which it learns from."""
    steps: int = NUM_STEPS
    batch: int = BATCH
    learning_rate: float = LEARNING_RATE
    seed: int = 0


def ensure_head(given: HeadRecipe | None = None) -> Path:
    """Directory of the head of the target of its seed, both built first where they are missing."""
    given = given or HeadRecipe()
    target = ensure_target(TargetRecipe(seed=given.seed))
    name = f"prose-head-{head_hash(given, target.name)}"
    return build_once(name, lambda directory: _build(directory, given, target)) / "head"


def head_hash(recipe: HeadRecipe, of_target: str) -> str:
    """16 hex digits. `of_target`: the target's name in the cache."""
    digest = hashlib.sha256(json.dumps([asdict(recipe), of_target], sort_keys=True).encode())
    for path in SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(directory: Path, recipe: HeadRecipe, target: Path) -> None:
    from benchmarks.prose import draft
    from osd.offline.first_head import train_first_head
    from osd.records import Trace
    from trainer.sampling.teacher import Teacher

    model, tokenizer = draft.load(target)
    prompts = draft.lesson_prompts(split(HOME).train, recipe.answers, HOME, recipe.seed)
    lessons = draft.answered(model, tokenizer, prompts, recipe.seed, lambda num: None)
    train_first_head(
        directory / "head",
        Teacher(target, top_k=64),
        [Trace.of_text(one.prompt_ids, one.answer_ids) for one in lessons],
        num_steps=recipe.steps,
        batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        num_depths=NUM_DEPTHS,
        taps=TAPS,
    )
