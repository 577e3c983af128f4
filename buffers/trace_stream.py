"""A sequence of traces as bytes: the format of trace files, and of what the control port sends.

    "OSDH" length | header (JSON: format, version, target_id)
    "OSDR" length | a trace as `buffers/codec.py` encodes it          any number of these
    "OSDE" length | end (JSON: num_traces)

Lengths are u32, little-endian. The end frame shows that no traces are missing. Each trace has its
own CRC, so a damaged one is skipped and the next is read. Nothing is ever unpickled.
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
"""Traces read from a buffer at a time."""

_FRAME = struct.Struct("<4sI")
_MOST = {HEADER: 4096, RECORD: MAX_TRACE_BYTES, END: 4096}
"""Most bytes of each kind of frame."""

Read = Callable[[int], bytes]
"""Like a file's `read(n)`: returns fewer than n bytes only at the end."""


class CutShort(ValueError):
    """The rest of the stream cannot be read: the end is missing, or a frame does not begin where it
    should."""


class _Header(msgspec.Struct, kw_only=True):
    format: str
    version: int
    target_id: str


class _End(msgspec.Struct, kw_only=True):
    num_traces: int


# Writing


def header(target_id: str) -> bytes:
    """The first frame of a stream of this target's traces."""
    return _frame(
        HEADER, msgspec.json.encode(_Header(format=FORMAT, version=VERSION, target_id=target_id))
    )


def record(encoded: bytes) -> bytes:
    """The frame of one encoded trace."""
    return _frame(RECORD, encoded)


def end(num_traces: int) -> bytes:
    """The last frame of a stream."""
    return _frame(END, msgspec.json.encode(_End(num_traces=num_traces)))


def stream(buffer: TraceBuffer, target_id: str) -> Iterator[bytes]:
    """Everything that a buffer holds now, frame by frame. The buffer is asked before the first
    frame.

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
    """Every trace that a buffer holds now: training traces, then held-out ones. Traces that arrive
    meanwhile are left out."""
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
    """The target_id of the traces that follow. Raises `ValueError` when this is no header."""
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
    """The encoded traces after the header. Raises `CutShort`, naming the record, when the stream
    ends without its end frame."""
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
