"""Reads and writes safetensors files as bytes, in pieces and without torch.

The format (https://github.com/huggingface/safetensors#format): the length of the header (8 bytes,
little-endian), the header (JSON: name -> dtype, shape, [begin, end) of the data), the tensors one
after the other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

from osd.common.model_directory import WEIGHTS
from osd.errors import ConfigError

INDEX = "model.safetensors.index.json"
CHUNK = 16 << 20
"""Bytes held in memory at a time."""
ALIGNMENT = 8
LFS_POINTER = b"version "
"""The first 8 bytes of what stands for a large file where Git LFS did not bring it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk."""

    file: Path
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // max(1, self.shape[0])

    def chunks(self, num_bytes: int | None = None) -> Iterator[bytes]:
        """Its first `num_bytes` (None = all), in pieces of whole rows."""
        left = self.num_bytes if num_bytes is None else num_bytes
        row_bytes = max(1, self.row_bytes) if self.shape else 1
        size = max(1, CHUNK // row_bytes) * row_bytes
        with self.file.open("rb") as file:
            file.seek(self.offset)
            while left:
                data = file.read(min(size, left))
                if not data:
                    raise ConfigError(f"{self.file}: ends too early; copy the draft again")
                left -= len(data)
                yield data

    def with_rows(self, num_rows: int) -> StoredTensor:
        """The same tensor with `num_rows` rows."""
        shape = (num_rows, *self.shape[1:])
        return replace(self, shape=shape, num_bytes=self.row_bytes * num_rows)


def weight_files(directory: Path) -> list[Path]:
    """The file of a checkpoint, or its shards. Raises `ConfigError` when one is missing."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    try:
        names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    except FileNotFoundError:
        raise ConfigError(
            f"serving.draft={directory}: no {WEIGHTS} there, nor shards with {INDEX}; save the "
            "draft as safetensors (`model.save_pretrained(directory)`)"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{directory / INDEX}: cannot be read ({error}); copy the draft again"
        ) from None
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(
            f"serving.draft={directory}: {missing[0]} is missing; copy the draft again"
        )
    return [directory / name for name in names]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, over all files of a checkpoint. Raises `ConfigError` for a damaged file."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        try:
            found |= _read_header(file)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise ConfigError(
                f"{file}: not a safetensors file that can be read ({error}); copy the draft again"
            ) from None
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as data:
        if (begin := data.read(8)) == LFS_POINTER:
            raise ValueError("it is a pointer of Git LFS, for which `git lfs pull` gets the file")
        (length,) = struct.unpack("<Q", begin)
        if length > file.stat().st_size:  # as of any other file: no memory holds so much
            raise ValueError("its header is longer than the file")
        header = json.loads(data.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            found[name] = StoredTensor(file, entry["dtype"], shape, 8 + length + begin, end - begin)
    if max((t.offset + t.num_bytes for t in found.values()), default=0) > file.stat().st_size:
        raise ValueError("it is shorter than its header says")
    return found


class Described(Protocol):
    """What the header of a file says of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...


def write_checkpoint(
    path: Path, tensors: Mapping[str, Described], content: Callable[[str], Iterator[bytes]]
) -> None:
    """Write these tensors to one safetensors file. `content(name)` yields the bytes of one."""
    # Wide types first: every tensor then begins at a multiple of its width, which readers that map
    # the file need.
    names = sorted(tensors, key=lambda name: (-_width(tensors[name]), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            _write(file, name, tensors[name], content(name))


def _write(file: BinaryIO, name: str, tensor: Described, chunks: Iterator[bytes]) -> None:
    written = sum(file.write(chunk) for chunk in chunks)
    assert written == tensor.num_bytes, (
        f"{name}: {written} bytes written, {tensor.num_bytes} promised"
    )


def _width(tensor: Described) -> int:
    """Bytes per number."""
    return tensor.num_bytes // max(1, prod(tensor.shape))
