"""The tiny target and draft: built on first use, then found in the cache.

`ensure()` returns the two directories. `ensure_cost_shaped()` returns the same target at the cost
of a far larger model.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from osd.common.progress import stages
from osd.tiny import recipe
from osd.tiny.cache import build_once

BUILD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""A waiting thread spins for some microseconds, then sleeps. Layers so small are over by then, and
to wake a thread takes as long as one of them. Freed memory is kept."""

MAX_BUILD_THREADS = 4
"""More threads would wait for each other. The caller's OMP_NUM_THREADS does not apply."""

COST_SHAPED_HIDDEN_SIZE = 768
COST_SHAPED_NUM_LAYERS = 8
COST_SHAPED_INTERMEDIATE_SIZE = 3072
COST_SHAPED_SIZES = (
    COST_SHAPED_HIDDEN_SIZE,
    COST_SHAPED_NUM_LAYERS,
    COST_SHAPED_INTERMEDIATE_SIZE,
)


@dataclass(frozen=True, slots=True)
class TinyModels:
    """Where the tiny models lie. Both directories hold the same tokenizer."""

    target: Path
    draft: Path
    recipe_hash: str


def cache_name() -> str:
    """Where the tiny models lie in the cache."""
    return f"tiny-{recipe.recipe_hash()}"


def ensure(progress: bool = True) -> TinyModels:
    """The tiny models. The first call with this recipe builds them (minutes on two cores).

    `progress`: show a bar while building. Raises `ConfigError` when the cache is not writable.
    """
    root = build_once(
        cache_name(), lambda directory: run_build("osd.tiny.build", directory, progress=progress)
    )
    return TinyModels(
        target=root / "target", draft=root / "draft", recipe_hash=recipe.recipe_hash()
    )


def cost_shaped_cache_name() -> str:
    """Where the cost-shaped target of the default sizes lies in the cache."""
    return cost_shaped_name("wide", recipe.recipe_hash(), COST_SHAPED_SIZES)


def ensure_cost_shaped(
    hidden_size: int = COST_SHAPED_HIDDEN_SIZE,
    num_layers: int = COST_SHAPED_NUM_LAYERS,
    intermediate_size: int = COST_SHAPED_INTERMEDIATE_SIZE,
    progress: bool = True,
) -> Path:
    """Directory of a target with the tiny target's logits and the cost of the given sizes."""
    sizes = (hidden_size, num_layers, intermediate_size)
    models = ensure(progress)
    return cost_shaped("wide", models.target, models.recipe_hash, sizes, progress)


def cost_shaped(
    prefix: str, target: Path, recipe_hash: str, sizes: tuple[int, int, int], progress: bool
) -> Path:
    """Directory of a widened target, in the cache as `prefix`-... `recipe_hash`: of the target in
    `target`. Sizes: hidden, layers, intermediate."""
    from osd.tiny import widen

    hidden_size, num_layers, intermediate_size = sizes

    def build(directory: Path) -> None:
        with stages(progress) as begin:
            begin("tiny models: widening the target")
            widen.widen(
                target,
                directory,
                hidden_size=hidden_size,
                num_layers=num_layers,
                intermediate_size=intermediate_size,
            )

    return build_once(cost_shaped_name(prefix, recipe_hash, sizes), build)


def cost_shaped_name(prefix: str, recipe_hash: str, sizes: tuple[int, int, int]) -> str:
    """Where a widened target of a recipe lies in the cache."""
    from osd.tiny import widen

    source = Path(widen.__file__).read_bytes() + recipe_hash.encode()
    return f"{prefix}-{hashlib.sha256(source).hexdigest()[:16]}-{'x'.join(map(str, sizes))}"


def run_build(module: str, directory: Path, *arguments: str, progress: bool) -> None:
    """Train in another process. torch's threads, memory and random state here stay as they are."""
    command = [
        sys.executable,
        "-m",
        module,
        str(directory),
        *arguments,
        *["--quiet"] * (not progress),
    ]
    threads = {"OMP_NUM_THREADS": str(min(MAX_BUILD_THREADS, len(os.sched_getaffinity(0))))}
    status = subprocess.run(command, env=BUILD_ENVIRONMENT | os.environ | threads).returncode
    if status:
        raise RuntimeError(f"{module} failed with status {status}; its output says why")
