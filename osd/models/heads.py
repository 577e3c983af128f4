"""Recognises draft heads by their `config.json`.

Heads are not served: they compute from the target's hidden states, which traces do not hold, and
share tensors with the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES = re.compile("eagle(?!2_5)|medusa|mtp|dspark|dflash|speculator|draftmodel", re.IGNORECASE)
"""In the architecture or model type of every head in vLLM. (Eagle 2.5 is a multimodal model.)"""
KEYS = (
    "speculators_config",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "medusa_num_heads",
)
"""Keys that only the `config.json` of a head has."""


def draft_head(config: Mapping[str, object]) -> str:
    """The name or key that shows a draft head (EAGLE, Medusa, MTP, ...); "" for a complete model.

    Example:
        draft_head({"architectures": ["LlamaForCausalLMEagle3"]}) == "LlamaForCausalLMEagle3"
    """
    architectures = config.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else []), config.get("model_type")]
    by_name = (name for name in names if isinstance(name, str) and NAMES.search(name))
    return next(by_name, "") or next((key for key in KEYS if key in config), "")
