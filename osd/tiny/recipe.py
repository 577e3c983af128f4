"""The recipe of the tiny models: sizes, seeds, steps. Its hash names their place in the cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

SOURCES = (
    "recipe.py",
    "traffic.py",
    "text_words.py",
    "text_arithmetic.py",
    "text_sql.py",
    "text_python.py",
    "text_finance.py",
    "tokenizer.py",
    "training.py",
    "muon.py",
    "build.py",
)
"""Files of this package whose text changes the models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a Llama model with as many key-value heads as query heads."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    head_dim: int = 32


VOCAB_SIZE = 1536
MAX_POSITIONS = 2048
TARGET = Shape(hidden_size=256, intermediate_size=736, num_layers=2)
DRAFT = Shape(hidden_size=96, intermediate_size=288, num_layers=2)

TRAIN_SEED = 0
"""The target is trained on the traffic of this seed, the draft on that of the next. Served traffic
has seeds from 1000 on."""

NUM_TOKENIZER_REQUESTS = 500
"""Requests per domain the tokenizer is trained on."""

TARGET_MIX = (
    "arithmetic",
    "sql",
    "arithmetic",
    "finance",
    "arithmetic",
    "sql",
    "finance",
    "python",
)
"""Domains of the target's examples, in turn. Harder domains occur more often."""

TARGET_STEPS = 340
TARGET_BATCH = 24
TARGET_LEARNING_RATE = 0.01

DRAFT_STEPS = 270
DRAFT_BATCH = 24
DRAFT_LEARNING_RATE = 0.016


def recipe_hash() -> str:
    """16 hex digits that change with any constant, any text generator, or the training code."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(name.encode() + b"\0" + (here / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
