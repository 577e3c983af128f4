"""A file of tensors, read into memory once.

safetensors maps files instead. Where one is cut short under a mapping, or removed by another
machine that shares it, the next look at its tensors ends the process, be it an engine's or the
trainer's; where one is written over, these are no longer the tensors whose digest was right.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile:
    """The content of a safetensors file. Raises `OSError` where it cannot be read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            data = bytearray(path.stat().st_size)
            del data[file.readinto(data) :]
        self._data = data

    @property
    def sha256(self) -> str:
        """Hexadecimal digest."""
        return hashlib.sha256(self._data).hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """They share the memory of what was read. Raises `ValueError`, `KeyError`,
        `TypeError` or `AttributeError` for a damaged file."""
        begin = 8 + int.from_bytes(self._data[:8], "little")
        if begin > len(self._data):
            raise ValueError("it ends within its header")
        parts = json.loads(self._data[8:begin])
        return {
            name: self._tensor(part, begin)
            for name, part in parts.items()
            if name != "__metadata__"
        }

    def _tensor(self, part: Mapping[str, Any], begin: int) -> torch.Tensor:
        (start, end), dtype = part["data_offsets"], DTYPES[part["dtype"]]
        num = math.prod(part["shape"])
        if not 0 <= start <= end <= len(self._data) - begin or end - start != num * dtype.itemsize:
            raise ValueError("tensors lie outside of it")
        if not num:
            return torch.empty(part["shape"], dtype=dtype)
        flat = torch.frombuffer(self._data, dtype=dtype, count=num, offset=begin + start)
        return flat.reshape(part["shape"])
