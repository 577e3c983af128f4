"""The connection to hand-written servers: how long it waits, and which servers it accepts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from buffers.link import Link
from buffers.redis_stream import RedisTraceBuffer
from osd.errors import ReplayBufferError
from tests.support.builders import make_traces


def url_of(listener: socket.socket) -> str:
    return f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


def seconds_of(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


@pytest.mark.parametrize(("put_seconds", "read_seconds"), [(0.05, 60.0), (60.0, 0.05)])
def test_storing_and_reading_have_a_patience_each(put_seconds: float, read_seconds: float) -> None:
    """Of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = {"deployment": "a", "target_id": "target-a", "put_seconds": put_seconds}
        buffer = RedisTraceBuffer(url_of(silent), **settings, read_seconds=read_seconds)
        with closing(buffer):
            if put_seconds < 1:
                assert seconds_of(lambda: buffer.put(make_traces(3))) < 20
                assert buffer.dropped == {"redis": 3}
                return
            with pytest.raises(ReplayBufferError, match="(?i)timeout"):
                buffer.num_unread({})


def answer_info(listener: socket.socket, version: bytes) -> None:
    """Answer as a server of that version does, until the client goes."""
    info = b"# Server\r\nredis_version:" + version + b"\r\n"
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65536):
            if b"INFO\r\n" in data:
                data = data.replace(b"INFO\r\n", b"", 1)
                connection.sendall(b"$%d\r\n%s\r\n" % (len(info), info))
            else:
                connection.sendall(b"+OK\r\n" * data.count(b"CLIENT\r\n"))


def test_a_socket_file_is_reached(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        threading.Thread(target=answer_info, args=(listener, b"8.0.0"), daemon=True).start()
        with closing(Link(f"unix://{tmp_path}/s", timeout=10.0)) as link:
            link.check_version()


@pytest.mark.parametrize(
    ("version", "is_accepted"),
    [
        ("6.2.14", False),
        ("6.9", False),
        ("7.0.0", True),
        ("7.2.4", True),
        ("8.0", True),
        ("10.1.2", True),
    ],
)
def test_a_server_older_than_7_is_refused(version: str, is_accepted: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_info, args=(listener, version.encode()), daemon=True).start()
        with closing(Link(url_of(listener), timeout=20)) as link:
            if is_accepted:
                link.check_version()
                return
            with pytest.raises(
                ReplayBufferError, match=f"{version} is too old; use Redis 7.0 or later"
            ):
                link.check_version()
