"""The tiny target and draft: built on first use, then found in the cache.

`ensure()` gives the two directories, `ensure_cost_shaped()` the same target at the cost of a model forty times its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osd.tiny import recipe
from osd.tiny.cache import build_once
from osd.tiny.progress import progress_bar

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

COST_SHAPED_HIDDEN_SIZE = 768
COST_SHAPED_NUM_LAYERS = 12
COST_SHAPED_INTERMEDIATE_SIZE = 3072


@dataclass(frozen=True, slots=True)
class TinyModels:
    """Where the tiny models lie. Both directories hold the same tokenizer."""

    target: Path
    draft: Path
    recipe_hash: str


def ensure(progress: bool = True) -> TinyModels:
    """The tiny models, built first if this recipe never was (about two minutes on two cores).

    `progress`: show a bar while building. Raises `ConfigError` where the cache directory cannot be written.
    """
    name = recipe.recipe_hash()
    root = build_once(f"tiny-{name}", lambda directory: _build(directory, progress))
    return TinyModels(target=root / "target", draft=root / "draft", recipe_hash=name)


def ensure_cost_shaped(
    hidden_size: int = COST_SHAPED_HIDDEN_SIZE,
    num_layers: int = COST_SHAPED_NUM_LAYERS,
    intermediate_size: int = COST_SHAPED_INTERMEDIATE_SIZE,
    progress: bool = True,
) -> Path:
    """Directory of a target with the tiny target's logits and the cost of the given sizes."""
    from osd.tiny import widen

    models = ensure(progress)
    source = hashlib.sha256(Path(widen.__file__).read_bytes() + models.recipe_hash.encode()).hexdigest()[:16]
    name = f"wide-{source}-{hidden_size}x{num_layers}x{intermediate_size}"

    def build(directory: Path) -> None:
        with progress_bar(progress) as begin:
            begin("widening the target", 1)(0)
            widen.widen(
                models.target,
                directory,
                hidden_size=hidden_size,
                num_layers=num_layers,
                intermediate_size=intermediate_size,
            )

    return build_once(name, build)


def _build(directory: Path, progress: bool) -> None:
    """Fill `directory` with `target/` and `draft/`."""
    with progress_bar(progress) as begin:
        begin("loading torch", 1)
        from osd.tiny import training
        from osd.tiny.tokenizer import train_tokenizer

        with _reproducible():
            begin("tokenizer", 1)
            tokenizer = train_tokenizer(_tokenizer_texts(), recipe.VOCAB_SIZE)
            target = training.train_target(tokenizer, begin("target", recipe.TARGET_STEPS))
            draft = training.train_draft(tokenizer, target, begin("draft", recipe.DRAFT_STEPS))
    _save(target, tokenizer, directory / "target")
    _save(draft, tokenizer, directory / "draft")


def _tokenizer_texts() -> Iterator[str]:
    from osd.tiny.traffic import DOMAINS, requests

    for domain in DOMAINS:
        for request in requests(domain, recipe.NUM_TOKENIZER_REQUESTS, recipe.TRAIN_SEED):
            yield request.prompt
            yield request.answer


@contextmanager
def _reproducible() -> Iterator[None]:
    """Leave torch's random state as it was found."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    from osd.tiny.quiet import quiet_transformers

    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
