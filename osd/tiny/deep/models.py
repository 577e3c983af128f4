"""The deep tiny target and its draft: built on first use, then found in the cache."""

from __future__ import annotations

from pathlib import Path

from osd.tiny import models
from osd.tiny.cache import build_once
from osd.tiny.deep import recipe
from osd.tiny.models import TinyModels

WIDE = "deep-wide"


def target_cache_name() -> str:
    """Where the target lies in the cache."""
    return f"deep-target-{recipe.recipe_hash()}"


def draft_cache_name() -> str:
    """Where the draft lies in the cache."""
    return f"deep-draft-{recipe.recipe_hash()}"


def cost_shaped_cache_name() -> str:
    """Where the cost-shaped target lies in the cache."""
    return models.cost_shaped_name(WIDE, recipe.recipe_hash(), models.COST_SHAPED_SIZES)


def ensure_target(progress: bool = True) -> Path:
    """Directory of the target alone: who serves it with a head needs no draft model."""
    return build_once(target_cache_name(), lambda directory: _build(directory, progress=progress))


def ensure(progress: bool = True) -> TinyModels:
    """The deep tiny models, as `osd.tiny.models.ensure` gives the tiny pair."""
    target = ensure_target(progress)
    draft = build_once(
        draft_cache_name(),
        lambda directory: _build(directory, "--draft-of", str(target), progress=progress),
    )
    return TinyModels(target=target, draft=draft, recipe_hash=recipe.recipe_hash())


def ensure_cost_shaped(progress: bool = True) -> Path:
    """Directory of a target with the deep target's logits, and its hidden states padded with zeros,
    at the cost of `osd.tiny.models.ensure_cost_shaped`."""
    return models.cost_shaped(
        WIDE, ensure_target(progress), recipe.recipe_hash(), models.COST_SHAPED_SIZES, progress
    )


def _build(directory: Path, *arguments: str, progress: bool) -> None:
    models.run_build("osd.tiny.deep.build", directory, *arguments, progress=progress)
