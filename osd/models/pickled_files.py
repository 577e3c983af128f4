"""Reads weights that torch pickled (`pytorch_model.bin`), as EAGLE's own heads are given.

Only tensors are unpickled (`weights_only`). They look like those of a safetensors file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osd.errors import ConfigError, first_line
from osd.models.checkpoint_files import CHUNK

if TYPE_CHECKING:
    import torch

WEIGHTS = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a type -> that of safetensors."""


@dataclass(frozen=True, slots=True, eq=False)
class PickledTensor:
    """A tensor of such a file, in memory or mapped from it."""

    tensor: torch.Tensor
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, in pieces."""
        import torch

        flat = self.tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK].numpy().tobytes()


def pickle_files(directory: Path) -> list[Path]:
    """The file of a checkpoint that torch pickled, or its shards; [] where there is none. Raises
    `ConfigError` when a shard is missing."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        return []
    try:
        names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{directory / INDEX}: cannot be read ({error}); copy the draft again"
        ) from None
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(
            f"serving.draft={directory}: {missing[0]} is missing; copy the draft again"
        )
    return [directory / name for name in names]


def pickled_tensors(directory: Path) -> dict[str, PickledTensor]:
    """Name -> tensor, over all files. Raises `ConfigError` for a file that holds anything else, or
    is damaged."""
    return {
        name: PickledTensor(tensor, _dtype(file, name, tensor))
        for file in pickle_files(directory)
        for name, tensor in _load(file).items()
    }


def _load(file: Path) -> dict[str, Any]:
    import torch

    try:
        is_mapped = zipfile.is_zipfile(file)  # as torch writes it since 1.6
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        return dict(found)
    except Exception as error:  # noqa: BLE001  the unpickler raises whatever a damaged file leads to
        raise ConfigError(
            f"{file}: not weights that can be read ({first_line(error)}); copy the draft again"
        ) from None


def _dtype(file: Path, name: str, tensor: Any) -> str:
    dtype = DTYPES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
    if dtype is None or not hasattr(tensor, "numel"):
        raise ConfigError(
            f"{file}: {name} is {getattr(tensor, 'dtype', type(tensor).__name__)}, not a tensor "
            "that can be read; save the draft as safetensors"
        )
    return dtype
