"""A release's files over HTTP, whatever they are called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from osd.attach.fetch import read_over_http


class NameOfFile(BaseHTTPRequestHandler):
    """Answers with the name of the file that was asked for."""

    def do_GET(self) -> None:
        name = unquote(urlsplit(self.path).path.rpartition("/")[2]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), NameOfFile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["config.json", "notes #1.md", "why?.txt", "a%20b", "ä b.json"])
def test_a_file_is_asked_for_by_its_own_name(name: str, url: str) -> None:
    assert read_over_http(url, "token", 3, name, 0, 9).decode() == name
