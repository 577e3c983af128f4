"""The recipe of the deep tiny models: what differs from the tiny pair's, and a hash over both.

Tokenizer, traffic and draft are the tiny pair's (`osd.tiny.recipe`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from osd.tiny import recipe
from osd.tiny.recipe import Shape

SOURCES = ("recipe.py", "build.py")
"""Files of this package whose text changes the models, beside those of the tiny pair."""

TARGET = Shape(hidden_size=128, intermediate_size=352, num_layers=8)
"""A head reads its hidden states before layers 2, 4 and 5."""
TARGET_MIX = (
    "arithmetic",
    "sql",
    "python",
    "arithmetic",
    "finance",
    "sql",
    "arithmetic",
    "finance",
    "python",
    "arithmetic",
    "sql",
    "finance",
    "python",
)
"""Domains of the target's examples, in turn. A narrow target needs more of the easy ones than the
tiny pair's does."""
TARGET_BATCH = 16
SHALLOW_STEPS = 380
"""Of every second layer alone, which costs half."""
SHALLOW_LEARNING_RATE = 0.03
TARGET_STEPS = 150
TARGET_LEARNING_RATE = 0.02
TARGET_WEIGHT_DECAY = 0.6
"""Of the layers' matrices, as a share of the learning rate at each step. Without it the first layer
outgrows all others, and hidden states hardly differ from layer to layer."""


def recipe_hash() -> str:
    """16 hex digits that change with the tiny pair's hash, or a file of `SOURCES`."""
    here = Path(__file__).parent
    digest = hashlib.sha256(recipe.recipe_hash().encode())
    for name in SOURCES:
        digest.update(name.encode() + b"\0" + (here / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
