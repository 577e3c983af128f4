"""Whether a draft, a model of its own or a head, fits a target."""

from __future__ import annotations

from pathlib import Path

from osd.models.compatibility import check_pair, read_config
from osd.models.head_fit import check_head
from osd.models.heads import draft_head


def is_head(draft: Path) -> bool:
    """Whether a draft is a head. Raises `ConfigError` when its `config.json` cannot be read."""
    return bool(draft_head(read_config(draft)))


def check_fit(target: Path, draft: Path, max_model_len: int | None = None) -> int:
    """Raise `ConfigError` unless the draft can propose tokens to the target.

    max_model_len: context that the target serves, in tokens; None (or vLLM's -1) = its own

    Returns the target's number of tokens, to which `osd/models/vocab_padding.py` fits a draft
    model.
    """
    check = check_head if is_head(draft) else check_pair
    return check(target, draft, max_model_len)
