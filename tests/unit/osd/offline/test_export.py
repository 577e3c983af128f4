"""`osd traces export` from a real control port over a buffer in memory.

What is exported, who may export, and what goes wrong.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from buffers import trace_stream
from buffers.memory import MemoryTraceBuffer
from osd.client.http import Client
from osd.errors import ConfigError, OSDError, ReplayBufferError
from osd.observe.dashboard import ControlServer, build_app
from osd.offline import recorded
from tests.support.builders import ids, make_traces
from tests.support.tiny_drafts import files_of_at_most

TOKEN = "correct-horse"
TARGET = "target-a"


class FakeController:
    """As much of a controller as an export asks for."""

    def status(self) -> dict[str, object]:
        return {"buffer": {"num_traces": 5, "num_holdout": 2}}


class FakeHistory:
    """A history without any."""

    async def series(self, since: float, bucket_s: float) -> dict[str, list[float]]:
        return {}


class Port:
    """A control port; a test may replace what it streams."""

    def __init__(self) -> None:
        self.buffer = MemoryTraceBuffer(target_id=TARGET)
        self.traces: Callable[[], Iterator[bytes]] = lambda: trace_stream.stream(
            self.buffer, TARGET
        )
        app = build_app(FakeController(), FakeHistory(), TOKEN, traces=lambda: self.traces())
        self.server = ControlServer.of(app, host="127.0.0.1", port=0)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve()), daemon=True
        )

    def __enter__(self) -> Port:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
        self.url = f"http://127.0.0.1:{self.server.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def port() -> Iterator[Port]:
    with Port() as port:
        yield port


def export(port: Port, path: Path, *, token: str = TOKEN, force: bool = False) -> list[str]:
    said: list[str] = []
    recorded.export(Client(port.url, token=token), path, force=force, say=said.append)
    return said


def test_every_stored_trace_is_written(port: Port, tmp_path: Path) -> None:
    training = make_traces(80, domain="code")
    held_out = make_traces(9, start=200, holdout=True)
    port.buffer.put(training + held_out)
    said = export(port, tmp_path / "traces")
    size = (tmp_path / "traces").stat().st_size
    assert said == [f"{tmp_path / 'traces'}: 89 traces, {size} bytes, of target {TARGET}"]
    loaded = recorded.load([tmp_path / "traces"], print)
    assert ids(loaded.training) == ids(training)
    assert ids(loaded.holdout) == ids(held_out)
    assert {trace.domain for trace in loaded.training} == {"code"}


def test_without_the_token_nothing_is_told(port: Port, tmp_path: Path) -> None:
    port.buffer.put(make_traces(3))
    with pytest.raises(
        OSDError, match="GET /osd/traces: wrong token; send `Authorization: Bearer TOKEN`"
    ):
        export(port, tmp_path / "traces", token="guess")
    answer = httpx.get(f"{port.url}/osd/traces")
    assert answer.status_code == 401
    assert b"OSD" not in answer.content.replace(b"/osd/", b"")
    assert os.listdir(tmp_path) == []


def test_no_traces(port: Port, tmp_path: Path) -> None:
    with pytest.raises(OSDError, match="no traces are stored; send some requests first"):
        export(port, tmp_path / "traces")
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_kept_unless_forced(port: Port, tmp_path: Path) -> None:
    port.buffer.put(make_traces(3))
    (tmp_path / "traces").write_text("precious")
    with pytest.raises(
        ConfigError, match="traces: exists already; name another file, or replace it with --force"
    ):
        export(port, tmp_path / "traces")
    assert (tmp_path / "traces").read_text() == "precious"
    export(port, tmp_path / "traces", force=True)
    assert len(recorded.load([tmp_path / "traces"], print).training) == 3


def test_a_directory_that_is_not_there(port: Port, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"there is no directory {tmp_path / 'none'}; make it first"
    ):
        export(port, tmp_path / "none" / "traces")


def test_a_full_disk(port: Port, tmp_path: Path) -> None:
    port.buffer.put(make_traces(40))
    with (
        pytest.raises(OSDError, match=f"^{tmp_path / 'traces'}: File too large"),
        files_of_at_most(9000),
    ):
        export(port, tmp_path / "traces")
    assert os.listdir(tmp_path) == []


def test_a_service_that_is_gone(port: Port, tmp_path: Path) -> None:
    port.__exit__()
    with pytest.raises(OSDError, match=f"{port.url}: no answer .*; is the service running?"):
        export(port, tmp_path / "traces")


def test_a_buffer_that_is_away(port: Port, tmp_path: Path) -> None:
    class Away(MemoryTraceBuffer):
        def stats(self) -> None:  # type: ignore[override]
            raise ReplayBufferError("Redis at redis://x cannot be used")

    port.buffer = Away(target_id=TARGET)
    with pytest.raises(OSDError, match="^Redis at redis://x cannot be used$"):
        export(port, tmp_path / "traces")


def test_a_stream_that_breaks_leaves_the_old_file(port: Port, tmp_path: Path) -> None:
    port.buffer.put(make_traces(40))
    whole = list(trace_stream.stream(port.buffer, TARGET))

    def breaks() -> Iterator[bytes]:
        yield from whole[:20]
        raise RuntimeError("the server dies")

    (tmp_path / "traces").write_text("old")
    port.traces = breaks
    with pytest.raises(OSDError, match="no answer .*; is the service running"):
        export(port, tmp_path / "traces", force=True)
    port.traces = lambda: iter(whole[:20])
    with pytest.raises(
        OSDError, match="the traces did not come whole .record 20: cut short.; nothing was written"
    ):
        export(port, tmp_path / "traces", force=True)
    assert os.listdir(tmp_path) == ["traces"]
    assert (tmp_path / "traces").read_text() == "old"
