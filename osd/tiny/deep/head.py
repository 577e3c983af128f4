"""The tiny EAGLE-3 head of the deep target: built on first use, then found in the cache.

The trainer makes it, which stands above this room, so it is built in a process of its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from osd.tiny import models
from osd.tiny.cache import build_once
from osd.tiny.deep import models as deep
from osd.tiny.deep import recipe
from osd.tiny.widen_head import widen_head

MODULE = "osd.offline.tiny_head"
SOURCES = (
    "osd/offline/tiny_head.py",
    "osd/offline/first_head.py",
    "trainer/eagle3/fresh.py",
)
"""Files whose text changes the head."""


def cache_name() -> str:
    """Where the head lies in the cache."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256(recipe.recipe_hash().encode())
    for name in SOURCES:
        digest.update((root / name).read_bytes() + b"\0")
    return f"deep-head-{digest.hexdigest()[:16]}"


def cost_shaped_cache_name() -> str:
    """Where the head of the cost-shaped target lies in the cache."""
    return f"{cache_name()}-{deep.cost_shaped_cache_name()}"


def ensure(progress: bool = True) -> Path:
    """Directory of the head of the deep target."""

    def build(directory: Path) -> None:
        target = str(deep.ensure_target(progress))
        models.run_build(MODULE, directory, "--target", target, progress=progress)

    return build_once(cache_name(), build) / "head"


def ensure_cost_shaped(progress: bool = True) -> Path:
    """Directory of the same head for `deep.ensure_cost_shaped`."""

    def build(directory: Path) -> None:
        widen_head(ensure(progress), deep.ensure_cost_shaped(progress), directory)

    return build_once(cost_shaped_cache_name(), build)
