"""The form of the draft an engine started with. A release is read here, and refused where its form
is another.

    draft model     names and shapes of its tensors, what its config.json says of its architecture
    EAGLE-3 head    the same, which layers of the target it reads, and its maps d2t and t2d, bit by
                    bit: they say which tokens it proposes, and stay as they are
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from osd.errors import ConfigError, SwapError
from osd.models import eagle3
from osd.models.heads import draft_head
from osd.models.tensor_file import TensorFile
from osd.records import DraftRelease

WEIGHTS = "model.safetensors"
ARCHITECTURE_KEYS = (
    "architectures",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rotary_pct",
    "use_parallel_residual",
    "max_position_embeddings",
)
"""Entries of `config.json` that must not change, since only weights are swapped."""
LAYER_KEYS = (*ARCHITECTURE_KEYS, "attention_bias", "rope_scaling")
"""Those of a head's layer, wherever its tool writes them."""
HEAD_FIELDS = (
    "draft_vocab_size",
    "taps",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "has_fc_norm",
    "norm_output",
)
"""What else makes a head compute what it does: fields of its `HeadSpec`."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The form of the draft the engine started with, which every release must have."""

    shapes: Mapping[str, tuple[int, ...]]
    architecture: Mapping[str, object]
    masks: frozenset[str]
    """Names of tensors of integers or booleans: masks in older checkpoints (Pythia), maps in
    heads."""
    maps: Tensors = field(default_factory=dict)
    """Those of a head, which no release may change."""

    @classmethod
    def of(cls, directory: Path) -> DraftShape:
        """The form of the draft in a directory. Raises `SwapError` for a head that is not
        served."""
        config = json.loads((directory / "config.json").read_text())
        architecture = architecture_of(config, directory)
        with safe_open(directory / WEIGHTS, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
            masks = frozenset(n for n, kind in dtypes.items() if kind == "BOOL" or kind[0] in "IU")
            is_head = eagle3.is_eagle3(config)
            # Copies, for as long as the engine runs: what is read of a mapped file is not.
            maps = {name: weights.get_tensor(name).clone() for name in masks} if is_head else {}
        return cls(shapes, architecture, masks, maps)


def architecture_of(config: Mapping[str, object], directory: Path) -> dict[str, object]:
    """What a `config.json` says that no release may change. Raises `SwapError` for a head that is
    not served."""
    if not eagle3.is_eagle3(config):
        refuse_head(config)
        return {key: config.get(key) for key in ARCHITECTURE_KEYS}
    try:
        spec = eagle3.spec_of(config, directory)
    except ConfigError as error:
        raise SwapError(str(error)) from None
    of_layer = {key: spec.layer.get(key) for key in LAYER_KEYS}
    of_head = {name: getattr(spec, name) for name in HEAD_FIELDS}
    return of_layer | of_head | {"architectures": config.get("architectures")}


def read_release(release: DraftRelease, expected: DraftShape) -> dict[str, torch.Tensor]:
    """The tensors of a release. Raises `SwapError` saying what does not fit."""
    directory = Path(release.path)
    try:
        file = TensorFile(directory / WEIGHTS)
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SwapError(f"{directory} cannot be read: {error}") from None
    if (digest := file.sha256) != release.sha256:
        raise SwapError(
            f"sha256 of {WEIGHTS} is {digest[:12]}, release.json says {release.sha256[:12]}"
        )
    found = architecture_of(config, directory)
    for key, value in expected.architecture.items():
        if found.get(key) != value:
            raise SwapError(f"config.json has {key}={found.get(key)!r}, the engine runs {value!r}")
    try:
        tensors = file.tensors()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SwapError(f"{WEIGHTS} is damaged: {error}") from None
    check_tensors(tensors, expected)
    return tensors


def refuse_head(config: Mapping[str, object]) -> None:
    """Raise `SwapError` for the `config.json` of a draft head, but for those that are served."""
    if what := draft_head(config):
        raise SwapError(
            f"it is a draft head ({what}), and of heads only EAGLE-3 heads of one Llama layer are "
            "served"
        )


def check_tensors(tensors: Tensors, expected: DraftShape) -> None:
    """Raise `SwapError` unless names and shapes are as expected, every number is finite, and a
    head's maps are those of the start."""
    shapes = expected.shapes
    if missing := sorted(set(shapes) - set(tensors)):
        raise SwapError(f"{len(missing)} tensors are missing, first {missing[0]}")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise SwapError(f"{len(unknown)} tensors are unknown, first {unknown[0]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise SwapError(f"{name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if name in expected.maps:
            _check_map(name, tensor, expected.maps[name])
        if name in expected.masks:
            continue
        if not tensor.is_floating_point():
            raise SwapError(f"{name} is {tensor.dtype}, expected floating point")
        if not torch.isfinite(tensor).all():
            raise SwapError(f"{name} holds NaN or infinite values")


def _check_map(name: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
        raise SwapError(
            f"{name} is another than the engine's: a head goes on with the draft vocabulary it "
            "began with"
        )
