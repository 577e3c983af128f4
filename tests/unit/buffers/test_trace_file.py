"""Files of traces: what was written is read, and damaged parts are never taken for a trace."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from buffers import trace_stream
from buffers.codec import encode_trace
from buffers.memory import MemoryTraceBuffer
from buffers.trace_file import TraceFile, write_traces
from osd.errors import OSDError
from osd.records import Trace
from tests.support.builders import assert_same_trace, ids, make_traces
from tests.support.tiny_drafts import files_of_at_most

TARGET = "target-a"
TRACES = make_traces(3, num_prompt=1, num_output=2, num_rows=1, top_k=2)


def write(path: Path, traces: list[Trace] = TRACES) -> Path:
    with write_traces(path, TARGET) as file:
        for trace in traces:
            file.add(encode_trace(trace))
        assert file.num_traces == len(traces)
    return path


def read(path: Path) -> tuple[list[Trace], list[str]]:
    """The traces, and what was said of those that could not be read."""
    said: list[str] = []
    with TraceFile(path, said.append) as file:
        traces = list(file)
        assert file.target_id == TARGET
        assert file.num_skipped == len(said)
    return traces, said


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "traces")


def test_what_is_written_is_read_again(file: Path) -> None:
    traces, said = read(file)
    assert said == []
    for got, expected in zip(traces, TRACES, strict=True):
        assert_same_trace(got, expected)


def test_only_this_user_may_read_it(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_without_traces(tmp_path: Path) -> None:
    assert read(write(tmp_path / "empty", [])) == ([], [])


def test_cut_anywhere_it_yields_what_came_before_and_says_where_it_ends(file: Path) -> None:
    data = file.read_bytes()
    ends = record_ends()
    assert ends[-1] < len(data)
    for length in range(len(data)):
        file.write_bytes(data[:length])
        if length < len(trace_stream.header(TARGET)):
            with pytest.raises(
                OSDError, match="not a file of traces; give a file of `osd traces export`"
            ):
                read(file)
            continue
        traces, said = read(file)
        num_whole = sum(end <= length for end in ends)
        assert ids(traces) == ids(TRACES[:num_whole]), length
        for got, expected in zip(traces, TRACES, strict=False):
            assert_same_trace(got, expected)
        expected_line = (
            f"{file}: record {num_whole + 1}: cut short; the traces before it are used, "
            "nothing after it"
        )
        assert said == [expected_line], length


def record_ends() -> list[int]:
    """Where each trace ends in the file."""
    at, found = len(trace_stream.header(TARGET)), []
    for trace in TRACES:
        at += len(trace_stream.record(encode_trace(trace)))
        found.append(at)
    return found


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_a_changed_byte_never_yields_a_trace_that_was_not_written(file: Path, mask: int) -> None:
    data = bytearray(file.read_bytes())
    expected = {trace.trace_id: trace for trace in TRACES}
    num_noticed = 0
    start = len(trace_stream.header(TARGET))
    for index in range(start, len(data)):
        data[index] ^= mask
        file.write_bytes(data)
        traces, said = read(file)
        for trace in traces:
            assert_same_trace(trace, expected[trace.trace_id])
        num_noticed += bool(said)
        data[index] ^= mask
    assert num_noticed == len(data) - start, "each change is noticed"


def test_one_damaged_trace_costs_that_trace_alone(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[record_ends()[1] - 10] ^= 1
    file.write_bytes(data)
    traces, said = read(file)
    assert ids(traces) == [TRACES[0].trace_id, TRACES[2].trace_id]
    assert said == [f"{file}: record 2: CRC32 does not match; this trace is skipped"]


@pytest.mark.parametrize(
    "content", [b"", b"hello, this is text", b"\x00" * 64, b"OSDR\x01\x00\x00\x00x"]
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(OSDError, match="other: not a file of traces"):
        TraceFile(tmp_path / "other")


def test_a_newer_file_is_refused_by_its_version(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(OSDError, match="is of version 2, this program reads version 1"):
        TraceFile(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(OSDError, match="cannot be read .No such file or directory."):
        TraceFile(tmp_path / "none")


def test_an_error_while_writing_leaves_the_old_file(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(RuntimeError), write_traces(file, TARGET) as writer:
        writer.add(encode_trace(TRACES[0]))
        raise RuntimeError
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("num_bytes", [0, 20, 700, 1200])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, num_bytes: int) -> None:
    assert len(write(tmp_path / "whole").read_bytes()) > 1200
    (tmp_path / "whole").unlink()
    with (
        pytest.raises(OSDError, match=f"^{tmp_path / 'traces'}: File too large"),
        files_of_at_most(num_bytes),
    ):
        write(tmp_path / "traces")
    assert os.listdir(tmp_path) == []


def test_a_buffer_as_a_stream_holds_training_and_held_out_traces_of_all_domains() -> None:
    buffer = MemoryTraceBuffer(target_id=TARGET)
    traces = make_traces(40, domain="a") + make_traces(40, start=100, domain="b", holdout=None)
    buffer.put(traces)
    chunks = b"".join(trace_stream.stream(buffer, TARGET))
    data = memoryview(chunks)

    def take(num: int) -> bytes:
        nonlocal data
        taken, data = bytes(data[:num]), data[num:]
        return taken

    assert trace_stream.read_header(take) == TARGET
    records = list(trace_stream.read_records(take))
    assert not data
    assert sorted(records) == sorted(encode_trace(trace) for trace in traces)
