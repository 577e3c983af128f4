"""The bytes of a `Trace`: a checked format, so that data from a server is never unpickled.

    magic "OSDT" | version u16 | 0 u16 | header length u32 | header (JSON) | arrays | CRC32 u32

All numbers are little-endian. The header holds the scalars and the dtype and shape of each array.
The sizes of the arrays must add up to the bytes that follow, which is checked before any array is
made. The CRC covers all bytes before it.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import msgspec
import numpy as np

from osd.records import Trace

SCHEMA_VERSION = 1
MAX_TRACE_BYTES = 64 << 20
"""Length of the longest encoding that is written or read."""

_MAGIC = b"OSDT"
_PREFIX = struct.Struct("<4sHHI")
_CRC = struct.Struct("<I")
_MAX_HEADER_BYTES = 16 << 10
_ARRAYS = {
    "prompt_ids": ("<i4", 1),
    "output_ids": ("<i4", 1),
    "position": ("<i4", 1),
    "kind": ("|i1", 1),
    "draft_ids": ("<i4", 1),
    "target_ids": ("<i4", 2),
    "target_logprobs": ("<f2", 2),
    "tail_logprob": ("<f4", 1),
    "keep_prob": ("<f4", 1),
    "draft_version": ("<i4", 1),
}
"""Arrays of schema version 1 in the order they are written: dtype and number of dimensions."""
_FLOATS = ("finished_at", "temperature", "top_p")


class UnknownSchema(ValueError):
    """A trace, but of a schema version this code does not know."""


class CorruptTrace(ValueError):
    """Not a trace, or one that was cut short or altered."""


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: list[int]


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    trace_id: str
    draft: str
    target_id: str
    domain: str
    finished_at: float
    temperature: float
    top_p: float
    top_k: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    arrays: list[_Array]


_SCALARS = tuple(name for name in _Header.__struct_fields__ if name != "arrays")


def encode_trace(trace: Trace) -> bytes:
    """The trace as bytes. Raises `ValueError` when a scalar is not finite or the encoding is too
    long."""
    for name in _FLOATS:
        if not math.isfinite(getattr(trace, name)):
            raise ValueError(f"trace {trace.trace_id}: {name} is {getattr(trace, name)}")
    arrays = {
        name: getattr(trace, name).astype(dtype, copy=False) for name, (dtype, _) in _ARRAYS.items()
    }
    header = _Header(
        **{name: getattr(trace, name) for name in _SCALARS},
        arrays=[
            _Array(name, _ARRAYS[name][0], list(array.shape)) for name, array in arrays.items()
        ],
    )
    head = msgspec.json.encode(header)
    if len(head) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"trace {trace.trace_id[:64]}: header of {len(head)} bytes, at most {_MAX_HEADER_BYTES}"
        )
    prefix = _PREFIX.pack(_MAGIC, SCHEMA_VERSION, 0, len(head))
    data = b"".join([prefix, head, *(array.tobytes() for array in arrays.values())])
    if len(data) + _CRC.size > MAX_TRACE_BYTES:
        raise ValueError(
            f"trace {trace.trace_id}: {len(data)} bytes encoded, at most {MAX_TRACE_BYTES}"
        )
    return data + _CRC.pack(zlib.crc32(data))


def decode_trace(data: bytes, *, is_shared: bool = False) -> Trace:
    """The trace, with writable arrays of its own. `is_shared` is not among its bytes.

    Raises `UnknownSchema` for another schema version and `CorruptTrace` for any other defect. The
    length of `data` bounds the memory used, whatever `data` claims.
    """
    body_end = len(data) - _CRC.size
    head_end = _check_frame(data, body_end)
    try:
        header = msgspec.json.decode(data[_PREFIX.size : head_end], type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptTrace(f"header: {error}") from None
    sizes = _check_arrays(header.arrays, body_end - head_end)
    values: dict[str, Any] = {name: getattr(header, name) for name in _SCALARS}
    values["is_shared"] = is_shared
    offset = head_end
    for array, size in zip(header.arrays, sizes, strict=True):
        flat = np.frombuffer(data, np.dtype(array.dtype), math.prod(array.shape), offset)
        values[array.name] = flat.reshape(array.shape).astype(
            flat.dtype.newbyteorder("="), copy=True
        )
        offset += size
    try:
        return Trace(**values)
    except ValueError as error:
        raise CorruptTrace(str(error)) from None


def _check_frame(data: bytes, body_end: int) -> int:
    """Check magic, version, lengths and CRC; return the offset of the header's end."""
    if len(data) < _PREFIX.size + _CRC.size:
        raise CorruptTrace(f"{len(data)} bytes are too few")
    if len(data) > MAX_TRACE_BYTES:
        raise CorruptTrace(f"{len(data)} bytes, at most {MAX_TRACE_BYTES}")
    magic, version, reserved, head_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptTrace(f"starts with {magic!r}, expected {_MAGIC!r}")
    if version != SCHEMA_VERSION:
        raise UnknownSchema(f"schema version {version}, this code knows {SCHEMA_VERSION}")
    head_end = _PREFIX.size + head_bytes
    if reserved or head_bytes > _MAX_HEADER_BYTES or head_end > body_end:
        raise CorruptTrace(f"header of {head_bytes} bytes in {len(data)}")
    if zlib.crc32(memoryview(data)[:body_end]) != _CRC.unpack_from(data, body_end)[0]:
        raise CorruptTrace("CRC32 does not match")
    return head_end


def _check_arrays(arrays: list[_Array], num_bytes: int) -> list[int]:
    """Check names, dtypes and shapes against the schema and the bytes present; return each array's
    size in bytes."""
    if [array.name for array in arrays] != list(_ARRAYS):
        raise CorruptTrace("arrays are not those of the schema")
    sizes = []
    for array in arrays:
        dtype, ndim = _ARRAYS[array.name]
        if array.dtype != dtype or len(array.shape) != ndim:
            raise CorruptTrace(f"{array.name}: {array.dtype} with {len(array.shape)} dimensions")
        if any(not 0 <= length <= MAX_TRACE_BYTES for length in array.shape):
            raise CorruptTrace(f"{array.name}: impossible shape")
        sizes.append(math.prod(array.shape) * np.dtype(dtype).itemsize)
    if sum(sizes) != num_bytes:
        raise CorruptTrace(f"arrays of {sum(sizes)} bytes, {num_bytes} are there")
    return sizes
