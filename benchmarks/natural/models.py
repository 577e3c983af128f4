"""The natural-text target and draft: built on first use from this Python's standard library, then
read from the cache.

`ensure_natural()` returns their directories, `ensure_natural_cost_shaped()` the same target with
the cost of a far larger model, and `requests()` traffic for them.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.natural.recipe import NATURAL, Recipe, natural_hash, recipe_to_json
from benchmarks.natural.text import HOME, PACKAGES
from benchmarks.natural.traffic import MAX_TOKENS, TEMPERATURE, requests
from osd.tiny.cache import build_once
from osd.tiny.models import (
    COST_SHAPED_HIDDEN_SIZE,
    COST_SHAPED_INTERMEDIATE_SIZE,
    COST_SHAPED_NUM_LAYERS,
    TinyModels,
    cost_shaped,
    run_build,
)

__all__ = [
    "HOME",
    "MAX_TOKENS",
    "PACKAGES",
    "TEMPERATURE",
    "ensure_natural",
    "ensure_natural_cost_shaped",
    "requests",
]


def ensure_natural(progress: bool = True, recipe: Recipe = NATURAL) -> TinyModels:
    """The natural-text models, built first if this recipe never met this text (some minutes on two
    cores).

    `progress`: show a bar while building. Raises `ConfigError` where the cache directory cannot be
    written or the standard library came without its source.
    """
    name = natural_hash(recipe)
    arguments = ("--recipe", recipe_to_json(recipe))
    root = build_once(
        f"natural-{name}",
        lambda directory: run_build(
            "benchmarks.natural.build", directory, *arguments, progress=progress
        ),
    )
    return TinyModels(target=root / "target", draft=root / "draft", recipe_hash=name)


def ensure_natural_cost_shaped(
    hidden_size: int = COST_SHAPED_HIDDEN_SIZE,
    num_layers: int = COST_SHAPED_NUM_LAYERS,
    intermediate_size: int = COST_SHAPED_INTERMEDIATE_SIZE,
    progress: bool = True,
    recipe: Recipe = NATURAL,
) -> Path:
    """Directory of a target with the natural-text target's logits and the cost of the given
    sizes."""
    sizes = (hidden_size, num_layers, intermediate_size)
    models = ensure_natural(progress, recipe)
    return cost_shaped("natural-wide", models.target, models.recipe_hash, sizes, progress)
