"""The deep tiny target and its draft: built on first use, then found in the cache."""

from __future__ import annotations

from pathlib import Path

from osd.tiny import models
from osd.tiny.cache import build_once
from osd.tiny.deep import recipe
from osd.tiny.models import TinyModels

WIDE = "deep-wide"


def cache_name() -> str:
    """Where the models lie in the cache."""
    return f"deep-{recipe.recipe_hash()}"


def cost_shaped_cache_name() -> str:
    """Where the cost-shaped target lies in the cache."""
    return models.cost_shaped_name(WIDE, recipe.recipe_hash(), models.COST_SHAPED_SIZES)


def ensure(progress: bool = True) -> TinyModels:
    """The deep tiny models, as `osd.tiny.models.ensure` gives the tiny pair."""
    root = build_once(
        cache_name(),
        lambda directory: models.run_build("osd.tiny.deep.build", directory, progress=progress),
    )
    return TinyModels(
        target=root / "target", draft=root / "draft", recipe_hash=recipe.recipe_hash()
    )


def ensure_cost_shaped(progress: bool = True) -> Path:
    """Directory of a target with the deep target's logits, and its hidden states padded with zeros,
    at the cost of `osd.tiny.models.ensure_cost_shaped`."""
    return models.cost_shaped(WIDE, ensure(progress), models.COST_SHAPED_SIZES, progress)
