"""Where the control port is reached."""

from __future__ import annotations

import pytest

from osd.config.schema import Config, ControlConfig
from osd.control import plane
from osd.control.plane import ControlPlane, url_for_others


@pytest.mark.parametrize(
    ("host", "private_url", "found"),
    [
        ("10.0.0.1", "", "http://10.0.0.1:8001"),
        ("127.0.0.1", "redis://:p@10.0.0.1:6400/0", "http://127.0.0.1:8001"),
        ("fd00::1", "", "http://[fd00::1]:8001"),
        ("0.0.0.0", "redis://:p@10.0.0.1:6400/0", "http://10.0.0.1:8001"),
        ("0.0.0.0", "redis://:p@127.0.0.1:6400/0", "http://head:8001"),
        ("0.0.0.0", "redis://:p@0.0.0.0:6400/0", "http://head:8001"),
        ("::", "", "http://head:8001"),
    ],
)
def test_engines_are_told_an_address_that_they_reach(
    monkeypatch: pytest.MonkeyPatch, host: str, private_url: str, found: str
) -> None:
    monkeypatch.setattr(plane.socket, "gethostname", lambda: "head")
    assert url_for_others(ControlConfig(host=host, port=8001), private_url) == found


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:8001"), ("127.0.0.1", "http://127.0.0.1:8001")]
)
def test_commands_are_told_an_address_that_can_be_read(host: str, url: str) -> None:
    plane = ControlPlane.__new__(ControlPlane)
    plane._config = Config(control=ControlConfig(host=host, port=8001))
    assert plane.url == url
