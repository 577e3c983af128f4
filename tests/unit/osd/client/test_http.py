"""What the commands say of an address that is none, and of one where something else answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from buffers import aof
from buffers.redis_stream import READ_SECONDS
from osd.client.http import Client
from osd.client.load import send
from osd.errors import ConfigError, OSDError
from osd.service import note


class Page(BaseHTTPRequestHandler):
    """A web server's front page, whatever is asked for; or its way there."""

    def do_GET(self) -> None:
        self.send_response(302 if "history" in self.path else 200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSD_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "status"), [("/osd/status", 200), ("/osd/history", 302)])
def test_another_server_is_told_in_one_line(page: str, path: str, status: int) -> None:
    with pytest.raises(OSDError, match=f"{page}{path}: answered {status}; is this the control"):
        Client(page).get(path)


async def test_no_proxy_of_the_environment_stands_before_this_machine(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be sent the admin token, and reach another machine's port."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    note.write(note.Running("a", os.getpid(), "", page, "secret"))
    for client in (Client(page), Client()):
        with pytest.raises(OSDError, match="answered 200; is this the control port"):
            client.get("/osd/status")
        with client.stream("/osd/traces") as chunks:
            assert b"".join(chunks) == b"<html>"
    (answer,) = await send(page, [{"prompt": "a"}], streams=1)
    assert answer.error.startswith("501"), "the page takes no POST"
    with pytest.raises(OSDError, match="no answer"):
        Client("http://elsewhere.example:8001").get("/osd/status")


@pytest.mark.parametrize(
    "url",
    [
        "http://gpu..example:8001",
        f"http://{'a' * 64}.example:8001",
        "http://münchen..de",
        "http://gpu\x00:8001",
        "http://[::1:8001",
        "http://:8001",
        "http://gpu:0",
        "http://gpu:99999",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address, like http://127"):
        Client(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8001/", "http://[::1]:8001", "https://münchen.de"]
)
def test_what_is_an_address_is_kept(url: str) -> None:
    assert Client(url).url == url.rstrip("/")


def test_a_change_is_waited_for_as_long_as_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes all the same, so that whoever tries again rolls back twice."""
    waited: list[httpx.Timeout] = []

    def request(method: str, url: str, *, timeout: httpx.Timeout, **_: object) -> httpx.Response:
        waited.append(timeout)
        return httpx.Response(200, json={"ok": True})

    monkeypatch.setattr("osd.client.http.httpx.request", request)
    client = Client("http://127.0.0.1:8001", token="secret")
    client.purge(None, None)
    client.admin("rollback")
    client.set_steps(["observe"])
    for timeout in waited:
        assert timeout.read is not None and timeout.connect == 10
        assert timeout.read > aof._FORGET_SECONDS + 2 * READ_SECONDS
