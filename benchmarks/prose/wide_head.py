"""The EAGLE-3 head of the prose target, made the head of its cost-shaped copy."""

from __future__ import annotations

from pathlib import Path

from benchmarks.prose.head import ensure_head
from benchmarks.prose.models import ensure_prose_cost_shaped
from osd.tiny.cache import build_once
from osd.tiny.widen_head import widen_head


def ensure_wide_head() -> Path:
    """Directory of the head that proposes for `ensure_prose_cost_shaped` as `ensure_head` does for
    the target itself; built first where it is missing."""
    target, head = ensure_prose_cost_shaped(), ensure_head()

    def build(directory: Path) -> None:
        widen_head(head, target, directory)

    # ensure_head: CACHE/NAME/head
    return build_once(f"{head.parent.name}-{target.name}", build)
