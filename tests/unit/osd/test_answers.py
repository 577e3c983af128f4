"""What a command that changes the service prints, of the real control port over a fake
controller."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from osd.cli import app
from osd.cli.answers import tell
from osd.observe.dashboard import ControlServer, build_app
from tests.unit.osd.observe.test_dashboard import TOKEN, FakeController, FakeHistory

TOLD = {
    "pause": "No training and no publishing until `osd resume`; serving goes on.",
    "resume": "Training and publishing go on.",
    "drafts promote 3": "The engines are told to serve draft v3, and training goes on from it.",
    "drafts rollback": "The engines are told to serve draft v4, the one before, and training goes "
    "on from it.",
    "drafts pin 3": "The engines are told to serve draft v3 until `osd drafts unpin`.",
    "drafts unpin": "No draft is pinned: what is trained from now on may serve.",
    "drafts keep 3": "Draft v3 is never pruned.",
    "steps observe capture": "Attached engines do observe, capture, and no other step.",
    "steps none": "Attached engines rest.",
    "traces purge --all": "17 traces deleted; drafts that may have learnt from them: v2, v3.",
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a control port answers."""
    server = ControlServer.of(
        build_app(FakeController(), FakeHistory(), TOKEN), host="127.0.0.1", port=0
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield server.port
    server.should_exit = True
    thread.join(30)


def said(port: int, *words: str) -> str:
    """By `osd` on stdout."""
    environ = {"OSD_URL": f"http://127.0.0.1:{port}", "OSD_TOKEN": TOKEN}
    done = CliRunner().invoke(app, words, env=environ)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.parametrize("command", TOLD)
def test_it_is_one_sentence(port: int, command: str) -> None:
    assert said(port, *command.split()) == TOLD[command] + "\n"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("pause", {"ok": True, "action": "pause"}),
        ("drafts rollback", {"ok": True, "action": "rollback", "version": 4}),
        ("drafts pin 3", {"ok": True, "action": "pin", "version": 3}),
        ("steps observe", {"ok": True, "action": "steps", "steps": ["observe"]}),
        ("traces purge --all", {"ok": True, "action": "purge", "purged": 17, "trained_on": [2, 3]}),
    ],
)
def test_all_of_it_as_json(port: int, command: str, answer: dict[str, Any]) -> None:
    assert json.loads(said(port, *command.split(), "--json")) == answer


@pytest.mark.parametrize(
    "answer", [{"ok": True, "action": "rollback"}, {"ok": True, "action": "unheard of"}, {"ok": 1}]
)
def test_what_a_service_of_another_version_answers_is_shown_whole(
    answer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tell(answer, as_json=False)
    assert json.loads(capsys.readouterr().out) == answer
