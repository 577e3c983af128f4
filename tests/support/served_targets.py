"""Random targets of eight layers with the tests' tokenizer, for heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.deep_targets import save_target
from tests.support.pairs import VOCABULARY, tokenizer

SIZES = {"vocab_size": VOCABULARY, "intermediate_size": 48, "max_position_embeddings": 64}


def served_target(directory: Path, **options: Any) -> Path:
    save_target(directory, **SIZES | options)
    tokenizer().save_pretrained(directory)
    return directory
