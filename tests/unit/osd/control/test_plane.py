"""Where the control port is reached, and where history is kept."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from osd.config.schema import Config, ControlConfig
from osd.control import plane
from osd.control.plane import ControlPlane, open_history_file, url_for_others
from osd.errors import ConfigError
from osd.observe.history import History
from osd.observe.history_file import HistoryFile
from osd.records import Counters, Event, SpecWindow


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


def test_a_history_that_cannot_be_opened_at_the_start_is_kept_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has from before stays: the feed may lack a part of it."""
    path, away = tmp_path / "history.db", tmp_path / "away"
    minute = time.time() // 60 * 60 - 3600
    before = HistoryFile(path)
    key, told = (minute, "replica-0", 1, 2), Event(at=minute, kind="published", text="v1")
    before.write([("replica", key, Counters(num_drafts=7))], [told], oldest=0.0)
    before.close()
    path.rename(away)
    path.mkdir()
    history = History(7 * 86400, open_history_file(path))
    assert "history is not kept on disk" in caplog.text
    for at in (30, 90, 150):
        counted = Counters(seconds=1.0, num_drafts=100)
        history.add(SpecWindow.of(counted, at=minute + at, replica="replica-0", version=1, k=2))
    for event in (told, Event(at=minute + 90, kind="published", text="v2")):
        history.add(event)
    with pytest.raises(OSError):
        history.save()
    path.rmdir()
    away.rename(path)
    history.save()
    history.save()
    kept = HistoryFile(path)
    assert [
        (key[0] - minute, value.num_drafts)
        for kind, key, value in kept.minutes(0.0)
        if kind == "replica"
    ] == [(0, 7), (60, 100), (120, 100)]
    assert [event.text for event in kept.events()] == ["v1", "v2"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_control_port_that_was_taken_meanwhile_is_one_line(tmp_path: Path, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        config = Config.model_validate(
            {"data_dir": str(tmp_path), "control": {"host": host, "port": port}}
        )
        url = "redis://127.0.0.1:1/0"
        plane = ControlPlane(
            config,
            redis_url=url,
            buffer_settings={"url": url, "deployment": "d", "target_id": "t"},
            target_id="t",
            token="token",
            trainer=None,
        )
        with pytest.raises(ConfigError, match=f"^control.port={port}: cannot listen on .*in use"):
            plane.wait_ready()
    plane.stop()
