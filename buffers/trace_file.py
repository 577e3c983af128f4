"""Files of traces, which `osd traces export` writes and `osd train` reads. `trace_stream.py`
defines their format."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from buffers import trace_stream
from buffers.codec import CorruptTrace, UnknownSchema, decode_trace
from buffers.trace_stream import CutShort
from osd.common.files import explain, fsync
from osd.errors import OSDError
from osd.records import Trace

REMEDY = "give a file of `osd traces export`"


class TraceFile:
    """The traces of a file, iterated once. Damaged traces are skipped, counted and reported in one
    line.

    Raises `OSDError` for a file that cannot be opened or is not a file of traces.

    Example:
        with TraceFile(Path("monday.traces"), print) as file:
            traces = list(file)
    """

    def __init__(self, path: Path, report: Callable[[str], None] = lambda line: None) -> None:
        self.path, self._report = path, report
        self.num_skipped = 0
        """Damaged traces that were skipped; a file that is cut short counts as one."""
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise OSDError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
        try:
            self.target_id = trace_stream.read_header(self._file.read)
        except (OSError, ValueError) as error:
            self._file.close()
            raise OSDError(f"{path}: {error}; {REMEDY}") from None

    def __iter__(self) -> Iterator[Trace]:
        try:
            for number, data in enumerate(trace_stream.read_records(self._file.read), 1):
                trace = self._decode(number, data)
                if trace is not None:
                    yield trace
        except (OSError, CutShort) as error:
            self.num_skipped += 1
            self._report(f"{self.path}: {error}; the traces before it are used, nothing after it")

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _decode(self, number: int, data: bytes) -> Trace | None:
        try:
            return decode_trace(data)
        except (CorruptTrace, UnknownSchema) as error:
            self.num_skipped += 1
            self._report(f"{self.path}: record {number}: {error}; this trace is skipped")
            return None


class TraceWriter:
    """Takes the encoded traces in the body of `write_traces`."""

    def __init__(self, path: Path, file: IO[bytes], target_id: str) -> None:
        self.num_traces = self.num_bytes = 0
        self._path, self._file = path, file
        self._write(trace_stream.header(target_id))

    def add(self, encoded: bytes) -> None:
        """Append one trace."""
        self._write(trace_stream.record(encoded))
        self.num_traces += 1

    def close(self) -> None:
        """Write the end frame, and sync the file to the disk."""
        self._write(trace_stream.end(self.num_traces))
        with _explained(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        with _explained(self._path):
            while left:
                left = left[self._file.write(left) :]  # a nearly full disk writes only a part
        self.num_bytes += len(data)


@contextmanager
def write_traces(path: Path, target_id: str) -> Iterator[TraceWriter]:
    """Write a file that appears at `path`, complete and private to this user, when the body ends
    without an error.

    Raises `OSDError` when the disk is full or read-only. After any error nothing is left of it.
    """
    with _explained(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        # Unbuffered: closing a buffered file after an error would flush once more.
        with os.fdopen(handle, "wb", buffering=0) as file:
            writer = TraceWriter(path, file, target_id)
            yield writer
            writer.close()
        with _explained(path):
            os.replace(name, path)
            fsync(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = None  # the name of the temporary file
        raise OSDError(explain(error, path)) from error
