"""How a record becomes JSON and is read again."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

R = TypeVar("R")


def encode(record: Any) -> bytes:
    """JSON of any record but `Trace` (which has its own codec in `buffers/codec.py`)."""
    return msgspec.json.encode(record)


def decode(data: bytes | str, record_type: type[R]) -> R:
    """The record from its JSON. Raises `ValueError` naming the first field that does not fit."""
    return msgspec.json.decode(data, type=record_type)
