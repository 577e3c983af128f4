"""Ctrl-C leaves nothing behind, and the next start serves the same version again."""

from __future__ import annotations

import time

import pytest

from osd.service.launch import Service
from osd.service.note import find_all
from tests.support.beside import Beside, assert_gone, assert_nothing_is_left
from tests.support.processes import named
from tests.support.services import status, wait_for_version, wait_until
from tests.support.traffic import PROMPTS, Traffic, ask

pytestmark = pytest.mark.timeout(1200)


def test_ctrl_c_while_requests_stream_leaves_nothing_within_ten_seconds(
    service: Service, beside: Beside
) -> None:
    served, note = beside.running()
    with Traffic(note.service_url, PROMPTS, max_tokens=200):
        time.sleep(1)
        beside.look()
        served.interrupt()
        print(f"Ctrl-C: everything gone after {assert_gone(beside, 10):.1f} s")
        assert served.process.wait(1) == 0
    assert "Traceback" not in served.log.read_text()
    assert_nothing_is_left(beside, note)
    assert [r.deployment for r in find_all()] == ["test-main"]
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


def test_ctrl_c_during_the_start_leaves_nothing(beside: Beside) -> None:
    served = beside.start()
    wait_until(lambda: named(beside.look(), "spawn_main"), 300, "the engine begins to load")
    time.sleep(1)
    beside.look()
    served.interrupt()
    print(f"Ctrl-C during the start: everything gone after {assert_gone(beside, 10):.1f} s")
    assert "Traceback" not in served.log.read_text()
    assert [r.deployment for r in find_all()] == ["test-main"]


def test_a_restart_finds_its_version_again(beside: Beside) -> None:
    beside.has_run()
    beside.note = note = beside.start().wait_ready()
    assert status(note.control_url)["version"] == 1, "the one promoted by hand, not the newest"
    wait_for_version(note.control_url, 1)
    assert all(answer.ok for answer in ask(note.service_url, PROMPTS))
    assert status(note.control_url)["buffer"]["num_put"] > 0, "the replay buffer is there again"
