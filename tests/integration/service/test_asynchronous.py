"""A whole service, and an engine that is attached to one, where vLLM schedules a step before that
ahead of it has ended, as it does on a device by default, and on the V2 model runner."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from osd.client.load import Answer
from osd.service.note import Running
from tests.integration.service.test_attached import Fleet, texts
from tests.support import plugin, services
from tests.support.pairs import Pair
from tests.support.services import Served, osd, status, wait_until
from tests.support.traffic import PROMPTS, Traffic, ask
from tests.support.ways import ASYNC_RANKS, V1_ASYNC, V2_ASYNC, V2_SYNC, Way

pytestmark = [pytest.mark.slow, pytest.mark.variants, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("asynchronous")
    arguments = [
        *services.settings("test-async", directory / "data", pair.target, pair.stranger),
        "speculation.mode=auto",
    ]
    environ = os.environ | plugin.environment(V1_ASYNC, directory / "plugin")
    served = Served(arguments, directory / "serve.log", environ)
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def note(served: Served) -> Running:
    return served.wait_ready()


def replica(note: Running) -> dict[str, Any]:
    """As the status shows it."""
    (found,) = status(note.control_url)["replicas"]
    return dict(found)


def whole(url: str, prompts: Sequence[str]) -> list[Answer]:
    answers = ask(url, prompts)
    assert [answer.error for answer in answers if not answer.ok] == []
    return answers


def learns(note: Running, version: int, seconds: float, way: Way = V1_ASYNC) -> list[Answer]:
    """Serves the same prompts until this version is reached and k was changed. Answers stay the
    same; returns the last ones."""
    first = answers = whole(note.service_url, PROMPTS)
    deadline = time.monotonic() + seconds
    while replica(note)["version"] < version or not replica(note)["speculation"]["changes"]:
        assert time.monotonic() < deadline, replica(note)
        answers = whole(note.service_url, PROMPTS)
        assert texts(answers) == texts(first)
    found = replica(note)
    assert found["speculation"]["is_async"] is way.is_async
    assert found["off"] == {}
    return answers


def test_a_service_learns_and_is_controlled_on_an_asynchronous_engine(note: Running) -> None:
    learns(note, version=3, seconds=300)
    assert status(note.control_url)["buffer"]["num_put"] > 0


@pytest.mark.parametrize("way", [V2_SYNC, V2_ASYNC], ids=lambda way: way.name)
def test_a_new_draft_serves_on_the_v2_runner(way: Way, pair: Pair, tmp_path: Path) -> None:
    arguments = [
        *services.settings("test-v2", tmp_path / "data", pair.target, pair.stranger),
        "speculation.mode=auto",
        "speculation.proposers=[draft]",
        "trainer.min_new_traces=12",
    ]
    environ = os.environ | plugin.environment(way, tmp_path / "plugin")
    served = Served(arguments, tmp_path / "serve.log", environ)
    try:
        note = served.wait_ready()
        (log,) = (tmp_path / "data").rglob("replica-0.log")
        assert "Using V2 Model Runner" in log.read_text()
        learns(note, 2, 600, way)
    finally:
        served.end()


def test_no_request_is_lost_while_drafts_come_and_go(note: Running) -> None:
    services.pause_training(note)
    with Traffic(note.service_url, PROMPTS, streams=4, max_tokens=40) as traffic:
        for version in (1, 2, 1, 2):
            osd("drafts", "promote", version, "--deployment", note.deployment)
            services.wait_for_version(note.control_url, version)
            time.sleep(1)
    assert traffic.failed() == [] and len(traffic.answers) >= len(PROMPTS)
    served = {tuple(answer.token_ids) for answer in traffic.answers}
    assert served == set(texts(whole(note.service_url, PROMPTS)))


@pytest.mark.parametrize("way", [V1_ASYNC, V2_ASYNC, ASYNC_RANKS], ids=lambda way: way.name)
def test_an_attached_engines_draft_learns_on_an_asynchronous_engine(
    way: Way, pair: Pair, tmp_path: Path
) -> None:
    fleet = Fleet(pair, tmp_path, way=way)
    try:
        fleet.engine.wait_ready()
        assert ("Using V2 Model Runner" in fleet.engine.log.read_text()) is (way.runner == "V2")
        found = wait_until(fleet.replica, 20, "the engine is known")
        assert (found["version"], found["off"]) == (1, {})
        answers = texts(fleet.ask())
        fleet.learns(0.3)
        assert fleet.replica()["version"] > 1
        fleet.is_controlled(answers)
        assert fleet.replica()["speculation"]["is_async"] is True
        fleet.steps()
        wait_until(lambda: fleet.replica()["version"] == 1, 20, "its own draft serves")
        assert texts(fleet.ask()) == answers
    finally:
        fleet.engine.end()
        fleet.served.end()
