"""Checks by their files that a target and a draft can work together."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from osd.errors import ConfigError
from osd.models import vocabulary
from osd.models.checkpoint_files import stored_tensors
from osd.models.heads import refusal

logger = logging.getLogger(__name__)

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
)
"""Keys of `config.json` for the context length. vLLM takes the smallest."""
LAYER_OF_A_HEAD = "transformer_layer_config"
"""Key of `config.json` under which heads of speculators hold the keys of a model."""
PARTS = (LAYER_OF_A_HEAD, "text_config", "eagle_config")
"""Keys of `config.json` that hold more keys."""
ROPES = ("rope_parameters", "rope_scaling")
"""Keys of `config.json` for the rotary embedding."""
NAMES = ("architectures", "model_type")
"""Keys that say what a model is. Those of its layer do not say what a head is."""
UNSCALED_ROPE = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
"""Rotary scalings whose context length is already scaled in `config.json` (vLLM's
`_get_and_verify_max_len`)."""


def check_pair(target: Path, draft: Path, max_model_len: int | None = None) -> int:
    """Raise `ConfigError` unless the draft model can propose tokens to the target.

    max_model_len: context that the target serves, in tokens; None (or vLLM's -1) = its own

    Returns the target's number of tokens, to which `osd/models/vocab_padding.py` fits the draft.
    """
    check_target(target)
    if "fc.weight" in stored_tensors(draft):
        raise ConfigError(refusal(draft, "an EAGLE-1 or EAGLE-2 head (it holds fc.weight)"))
    configs = {path: read_config(path) for path in (target, draft)}
    check_context(configs[target], configs[draft], draft, max_model_len)
    return check_vocabulary(
        target, draft, vocab_size(configs[target], target), vocab_size(configs[draft], draft)
    )


def check_target(target: Path) -> None:
    """Raise `ConfigError` when the target has no weights."""
    if not any(target.glob("*.safetensors")):
        raise ConfigError(
            f"serving.target={target}: no *.safetensors there; give a complete model directory"
        )


def check_vocabulary(target: Path, draft: Path, num_target: int, num_draft: int) -> int:
    """Raise `ConfigError` unless each id means the same token in both. Returns `num_target`."""
    known = {path: vocabulary.read(path) for path in (target, draft)}
    in_target, in_draft = known[target], known[draft]
    if in_target is None or in_draft is None:
        _check_sizes_alone(target if in_target is None else draft, draft, num_target, num_draft)
        return num_target
    if reason := vocabulary.difference(in_target, in_draft):
        files = (
            ""
            if in_target.file == in_draft.file
            else f", its {in_draft.file} compared with {in_target.file}"
        )
        raise ConfigError(
            f"serving.draft={draft}: another tokenizer than the target's ({reason}{files}); "
            "use a draft trained with the target's tokenizer"
        )
    if in_draft.num_ids > num_target:
        raise ConfigError(
            f"serving.draft={draft}: its tokenizer has ids up to {in_draft.num_ids - 1}, the "
            f"target has rows for {num_target} tokens; use a draft with the target's tokenizer"
        )
    return num_target


def _check_sizes_alone(without: Path, draft: Path, num_target: int, num_draft: int) -> None:
    """Without the tokenizer of one model, equal numbers of tokens count as the same tokenizer."""
    if num_target != num_draft:
        raise ConfigError(
            f"serving.draft={draft}: has {num_draft} tokens, the target {num_target}, and "
            f"{without} holds no tokenizer.json, vocab.json or tokenizer.model to tell whether "
            "they differ in padding alone; put the tokenizer's files there"
        )
    logger.warning(
        "%s holds no tokenizer.json, vocab.json or tokenizer.model: that the draft uses the "
        "target's tokenizer was checked by its number of tokens alone (%d)",
        without,
        num_target,
    )


def check_context(
    target: dict[str, Any],
    draft: dict[str, Any],
    where: Path,
    max_model_len: int | None,
    remedy: str = "use a draft with more",
) -> None:
    """Raise `ConfigError` when the target serves longer contexts than the draft has.

    In a step with a longer request, vLLM proposes token 0 for every request of the batch, and all
    of them are rejected.
    """
    served = max_model_len if max_model_len and max_model_len > 0 else context_length(target)
    own = context_length(draft)
    if served is not None and own is not None and own < served:
        raise ConfigError(
            f"serving.draft={where}: has a context of {own} tokens, the target serves {served}, "
            "and one longer request would stop speculation for all; set "
            f"serving.vllm.max_model_len={own}, or {remedy}"
        )


def context_length(config: dict[str, Any]) -> int | None:
    """Tokens that a model can attend to, as vLLM reads its `config.json`; None when it does not
    say."""
    lengths = [config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int)]
    if not lengths:
        return None
    rope: dict[str, Any] = next(filter(None, map(config.get, ROPES)), {})
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    factor = 1.0 if kind in UNSCALED_ROPE else rope.get("factor") or 1.0
    return int(min(lengths) * factor)


def vocab_size(config: dict[str, Any], directory: Path) -> int:
    """Rows of the model's embedding by its `config.json`. Raises `ConfigError` when it does not
    say."""
    size = config.get("vocab_size")
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"{directory / 'config.json'}: has no vocab_size; give a text model in Hugging Face "
            "format"
        )
    return size


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json`, with the part for text of a multimodal model on top, and below it that for the
    layer of a head. Raises `ConfigError`."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give a model in Hugging Face format"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: is no mapping; give a model in Hugging Face format")
    for key in PARTS:
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key} is no mapping; give a model in Hugging Face format")
    layer, text = (config.get(key) or {} for key in (LAYER_OF_A_HEAD, "text_config"))
    of_layer = {key: value for key, value in layer.items() if key not in NAMES}
    found = {**of_layer, **config, **text}
    for key in ROPES:
        _check_rope(found.get(key) or {}, key, path)
    return found


def _check_rope(rope: Any, key: str, path: Path) -> None:
    problem = "" if isinstance(rope, dict) else "is no mapping"
    if not problem and not isinstance(factor := rope.get("factor") or 1, int | float):
        problem = f"has factor={factor!r}, which is no number"
    if problem:
        raise ConfigError(f"{path}: {key} {problem}; give a model in Hugging Face format")
