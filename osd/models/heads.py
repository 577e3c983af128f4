"""Recognises draft heads by their `config.json`, and says which of them are not served.

A head computes from the target's hidden states. Those that are served, EAGLE-3 heads of one Llama
layer, are read by `osd/models/eagle3.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

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


PARALLEL = ("pard_token", "ptd_token_id", "mask_token_id")
"""Keys of heads that draft several tokens at once (P-EAGLE)."""
KINDS = (
    ("peagle", "a P-EAGLE head"),
    ("dspark", "a DSpark head"),
    ("dflash|lilicorr", "a DFlash head"),
    ("medusa", "a Medusa head"),
    ("mtp", "an MTP head"),
    ("eagle3", "an EAGLE-3 head of another layer than Llama's"),
    ("eagle", "an EAGLE-1 or EAGLE-2 head"),
)
"""What names of heads contain -> what they are; the first that fits."""


def draft_head(config: Mapping[str, object]) -> str:
    """The name or key that shows a draft head (EAGLE, Medusa, MTP, ...); "" for a complete model.

    Example:
        draft_head({"architectures": ["LlamaForCausalLMEagle3"]}) == "LlamaForCausalLMEagle3"
    """
    by_name = (name for name in _names(config) if NAMES.search(name))
    return next(by_name, "") or next((key for key in KEYS if key in config), "")


def is_parallel(config: Mapping[str, object]) -> bool:
    """Whether a head drafts several tokens at once."""
    return any(config.get(key) is not None for key in PARALLEL)


def kind_of(config: Mapping[str, object]) -> str:
    """What kind of head it is that is not served, with what shows it.

    Example:
        kind_of({"architectures": ["DeepSeekMTPModel"]}) == "an MTP head (DeepSeekMTPModel)"
    """
    shown = draft_head(config)
    names = [*_names(config), *(key for key in KEYS if key in config)]
    for pattern, kind in KINDS:
        if found := next((n for n in names if re.search(pattern, n, re.IGNORECASE)), ""):
            if pattern.startswith("eagle") and is_parallel(config):
                return f"a P-EAGLE head ({found})"
            return f"{kind} ({found})"
    return f"a draft head ({shown})"


def refusal(where: Path, what: str) -> str:
    """The line that refuses a head which is `what`."""
    return (
        f"serving.draft={where}: is {what}, and of heads only EAGLE-3 heads of one Llama layer are "
        "served; use such a head, or a draft model"
    )


def _names(config: Mapping[str, object]) -> Iterator[str]:
    architectures = config.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else [])]
    names += [config.get("speculators_model_type"), config.get("model_type")]
    yield from (name for name in names if isinstance(name, str))
