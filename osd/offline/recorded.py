"""Traces on disk: writes those of a running service to a file, and reads files into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from buffers import trace_stream
from buffers.memory import MemoryTraceBuffer
from buffers.trace_file import TraceFile, write_traces
from osd.client.http import Client
from osd.common.progress import progress
from osd.errors import ConfigError, OSDError
from osd.records import Trace

MAX_REPORTED = 3
"""Damaged traces of a file that are named one by one."""
Say = Callable[[str], None]


def check_new_file(path: Path, option: str, force: bool) -> None:
    """Raise `ConfigError` unless `path` may be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"{option}: {path}: is a directory; name a file")
    if path.exists() and not force:
        raise ConfigError(
            f"{option}: {path}: exists already; name another file, or replace it with --force"
        )


def export(client: Client, path: Path, *, force: bool, say: Say) -> None:
    """Write every trace that a running service has stored to `path`. An error leaves the file
    unchanged."""
    check_new_file(path, "FILE", force)
    with client.stream("/osd/traces") as chunks:
        read = _Reader(chunks).read
        try:
            target_id = trace_stream.read_header(read)
            with (
                write_traces(path, target_id) as file,
                progress("exporting", _num_stored(client), "traces") as advance,
            ):
                for encoded in trace_stream.read_records(read):
                    file.add(encoded)
                    advance(1, f"{file.num_bytes / 1e6:.1f} MB")
                if not file.num_traces:
                    raise OSDError(
                        f"{client.url}: no traces are stored; send some requests first, with "
                        "capture.enabled=true"
                    )
        except ValueError as error:  # a damaged stream; a full disk raises OSDError
            raise OSDError(
                f"{client.url}: the traces did not come whole ({error}); nothing was written"
            ) from None
    say(f"{path}: {file.num_traces} traces, {file.num_bytes} bytes, of target {target_id}")


def _num_stored(client: Client) -> int | None:
    """About how many traces will come; None when the service does not know yet."""
    with suppress(OSDError, KeyError, TypeError):
        held = client.get("/osd/status")["buffer"]
        return int(held["num_traces"]) + int(held["num_holdout"])
    return None


class _Reader:
    """Reads chunks of any size like a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, bytearray()

    def read(self, num: int) -> bytes:
        while len(self._left) < num and (chunk := next(self._chunks, None)) is not None:
            self._left += chunk
        taken = bytes(self._left[:num])
        del self._left[:num]
        return taken


@dataclass(slots=True)
class Recorded:
    """The traces of all files. A request that is in several files counts once."""

    target_id: str
    training: list[Trace] = field(default_factory=list)
    holdout: list[Trace] = field(default_factory=list)
    num_skipped: int = 0
    """Damaged traces."""
    num_repeated: int = 0

    def buffer(self) -> MemoryTraceBuffer:
        """A replay buffer that holds the held-out traces and has room for all others."""
        domains = {trace.domain for trace in [*self.training, *self.holdout]} - {""}
        size = 8 * max(len(self.training), len(self.holdout), 16)
        buffer = MemoryTraceBuffer(
            target_id=self.target_id, max_traces=size, max_domains=len(domains)
        )
        buffer.put(self.holdout)
        return buffer


def check_files(paths: Sequence[Path]) -> None:
    """Raise `OSDError` for a file that cannot be opened, or is not one of traces."""
    for path in paths:
        with TraceFile(path):
            pass


def load(paths: Sequence[Path], say: Say) -> Recorded:
    """Read files of traces. Raises `OSDError` for another kind of file, for traces of two targets,
    and when no trace is left."""
    recorded: Recorded | None = None
    seen: set[str] = set()
    for path in paths:
        reports: list[str] = []
        with TraceFile(path, reports.append) as file:
            recorded = recorded or Recorded(file.target_id)
            _check_target(path, file.target_id, paths[0], recorded.target_id)
            for trace in file:
                _check_target(path, trace.target_id, paths[0], recorded.target_id)
                _add(recorded, trace, seen)
            recorded.num_skipped += file.num_skipped
        _tell(path, reports, say)
    if recorded is None or not recorded.training:
        raise ConfigError(
            f"--traces: {', '.join(map(str, paths))}: no trace to learn from in there"
        )
    return recorded


def _add(recorded: Recorded, trace: Trace, seen: set[str]) -> None:
    if trace.trace_id in seen:
        recorded.num_repeated += 1
        return
    seen.add(trace.trace_id)
    (recorded.holdout if trace.is_holdout else recorded.training).append(trace)


def _check_target(path: Path, target_id: str, first: Path, expected: str) -> None:
    if target_id != expected:
        raise ConfigError(
            f"--traces: {path} holds traces of target {target_id}, {first} of {expected}; "
            "a draft learns from one target: train on them apart"
        )


def _tell(path: Path, reports: list[str], say: Say) -> None:
    for line in reports[:MAX_REPORTED]:
        say(line)
    if len(reports) > MAX_REPORTED:
        say(
            f"{path}: {len(reports) - MAX_REPORTED} more that cannot be read, skipped; the last: "
            f"{reports[-1]}"
        )
