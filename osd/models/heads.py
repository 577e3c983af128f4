"""Draft heads, told by their `config.json`. They are not served: a head computes from the target's hidden states, which
no trace holds, and shares tensors with the target, which no swap may touch."""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES = re.compile("eagle(?!2_5)|medusa|mtp|dspark|dflash|speculator|draftmodel", re.IGNORECASE)
"""In architectures and model types that vLLM drafts with as heads. (Eagle 2.5 is a model for pictures.)"""
KEYS = (
    "speculators_config",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "medusa_num_heads",
)
"""Entries that no model of its own has."""


def draft_head(config: Mapping[str, object]) -> str:
    """What tells that this `config.json` is a draft head's (EAGLE, Medusa, MTP, ...); "" for a model of its own.

    Example:
        draft_head({"architectures": ["LlamaForCausalLMEagle3"]}) == "LlamaForCausalLMEagle3"
    """
    architectures = config.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else []), config.get("model_type")]
    by_name = (name for name in names if isinstance(name, str) and NAMES.search(name))
    return next(by_name, "") or next((key for key in KEYS if key in config), "")
