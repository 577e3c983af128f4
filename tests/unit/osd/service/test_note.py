"""The note of a running service is for this user alone, and only while its process lives."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from osd.client.http import Client
from osd.config.schema import Config
from osd.errors import ConfigError, OSDError
from osd.service import detach, note
from osd.service.detach import serve_detached


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSD_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def running(deployment: str = "a", pid: int | None = None) -> note.Running:
    return note.Running(
        deployment, pid or os.getpid(), "http://127.0.0.1:1", "http://127.0.0.1:2", "secret"
    )


def test_the_note_is_for_this_user_alone(folder: Path) -> None:
    path = note.write(running())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in folder.iterdir()] == ["a.json"]


def test_a_url_alone_is_enough_where_the_note_has_its_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def request(method: str, url: str, **more: Any) -> httpx.Response:
        seen.append(more["headers"]["Authorization"])
        return httpx.Response(200, json={})

    monkeypatch.setattr("osd.client.http.httpx.request", request)
    for name in ("OSD_URL", "OSD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    note.write(running())
    Client("http://localhost:2/").admin("pause")
    monkeypatch.setenv("OSD_TOKEN", "other")
    Client("http://127.0.0.1:2/").admin("pause")
    assert seen == ["Bearer secret", "Bearer other"]
    monkeypatch.delenv("OSD_TOKEN")
    for url in ("http://127.0.0.1:abc", "http://", "http://[::1"):
        with pytest.raises(ConfigError, match="is no address, like http"):
            Client(url)
    with pytest.raises(
        ConfigError, match="http://elsewhere:2: this wants the admin token; set OSD_TOKEN"
    ):
        Client("http://elsewhere:2").admin("pause")


def test_a_process_that_was_given_the_id_of_a_service_is_none(folder: Path) -> None:
    """As in a container that was killed and is started again: its processes have the same ids."""
    path = note.write(running("mine"))
    assert [found.deployment for found in note.find_all()] == ["mine"]
    left = json.loads(path.read_text())
    left["begun_s"] -= 3600
    path.write_text(json.dumps(left))
    note.refuse_second("mine")
    with pytest.raises(ConfigError, match="no deployment 'mine' of this user is running"):
        note.find("mine")
    del left["begun_s"]
    path.write_text(json.dumps(left))
    assert note.find("mine").token == "secret", "a note of an earlier version"


def test_a_directory_open_to_others_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="open to others; set OSD_RUNTIME_DIR"):
        note.write(running())


def test_a_second_service_of_one_name_is_refused(folder: Path) -> None:
    note.write(running("mine"))
    with pytest.raises(ConfigError, match=r"deployment=mine: runs already \(http://127.0.0.1:2"):
        note.refuse_second("mine")
    note.refuse_second("other")
    note.write(running("mine", pid=2**22 + 1))
    note.refuse_second("mine")  # it has died


def test_a_second_service_leaves_the_log_of_the_first_alone(folder: Path, tmp_path: Path) -> None:
    note.write(running())
    (tmp_path / "serve.log").write_text("serving")
    config = Config(deployment="a", data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="runs already"):
        serve_detached(config, ["osd", "serve"], print)
    assert (tmp_path / "serve.log").read_text() == "serving"


def test_a_detached_start_that_is_given_up_ends(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin to serve long after somebody pressed Ctrl-C."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(_: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **more))
        return started[0]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(detach.subprocess, "Popen", start)
    monkeypatch.setattr(detach.time, "sleep", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            serve_detached(Config(data_dir=str(tmp_path)), ["osd", "serve"], print)
        monkeypatch.undo()
        assert started[0].wait(10) == -signal.SIGTERM
    finally:
        started[0].kill()
    assert stat.S_IMODE((tmp_path / "serve.log").stat().st_mode) == 0o600


def test_a_detached_start_that_fails_says_why_whatever_else_its_log_holds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of a file system, say, whose names are not UTF-8."""
    program = (
        "import os, sys\n"
        "os.write(2, b'loading caf\\xe9\\n')\n"
        "os.write(2, b'osd: serving.port=80: taken\\n')\n"
        "sys.exit(1)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        detach.subprocess,
        "Popen",
        lambda _, **more: popen([sys.executable, "-c", program], **more),
    )
    with pytest.raises(OSDError, match="^serving.port=80: taken$"):
        serve_detached(Config(data_dir=str(tmp_path)), ["osd", "serve"], print)


def test_a_dead_service_is_not_found_and_one_of_several_must_be_named(folder: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    note.write(running("dead", int(child.stdout)))
    with pytest.raises(ConfigError, match="no service of this user is running"):
        note.find()
    note.write(running("a"))
    assert note.find().token == "secret"
    note.write(running("b"))
    with pytest.raises(ConfigError, match="several services are running"):
        note.find()
    assert note.find("b").deployment == "b"
    note.remove("b")
    assert note.find().deployment == "a"


def test_a_process_that_ended_counts_as_gone_before_anybody_collected_it(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        note.write(running("a", child.pid))
        assert note.find().pid == child.pid
        assert child.stdin is not None
        child.stdin.close()
        # Waits for its end, and leaves its exit status uncollected.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert note.find_all() == []
