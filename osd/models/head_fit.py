"""Checks by their files that an EAGLE-3 head can draft for a target.

Legend: H hidden size, D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from osd.errors import ConfigError
from osd.models import vocabulary
from osd.models.compatibility import (
    check_context,
    check_target,
    check_vocabulary,
    read_config,
    vocab_size,
)
from osd.models.eagle3 import (
    D2T,
    EMBEDDING,
    MAPS,
    T2D,
    TAPS,
    HeadSpec,
    canonical,
    is_eagle3,
    number,
    shapes,
    spec_of,
)
from osd.models.head_files import Tensor, head_tensors, numbers
from osd.models.heads import kind_of, refusal

FLOATS = {"F32", "F16", "BF16"}
ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of the names of buffers that older checkpoints hold and nobody reads."""
OTHER_LAYERS = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "logit_scale": 1.0,
    "quantization_config": None,
    "compression_config": None,
}
"""Keys of a layer that must be absent or this: with another value, it is not the layer that the
trainer computes."""
COPY = "copy the head again"
RAISE_CONTEXT = (
    "raise max_position_embeddings in its config.json (of a hub name, in a copy): its layer "
    "computes at any position"
)
SAME_TARGET = "use a head that was trained for this target"


def check_head(target: Path, head: Path, max_model_len: int | None = None) -> int:
    """Raise `ConfigError` unless the head can propose tokens to the target.

    max_model_len: context that the target serves, in tokens; None (or vLLM's -1) = its own

    Returns the target's number of tokens.
    """
    num_tokens = check_parts(target, head)
    check_context(
        read_config(target),
        read_config(head),
        head,
        max_model_len,
        RAISE_CONTEXT,
    )
    if vocabulary.read(head) is not None:
        check_vocabulary(target, head, num_tokens, num_tokens)
    return num_tokens


def check_parts(target: Path, head: Path) -> int:
    """Raise `ConfigError` unless the head's layer and tensors fit the target. Returns the target's
    number of tokens."""
    check_target(target)
    config, of_target = read_config(head), read_config(target)
    if not is_eagle3(config):
        raise ConfigError(refusal(head, kind_of(config)))
    spec = spec_of(config, head)
    _check_layer(spec, config, head)
    num_tokens = vocab_size(of_target, target)
    _check_sizes(spec, of_target, num_tokens, head)
    _check_taps(spec, config, of_target, head)
    tensors = {canonical(name): tensor for name, tensor in head_tensors(head).items()}
    _check_tensors(spec, tensors, head)
    _check_maps(spec, tensors, head)
    return num_tokens


def _wrong(head: Path, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"serving.draft={head}: {what}; {remedy}")


def _check_layer(spec: HeadSpec, config: Mapping[str, Any], head: Path) -> None:
    for key, usual in OTHER_LAYERS.items():
        for part in (spec.layer, config):
            if part.get(key) not in (None, usual):
                what = f"config.json has {key}={part[key]!r}, and only heads without are served"
                raise _wrong(head, what, "use a head of a plain Llama layer")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        what = "config.json has use_aux_hidden_state=false: it reads the target's last layer alone"
        raise _wrong(head, what, "use a head that reads several")
    if spec.form == "speculators":
        _check_name(config, head)


def _check_name(config: Mapping[str, Any], head: Path) -> None:
    """That vLLM knows a head of speculators as such."""
    if (named := config.get("model_type", "speculators")) != "speculators":
        what = f"config.json has model_type={named}, by which vLLM does not know a head"
        raise _wrong(head, what, "leave model_type out, as speculators does")
    if not config.get("speculators_config"):
        what = "config.json has no speculators_config, by which vLLM knows the head"
        raise _wrong(head, what, COPY)


def _check_sizes(spec: HeadSpec, of_target: Mapping[str, Any], num_tokens: int, head: Path) -> None:
    if spec.target_hidden_size != (size := of_target.get("hidden_size")):
        what = f"reads hidden states of {spec.target_hidden_size} numbers, the target's have {size}"
        raise _wrong(head, what, SAME_TARGET)
    if spec.vocab_size != num_tokens:
        what = f"is for a vocabulary of {spec.vocab_size} tokens, the target has {num_tokens}"
        raise _wrong(head, what, SAME_TARGET)
    if spec.draft_vocab_size > num_tokens:
        what = f"has draft_vocab_size={spec.draft_vocab_size}, the target has {num_tokens} tokens"
        raise _wrong(head, what, SAME_TARGET)


