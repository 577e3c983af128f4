"""What fits together: a target, its drafts, and the context that prompts, answers and trees need.

Errors are one line each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from osd.errors import ConfigError
from osd.models.compatibility import check_pair, read_config
from osd.models.eagle3 import is_eagle3

FULL = "full_attention"


def load(target: Path, drafts: Sequence[Path] = ()) -> tuple[Any, list[Any]]:
    """The models of directories, in float32. Raises `ConfigError` unless each draft has the
    target's tokenizer."""
    for draft in drafts:
        if is_eagle3(read_config(draft)):
            raise ConfigError(f"draft {draft}: trees need a draft model, this is an EAGLE-3 head")
        check_pair(target, draft)
    models = [
        AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        for path in (target, *drafts)
    ]
    return models[0], models[1:]


def check_models(target: Any, drafts: Sequence[Any]) -> None:
    """Raise `ConfigError` where a mask of our own would not be obeyed, or ids differ."""
    for name, model in _named([target, *drafts]):
        if others := _kinds_of_layers(model.config) - {FULL}:
            raise ConfigError(
                f"{name}: layers of {', '.join(sorted(others))} cannot read a tree; give a model "
                "whose attention is full in every layer"
            )
        if model.config.vocab_size != target.config.vocab_size:
            raise ConfigError(
                f"{name}: {model.config.vocab_size} tokens, the target has "
                f"{target.config.vocab_size}; give a draft with the target's vocabulary"
            )


def check_context(
    models: Sequence[Any], prompts: Sequence[Sequence[int]], max_new_tokens: int, depth: int
) -> None:
    """Raise `ConfigError` unless every model, the target first, has positions for the longest
    prompt, its answer and a tree of `depth` below it."""
    if not all(prompts) or not prompts:
        raise ConfigError("prompts: each needs at least one token")
    prompt = max(map(len, prompts))
    needed = prompt + max_new_tokens + depth
    for name, model in _named(models):
        has = getattr(model.config, "max_position_embeddings", needed)
        if needed > has:
            raise ConfigError(
                f"{name}: a prompt of {prompt} tokens, {max_new_tokens} new ones and a tree "
                f"{depth} deep need a context of {needed}, it has {has}; ask for fewer tokens or "
                "a shallower tree"
            )


def _kinds_of_layers(config: Any) -> set[str]:
    """As Hugging Face calls them; older configurations name a window alone."""
    has_window = getattr(config, "sliding_window", None) is not None
    return set(
        getattr(config, "layer_types", None) or ["sliding_attention" if has_window else FULL]
    )


def _named(models: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"draft {i}" if i else "target", model) for i, model in enumerate(models)]
