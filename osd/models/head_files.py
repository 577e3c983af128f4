"""The weights of a head on disk, in whichever format, and its first release.

*.safetensors ─┐                             config.json, as it was
               ├► names, dtypes, bytes ────► model.safetensors, one file
*.bin ─────────┘
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np

from osd.common.files import fsync
from osd.common.model_directory import copy_model, model_files
from osd.models.checkpoint_files import (
    WEIGHTS,
    Described,
    stored_tensors,
    weight_files,
    write_checkpoint,
)
from osd.models.eagle3 import EMBEDDING
from osd.models.pickled_files import pickle_files, pickled_tensors

NUMBERS = {"I64": "<i8", "BOOL": "?"}


class Tensor(Described, Protocol):
    """A tensor on disk."""

    def chunks(self) -> Iterator[bytes]: ...


def head_tensors(directory: Path) -> Mapping[str, Tensor]:
    """Name -> tensor, over all files. Raises `ConfigError` when one is missing or damaged."""
    return pickled_tensors(directory) if is_pickled(directory) else stored_tensors(directory)


def is_pickled(directory: Path) -> bool:
    """Whether the head has weights in torch's format alone."""
    return not any(directory.glob("*.safetensors")) and bool(pickle_files(directory))


def numbers(tensor: Tensor) -> np.ndarray:
    """The content of a tensor of integers or booleans, flat."""
    return np.frombuffer(b"".join(tensor.chunks()), NUMBERS[tensor.dtype])


def write_head(source: Path, aside: Path) -> None:
    """Copy the head in `source` to `aside`, its weights as one safetensors file: the same names,
    dtypes and numbers. Raises `ConfigError` for a damaged head."""
    tensors = head_tensors(source)
    if not is_pickled(source) and weight_files(source) == [source / WEIGHTS]:
        copy_model(source, aside)
        return
    write_checkpoint(aside / WEIGHTS, tensors, lambda name: tensors[name].chunks())
    for path in model_files(source):
        if not path.name.endswith(".index.json") and path.suffix != ".safetensors":
            shutil.copyfile(path, aside / path.name)
    for path in aside.iterdir():
        fsync(path)


def has_targets_embedding(target: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a head of these tensors embeds as the target does: it has no embedding of its own, or
    a copy of the target's. vLLM then keeps one."""
    own = tensors.get(EMBEDDING)
    known = stored_tensors(target)
    theirs = next((known[name] for name in known if name.endswith(EMBEDDING)), None)
    if own is None or theirs is None:
        return own is None
    if (own.dtype, own.num_bytes) != (theirs.dtype, theirs.num_bytes):
        return False
    return all(a == b for a, b in zip_longest(own.chunks(), theirs.chunks()))
