"""One service, and a second deployment beside it, shared by all tests of this folder.

The files run in the order of `ORDER`: later ones break more, and the last stops the service.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from osd.client.load import Answer
from osd.models.resolve import fingerprint
from osd.releases.store import ReleaseStore
from osd.service.launch import Service
from tests.support import acceptance, services
from tests.support.beside import Beside
from tests.support.pairs import Pair
from tests.support.services import current, pause_training, status, wait_until
from tests.support.traffic import PROMPTS, ask

ORDER = (
    "test_learning.py",
    "test_swaps.py",
    "test_capture.py",
    "test_openai_api.py",
    "test_page.py",
    "test_administration.py",
    "test_redis_away.py",
    "test_killed_parts.py",
    # Those that follow start the second deployment, and end it in every way there is.
    "test_side_by_side.py",
    "test_speculation.py",
    "test_interrupt.py",
    "test_rollback.py",
    "test_rest.py",
    # They have services of their own: of two ranks, without an engine, of an asynchronous one, of
    # two, on a cluster.
    "test_tensor_parallel.py",
    "test_attached.py",
    "test_asynchronous.py",
    "test_recipes.py",
    "test_sampled_drafts.py",
    "test_replicas.py",
    "test_head_restart.py",
    "test_stopping.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests of this folder by their files, where they stand among all tests."""
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    tests = [items[i] for i in places]
    for place, test in zip(places, sorted(tests, key=place_of_file), strict=True):
        items[place] = test


def place_of_file(test: pytest.Item) -> int:
    assert test.path.name in ORDER, f"{test.path.name} is missing in the ORDER of {__file__}"
    return ORDER.index(test.path.name)


@pytest.fixture(scope="package", autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with services.runtime_directory(tmp_path_factory.mktemp("run")) as path:
        yield path


@pytest.fixture(scope="package")
def service(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service that all tests of this folder share. Its first draft knows nothing of its
    target."""
    data = tmp_path_factory.mktemp("service")
    started = time.monotonic()
    settings = services.settings("test-main", data, pair.target, pair.stranger)
    with services.supervised(settings) as service:
        print(f"started in {time.monotonic() - started:.1f} s")
        wait_until(lambda: status(service.control_url)["replicas"], 60, "the replica is known")
        yield service


@pytest.fixture(scope="package")
def learnt(service: Service) -> list[Answer]:
    """The answers until a much better draft than the first is current. Training is then paused."""
    answers: list[Answer] = []
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        answers += ask(service.url, PROMPTS * 3, streams=6)
        if (release := current(service)).version > 1 and acceptance.measured_alpha(release) > 0.6:
            break
    pause_training(service)
    return answers


@pytest.fixture(scope="package")
def beside(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, service: Service
) -> Iterator[Beside]:
    """The second deployment: its current draft knows nothing of its target, the one before does.
    It runs from the first test that starts it."""
    directory = tmp_path_factory.mktemp("beside")
    target_id = fingerprint(pair.target)
    releases = ReleaseStore(directory / "data" / "releases")
    releases.publish(pair.draft, parent=0, target_id=target_id)
    releases.publish(pair.stranger, parent=1, target_id=target_id)
    arguments = services.settings("test-beside", directory / "data", pair.target, pair.draft)
    arguments += ["speculation.mode=auto", "gate.rollback_min_tested=24"]
    arguments += ["speculation.net_interval_seconds=4", "speculation.net_window_seconds=1"]
    # No draft gains that much over version 1, so training rests once test_rest.py resumes it.
    arguments += ["trainer.patience_rounds=2", "gate.min_gain=0.5"]
    beside = Beside(arguments, directory)
    yield beside
    if beside.served is not None:
        beside.served.end()
