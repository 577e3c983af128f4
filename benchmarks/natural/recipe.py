"""Everything that determines the natural-text models, including the standard library's text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.natural.text import text_hash
from osd import tiny
from osd.tiny.recipe import Shape

HERE = Path(__file__).parent
TINY = Path(tiny.__file__).parent
SOURCES = (
    *(
        HERE / f"{name}.py"
        for name in ("recipe", "text", "traffic", "training", "sampling", "build")
    ),
    *(TINY / f"{name}.py" for name in ("tokenizer", "training", "muon")),
)
"""Files whose text changes the models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Sizes and steps. The defaults are the models that `ensure_natural()` builds; tests use
    smaller ones."""

    vocab_size: int = 2048
    window_tokens: int = 192
    """Length of a training text: the longest prompt and the longest answer."""
    target: Shape = Shape(hidden_size=256, intermediate_size=736, num_layers=3)
    target_steps: int = 480
    target_batch: int = 12
    target_learning_rate: float = 0.01
    draft: Shape = Shape(hidden_size=96, intermediate_size=288, num_layers=2)
    draft_answers: int = 1024
    """Answers of the target the draft learns from."""
    draft_steps: int = 320
    draft_batch: int = 16
    draft_learning_rate: float = 0.012


NATURAL = Recipe()


def natural_hash(recipe: Recipe = NATURAL, root: Path | None = None) -> str:
    """16 hex digits that change with the recipe, with the training code, and with the text in
    `root`."""
    digest = hashlib.sha256(f"{recipe}{text_hash(root)}".encode())
    for path in SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def recipe_to_json(recipe: Recipe) -> str:
    """One line that `recipe_from_json` reads."""
    return json.dumps(asdict(recipe))


def recipe_from_json(line: str) -> Recipe:
    """The recipe that `recipe_to_json` wrote."""
    fields = json.loads(line)
    shapes = {name: Shape(**fields[name]) for name in ("target", "draft")}
    return Recipe(**{**fields, **shapes})
