"""The models that the project builds itself, by the names under which they are served.

target                    draft that fits it
tiny                      tiny           two layers, and a draft that knows one domain
tiny-cost-shaped          tiny           the same answers at the cost of a real model
tiny-deep                 tiny-deep      eight layers, and a draft that knows the same domain
tiny-deep-cost-shaped     tiny-deep      the same answers at the cost of a real model

Both deep targets have an EAGLE-3 head too: tiny-eagle3, and tiny-eagle3-cost-shaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from osd.common.files import cache_root
from osd.errors import ConfigError
from osd.tiny import models as tiny
from osd.tiny.deep import head
from osd.tiny.deep import models as deep

TARGETS: Mapping[str, Callable[[], Path]] = {
    "tiny": lambda: tiny.ensure().target,
    "tiny-cost-shaped": lambda: tiny.ensure_cost_shaped(),
    "tiny-deep": lambda: deep.ensure_target(),
    "tiny-deep-cost-shaped": lambda: deep.ensure_cost_shaped(),
}
"""Name -> what builds the target where it is missing, and gives its directory."""
DRAFTS: Mapping[str, Callable[[], Path]] = {
    "tiny": lambda: tiny.ensure().draft,
    "tiny-deep": lambda: deep.ensure().draft,
    "tiny-eagle3": lambda: head.ensure(),
    "tiny-eagle3-cost-shaped": lambda: head.ensure_cost_shaped(),
}
"""The same for `serving.draft`."""
NAMES = frozenset({*TARGETS, *DRAFTS})
_CACHED_TARGETS: Mapping[str, Callable[[], str]] = {
    "tiny": tiny.cache_name,
    "tiny-cost-shaped": tiny.cost_shaped_cache_name,
    "tiny-deep": deep.target_cache_name,
    "tiny-deep-cost-shaped": deep.cost_shaped_cache_name,
}
_CACHED_DRAFTS: Mapping[str, Callable[[], str]] = {
    "tiny": tiny.cache_name,
    "tiny-deep": deep.draft_cache_name,
    "tiny-eagle3": head.cache_name,
    "tiny-eagle3-cost-shaped": head.cost_shaped_cache_name,
}


def directory_of(name: str, key: str) -> Path:
    """The directory of a model of `NAMES`, built first where it is missing.

    key: configuration key or option of `name`. Raises `ConfigError` for a target in a draft's
        place.
    """
    check_kind(name, key)
    return _models(key)[name]()


def is_built(name: str, key: str) -> bool:
    """Whether a model of `NAMES` lies in the cache. Nothing is built. Raises as `directory_of`
    does."""
    check_kind(name, key)
    cached = _CACHED_TARGETS if key == "serving.target" else _CACHED_DRAFTS
    return (cache_root() / cached[name]()).is_dir()


def check_kind(name: str, key: str) -> None:
    """Raise `ConfigError` for a target in a draft's place, or the other way round."""
    models = _models(key)
    if name not in models:
        what = "a target, not a draft" if name in TARGETS else "a draft, not a target"
        raise ConfigError(f"{key}={name}: is {what}; use {' or '.join(models)}")


def _models(key: str) -> Mapping[str, Callable[[], Path]]:
    return TARGETS if key == "serving.target" else DRAFTS