def _check_taps(
    spec: HeadSpec, config: Mapping[str, Any], of_target: Mapping[str, Any], head: Path
) -> None:
    """The layers that the engine reads, as many as `fc` has inputs for."""
    num_layers = of_target.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        raise _wrong(head, "the target's config.json has no num_hidden_layers", SAME_TARGET)
    taps = spec.taps_in(num_layers)
    said = "names no layers of the target, and vLLM's own choice" if not spec.taps else f"{TAPS}"
    where = f"{said} {list(spec.taps or taps)}"
    if outside := [layer for layer in taps if not 0 <= layer < num_layers]:
        what = f"{where}: the target has {num_layers} layers, and no layer {outside[0]}"
        raise _wrong(head, what, SAME_TARGET)
    if len(set(taps)) != spec.num_taps:
        what = f"{where}: one layer is there twice, and each is read once"
        raise _wrong(head, what, SAME_TARGET)
    if spec.num_taps != (read := _num_read(config, head)):
        what = f"{where}: they are {spec.num_taps}, and vLLM gives {read} to the head"
        raise _wrong(head, what, f"set num_aux_hidden_states={spec.num_taps} in its config.json")


def _num_read(config: Mapping[str, Any], head: Path) -> int:
    """Inputs for which vLLM makes `fc` (its `llama_eagle3.py`). It does not count the layers
    that are named outside `eagle_config`."""
    named = (config.get("eagle_config") or {}).get(TAPS)
    return number(config, "num_aux_hidden_states", head, usual=len(named or ()) or 3)


def _check_tensors(spec: HeadSpec, tensors: Mapping[str, Tensor], head: Path) -> None:
    expected = shapes(spec)
    if missing := sorted(set(expected) - set(tensors)):
        what = f"{len(missing)} of its tensors are missing, first {missing[0]}"
        raise _wrong(head, what, f"{COPY}, or correct its config.json, which asks for them")
    allowed = expected | {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    others = set(tensors) - set(allowed) - set(MAPS)
    if unknown := sorted(name for name in others if not name.endswith(ROTARY)):
        what = f"{len(unknown)} of its tensors are unknown, first {unknown[0]}"
        raise _wrong(head, what, "use a head of one Llama layer whose config.json says all it has")
    for name in sorted(set(tensors) & set(allowed)):
        if tuple(tensors[name].shape) != allowed[name]:
            what = f"{name} has shape {list(tensors[name].shape)}, not {list(allowed[name])}"
            raise _wrong(head, what, f"{COPY}, or correct its config.json")
        if tensors[name].dtype not in FLOATS:
            what = f"{name} is {tensors[name].dtype}, and heads in F32, F16 and BF16 are served"
            raise _wrong(head, what, "use a head that is not quantised")
    if spec.hidden_size != spec.target_hidden_size and EMBEDDING not in tensors:
        what = (
            f"has a hidden size of {spec.hidden_size}, the target {spec.target_hidden_size}, and "
            "no embedding of its own"
        )
        raise _wrong(head, what, COPY)


def _check_maps(spec: HeadSpec, tensors: Mapping[str, Tensor], head: Path) -> None:
    """Each draft token i is token `i + d2t[i]` of the target, and `t2d` is true at those."""
    num_draft, num_target = spec.draft_vocab_size, spec.vocab_size
    if num_draft == num_target:
        if D2T in tensors:
            what = "holds d2t, which vLLM does not load where the draft vocabulary is the target's"
            raise _wrong(head, what, "leave d2t and t2d out of its weights")
        return
    if D2T not in tensors:
        what = f"holds no d2t, which says which {num_draft} of {num_target} tokens it proposes"
        raise _wrong(head, what, COPY)
    _check_map(D2T, tensors[D2T], "I64", num_draft, head)
    ids_D = np.arange(num_draft) + numbers(tensors[D2T])
    if (outside := ids_D[(ids_D < 0) | (ids_D >= num_target)]).size:
        what = f"d2t maps to token {outside[0]}, the target has {num_target}"
        raise _wrong(head, what, COPY)
    if (num := len(np.unique(ids_D))) != num_draft:
        what = f"d2t maps its {num_draft} tokens to {num} of the target's"
        raise _wrong(head, what, COPY)
    if T2D in tensors:
        _check_map(T2D, tensors[T2D], "BOOL", num_target, head)
        is_drafted_V = numbers(tensors[T2D])
        if not is_drafted_V[ids_D].all() or is_drafted_V.sum() != num_draft:
            raise _wrong(head, "d2t and t2d name different tokens of the target", COPY)


def _check_map(name: str, tensor: Tensor, dtype: str, size: int, head: Path) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != (size,):
        what = f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} [{size}]"
        raise _wrong(head, what, COPY)
