"""A service leaves nothing behind: killed, stopped by `osd stop`, or stopped where it runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import httpx
import pytest

from osd.models.resolve import fingerprint
from osd.releases.store import ReleaseStore
from osd.service.launch import Service
from osd.service.note import directory, find_all
from tests.support.beside import Beside, assert_gone, assert_nothing_is_left
from tests.support.pairs import Pair
from tests.support.processes import (
    alive,
    descendants,
    is_listening,
    kill,
    named,
    ray_directories,
)
from tests.support.services import Detached, osd, wait_until
from tests.support.traffic import PROMPTS, Traffic, ask

pytestmark = pytest.mark.timeout(1200)


def test_nothing_outlives_a_killed_service(service: Service, beside: Beside) -> None:
    served, note = beside.running()
    beside.look()
    served.kill()
    served.process.wait()
    print(f"kill -9 of the service: everything gone after {assert_gone(beside, 15):.1f} s")
    assert_nothing_is_left(beside, note)
    assert [r.deployment for r in find_all()] == ["test-main"]
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


@pytest.mark.slow
def test_a_service_whose_ray_ends_ends_with_one_line(service: Service, beside: Beside) -> None:
    served, note = beside.running()
    (head,) = named(beside.look(), "/gcs_server ")
    kill(head)
    clock = time.monotonic()
    assert served.process.wait(60) == 1
    print(f"kill -9 of Ray's head: the service ended after {time.monotonic() - clock:.1f} s")
    assert_gone(beside, 15)
    assert_nothing_is_left(beside, note)
    said = served.log.read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("osd: the private Ray of this service has ended")
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


API_KEY = "a-key-of-the-test"


@pytest.fixture
def detached(beside: Beside) -> Iterator[Detached]:
    """The second deployment, started again on what the killed one left; clients now need a key."""
    detached = Detached([*beside.arguments, f"serving.vllm.api_key={API_KEY}"])
    beside.processes |= descendants(detached.note.pid)
    yield detached
    detached.end()


def test_a_detached_service_runs_on_until_it_is_told_to_stop(
    service: Service, beside: Beside, detached: Detached, pair: Pair
) -> None:
    """`osd stop` sends SIGTERM. Requests are streaming then."""
    note, log = detached.note, beside.directory / "data" / "serve.log"
    assert detached.said.splitlines() == [
        f"serving: {note.service_url}/v1    dashboard: {note.control_url}/dashboard",
        f"log: {log}    end it with `osd stop --deployment test-beside`",
    ]
    assert os.getsid(note.pid) == note.pid, "no terminal's hang-up or Ctrl-C reaches it"
    newest = ReleaseStore(beside.directory / "data" / "releases").current(fingerprint(pair.target))
    assert newest is not None
    assert osd("status", "--json", "--deployment", "test-beside")["version"] == newest.version
    for key, is_ok in ((API_KEY, True), ("", False), (API_KEY[:-1], False)):
        answers = ask(note.service_url, PROMPTS, api_key=key)
        assert {(answer.ok, "401" in answer.error) for answer in answers} == {(is_ok, not is_ok)}
    for path in ("health", "metrics"):
        assert httpx.get(f"{note.service_url}/{path}").status_code == 200

    assert "several services are running" in osd("stop", ok=False)
    with Traffic(note.service_url, PROMPTS, max_tokens=200, api_key=API_KEY) as traffic:
        wait_until(lambda: traffic.answers, 60, "requests stream")
        beside.processes |= descendants(note.pid)
        clock = time.monotonic()
        done = detached.stop()
        print(f"osd stop: returned after {time.monotonic() - clock:.1f} s")
        assert_gone(beside, 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stopped in" in log.read_text() and "Traceback" not in log.read_text()
    assert API_KEY not in log.read_text()
    assert_nothing_is_left(beside, note)
    assert [r.deployment for r in find_all()] == ["test-main"]
    assert not (directory() / "test-beside.json").exists(), "the note went with it"
    assert "no deployment 'test-beside'" in osd("stop", "--deployment", "test-beside", ok=False)
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


def test_a_stopped_service_leaves_nothing(service: Service) -> None:
    processes = descendants(os.getpid())
    directories = ray_directories(processes)
    assert directories
    clock = time.monotonic()
    service.stop()
    print(f"stopped in {time.monotonic() - clock:.1f} s")
    own = "resource_tracker|playwright|chromium"  # what the tests themselves started
    left = {pid: line for pid, line in alive(processes).items() if pid != os.getpid()}
    assert {pid: line for pid, line in left.items() if not re.search(own, line)} == {}
    assert not any(path.exists() for path in directories)
    assert not is_listening(service.url) and not is_listening(service.control_url)
    assert find_all() == []
