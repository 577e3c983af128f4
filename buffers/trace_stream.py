"""Traces one after another as bytes: what stands in a file of traces, and what the control port sends.

    "OSDH" length | header (JSON: format, version, target_id)
    "OSDR" length | a trace as `buffers/codec.py` encodes it          any number of these
    "OSDE" length | end (JSON: num_traces)

Lengths are u32, little-endian. The end tells a whole stream from one cut short between two traces. Each trace carries
its own CRC, so a damaged one is passed over and the next is read; nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from buffers.base import Cursor, TraceBuffer
from buffers.codec import MAX_TRACE_BYTES, encode_trace
from osd.records import Trace

FORMAT, VERSION = "osd-traces", 1
HEADER, RECORD, END = b"OSDH", b"OSDR", b"OSDE"
READ_CHUNK = 32
"""Traces taken from a buffer at a time."""

_FRAME = struct.Struct("<4sI")
_MOST = {HEADER: 4096, RECORD: MAX_TRACE_BYTES, END: 4096}
"""Bytes each kind of frame may have."""

Read = Callable[[int], bytes]
"""Like a file's `read(n)`: fewer than n bytes only at the end."""


class CutShort(ValueError):
    """What follows cannot be read any more: the end is missing, or no frame begins where one should."""


class _Header(msgspec.Struct, kw_only=True):
    format: str
    version: int
    target_id: str


class _End(msgspec.Struct, kw_only=True):
    num_traces: int


# Writing


def header(target_id: str) -> bytes:
    """What a stream of this target's traces begins with."""
    return _frame(HEADER, msgspec.json.encode(_Header(format=FORMAT, version=VERSION, target_id=target_id)))


def record(encoded: bytes) -> bytes:
    """One encoded trace as it stands in a stream."""
    return _frame(RECORD, encoded)


def end(num_traces: int) -> bytes:
    """What a whole stream ends with."""
    return _frame(END, msgspec.json.encode(_End(num_traces=num_traces)))


def stream(buffer: TraceBuffer, target_id: str) -> Iterator[bytes]:
    """All that a buffer holds now, a frame at a time. Nothing is yielded before the buffer answered once.

    Raises `ReplayBufferError` when it cannot be reached.
    """
    traces = stored(buffer)
    first = next(traces, None)
    yield header(target_id)
    num = 0
    while first is not None:
        yield record(encode_trace(first))
        num, first = num + 1, next(traces, None)
    yield end(num)


def stored(buffer: TraceBuffer) -> Iterator[Trace]:
    """Every trace a buffer holds now: training ones, then held-out ones. What arrives meanwhile is left out."""
    num_holdout = buffer.stats().num_holdout
    cursor: Cursor = {}
    left = buffer.num_unread(cursor)
    while left > 0:
        traces, cursor = buffer.read(cursor, min(left, READ_CHUNK))
        if not traces:
            break
        left -= len(traces)
        yield from traces
    yield from buffer.holdout(num_holdout)


def _frame(tag: bytes, data: bytes) -> bytes:
    return _FRAME.pack(tag, len(data)) + data


# Reading


def read_header(read: Read) -> str:
    """The target_id of the traces that follow. Raises `ValueError` with the reason when there is none."""
    try:
        tag, data = _next_frame(read)
        found = msgspec.json.decode(data, type=_Header)
    except (CutShort, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a file of traces") from None
    if tag != HEADER or found.format != FORMAT:
        raise ValueError("not a file of traces")
    if found.version != VERSION:
        raise ValueError(f"is of version {found.version}, this program reads version {VERSION}")
    return found.target_id


def read_records(read: Read) -> Iterator[bytes]:
    """The encoded traces after the header. Raises `CutShort`, naming the record, unless the end comes in its place."""
    num = 0
    while True:
        try:
            tag, data = _next_frame(read)
            if tag == END:
                return _check_end(data, num)
            if tag != RECORD:
                raise CutShort("no trace begins where it should")
        except CutShort as error:
            raise CutShort(f"record {num + 1}: {error}") from None
        num += 1
        yield data


def _check_end(data: bytes, num_traces: int) -> None:
    try:
        found: Any = msgspec.json.decode(data, type=_End).num_traces
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = None
    if found != num_traces:
        raise CutShort(f"the end does not count the {num_traces} traces before it")


def _next_frame(read: Read) -> tuple[bytes, bytes]:
    prefix = read(_FRAME.size)
    if len(prefix) < _FRAME.size:
        raise CutShort("cut short")
    tag, length = _FRAME.unpack(prefix)
    if length > _MOST.get(tag, -1):
        raise CutShort("no trace begins where it should")
    data = read(length)
    if len(data) < length:
        raise CutShort("cut short")
    return tag, data
