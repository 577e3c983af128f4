"""Everything that determines the prose models, and the names they have in the cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from osd import tiny
from osd.tiny.recipe import Shape

HERE = Path(__file__).parent
TINY = Path(tiny.__file__).parent
TARGET_SOURCES = (
    HERE / "target.py",
    *(TINY / f"{name}.py" for name in ("tokenizer", "training", "muon")),
)
"""Files whose text changes the target, beside those of its text (`corpus.SOURCES`)."""
DRAFT_SOURCES = (
    *(HERE / f"{name}.py" for name in ("draft", "traffic")),
    HERE.parent / "natural" / "sampling.py",
)
"""Files whose text changes a draft of a target."""
SEEDS = (0, 1, 2)
"""Of models. They differ in their first weights and in the order of their lessons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRecipe:
    """Sizes and steps of a target. Tests use smaller ones."""

    vocab_size: int = 4096
    window_tokens: int = 192
    """Length of a training text: the longest prompt and the longest answer."""
    shape: Shape = Shape(hidden_size=192, intermediate_size=512, num_layers=8)
    """4.3 M parameters; EAGLE-3 heads tap eight layers or more."""
    steps: int = 1200
    batch: int = 24
    """Texts of a step; domains in turn."""
    learning_rate: float = 0.01
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRecipe:
    """Sizes and steps of a draft."""

    shape: Shape
    steps: int
    foreign: float = 0.0
    """Share of its lessons in the other languages, the same for each."""
    answers: int = 2048
    """Of the target, which it learns from."""
    batch: int = 16
    learning_rate: float = 0.012
    seed: int = 0


SIZES = {
    "0.4M": (Shape(hidden_size=64, intermediate_size=192, num_layers=2), 600),
    "1M": (Shape(hidden_size=128, intermediate_size=384, num_layers=2), 700),
    "2M": (Shape(hidden_size=192, intermediate_size=512, num_layers=3), 1000),
}
"""Name -> shape and steps of a draft: 0.37, 0.95 and 2.1 M parameters. Larger ones need longer."""
FOREIGN = (0.0, 0.01, 0.05, 0.2)
SIZE = "1M"
"""Of the draft that serves unless another is asked for."""


def draft_recipe(size: str = SIZE, foreign: float = 0.0, seed: int = 0) -> DraftRecipe:
    """Raises `ValueError` for sizes and shares that are not offered."""
    if size not in SIZES:
        raise ValueError(f"size {size!r}: must be one of {', '.join(SIZES)}")
    if foreign not in FOREIGN:
        raise ValueError(f"foreign {foreign!r}: must be one of {', '.join(map(str, FOREIGN))}")
    shape, steps = SIZES[size]
    return DraftRecipe(shape=shape, steps=steps, foreign=foreign, seed=seed)


def target_hash(recipe: TargetRecipe, of_corpus: str) -> str:
    """16 hex digits. `of_corpus`: its text's own (`corpus.corpus_hash`)."""
    return _digest([asdict(recipe), of_corpus], TARGET_SOURCES)


def draft_hash(recipe: DraftRecipe, of_target: str) -> str:
    """16 hex digits. `of_target`: the target's own."""
    return _digest([asdict(recipe), of_target], DRAFT_SOURCES)


def _digest(settings: object, sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def to_json(recipe: TargetRecipe | DraftRecipe) -> str:
    """One line that `target_from_json` or `draft_from_json` reads."""
    return json.dumps(asdict(recipe))


def target_from_json(line: str) -> TargetRecipe:
    fields = json.loads(line)
    return TargetRecipe(**{**fields, "shape": Shape(**fields["shape"])})


def draft_from_json(line: str) -> DraftRecipe:
    fields = json.loads(line)
    return DraftRecipe(**{**fields, "shape": Shape(**fields["shape"])})
