"""The prose target and its drafts: fetched text, trained on first use, then read from the cache.

`ensure_target()` takes some 20 minutes of one core, `ensure_draft()` a few for each draft asked
for. An interrupted target goes on from its last checkpoint; an interrupted draft begins anew.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.engines.models import COST_SHAPES, SMALL
from benchmarks.prose import packages, recipe
from benchmarks.prose.corpus import corpus, corpus_hash
from benchmarks.prose.recipe import DraftRecipe, TargetRecipe, draft_recipe, to_json
from osd.common.files import cache_root
from osd.tiny.cache import build_once
from osd.tiny.models import TinyModels, cost_shaped, run_build

MODULE = "benchmarks.prose.build"


TARGET = TargetRecipe()


def ensure_target(given: TargetRecipe = TARGET, progress: bool = True) -> Path:
    """Directory of the target, built first where it is missing.

    Raises `ConfigError` where the packages cannot be fetched or the cache cannot be written.
    """
    name = _target_name(given)
    pages = corpus()
    checkpoint = cache_root() / "prose-checkpoints" / f"{name}.safetensors"
    return build_once(
        name,
        lambda directory: run_build(
            MODULE,
            directory,
            "target",
            *("--recipe", to_json(given), "--corpus", str(pages)),
            *("--checkpoint", str(checkpoint)),
            progress=progress,
        ),
    )


def ensure_draft(
    given: DraftRecipe,
    target: TargetRecipe | None = None,
    progress: bool = True,
) -> Path:
    """Directory of a draft of the target, both built first where they are missing. `target`: that
    of the draft's seed by default."""
    target = target or TargetRecipe(seed=given.seed)
    served = ensure_target(target, progress)
    name = f"prose-draft-{recipe.draft_hash(given, _target_name(target))}"
    pages = corpus()
    return build_once(
        name,
        lambda directory: run_build(
            MODULE,
            directory,
            "draft",
            *("--recipe", to_json(given), "--corpus", str(pages), "--target", str(served)),
            progress=progress,
        ),
    )


def ensure_prose(seed: int = 0, progress: bool = True) -> TinyModels:
    """The target of a seed, and the draft that serves unless another is asked for."""
    target = TargetRecipe(seed=seed)
    return TinyModels(
        target=ensure_target(target, progress),
        draft=ensure_draft(draft_recipe(seed=seed), target, progress),
        recipe_hash=_target_name(target),
    )


def ensure_prose_cost_shaped(seed: int = 0, progress: bool = True, size: str = SMALL) -> Path:
    """Directory of a target with the prose target's logits and the cost of a far larger model, of
    so many parameters (`COST_SHAPES`)."""
    given = TargetRecipe(seed=seed)
    target = ensure_target(given, progress)
    return cost_shaped("prose-wide", target, _target_name(given), COST_SHAPES[size], progress)


def _target_name(given: TargetRecipe) -> str:
    return f"prose-target-{recipe.target_hash(given, corpus_hash(packages.fetched()))}"
