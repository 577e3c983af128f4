"""A Ray cluster whose head keeps its tables in a Redis: the head dies and is started again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from buffers.embedded import EmbeddedValkey
from osd.service.note import Running
from tests.integration.service.test_killed_parts import is_healthy
from tests.support import services
from tests.support.pairs import Pair
from tests.support.processes import alive, descendants, kill
from tests.support.ray_cluster import RayCluster
from tests.support.services import Served, pause_training, status, wait_until
from tests.support.traffic import PROMPTS, Traffic

pytestmark = [pytest.mark.slow, pytest.mark.variants, pytest.mark.timeout(600)]

SECONDS_AWAY = 20
"""More than a private Ray's head is given."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="osd") as directory,
        EmbeddedValkey(Path(directory), 64 << 20) as tables,
    ):
        cluster = RayCluster(tables.url)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


@pytest.fixture(scope="module")
def served(
    cluster: RayCluster, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Its first draft knows nothing of its target. The trainer is on the second Ray."""
    directory = tmp_path_factory.mktemp("joined")
    settings = services.settings("test-joined", directory / "data", pair.target, pair.stranger)
    settings += [f"ray.address={cluster.address}", "ray.trainer_resource=train"]
    settings += [f"buffer.host={cluster.host}"]
    served = Served(settings, directory / "serve.log", environ=cluster.environ)
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def note(served: Served) -> Running:
    return served.wait_ready()


def kinds_of_events(note: Running) -> set[str]:
    return {event["kind"] for event in httpx.get(f"{note.control_url}/osd/events").json()}


def test_a_head_that_comes_back_finds_the_service_as_it_was(
    cluster: RayCluster, served: Served, note: Running
) -> None:
    """No request fails, training goes on, and what dies is started again."""
    wait_until(lambda: status(note.control_url).get("replicas"), 60, "the replica is known")
    with Traffic(note.service_url, PROMPTS, max_tokens=40) as traffic:
        wait_until(lambda: status(note.control_url)["version"] > 1, 120, "a round was published")
        cluster.kill_head()
        at, before = time.monotonic(), len(traffic.answers)
        time.sleep(SECONDS_AWAY)
        assert served.process.poll() is None
        assert len(traffic.answers) > before, "requests are answered meanwhile"
        cluster.start_head_again()
        print(f"the head was away for {time.monotonic() - at:.1f} s")
        rounds = int(status(note.control_url)["num_rounds"])
        wait_until(
            lambda: int(status(note.control_url)["num_rounds"]) > rounds, 60, "training goes on"
        )
    assert traffic.failed() == []
    assert "Ray's head is away" in served.log.read_text()
    wait_until(lambda: "Ray's head is back" in served.log.read_text(), 30, "it is said")

    version = pause_training(note)
    (replica,) = status(note.control_url)["replicas"]
    kill(int(replica["pid"]))
    clock = time.monotonic()
    wait_until(lambda: not status(note.control_url)["replicas"], 8, "it is not shown any more")
    wait_until(lambda: is_healthy(note.service_url), 120, "it is started again")
    services.wait_for_version(note.control_url, version)
    print(f"a replica killed afterwards served again after {time.monotonic() - clock:.1f} s")
    wait_until(lambda: {"replica_lost", "replica_back"} <= kinds_of_events(note), 10, "both told")


def test_a_machine_whose_ray_is_started_anew_ends_its_service_with_one_line(
    cluster: RayCluster, served: Served, note: Running
) -> None:
    """The head answers again before it is missed, but knows the service's processes no more."""
    processes = descendants(served.process.pid)
    cluster.kill_all()
    clock = time.monotonic()
    cluster.start_head()
    print(f"the head was back after {time.monotonic() - clock:.1f} s")
    assert served.process.wait(60) == 1
    print(f"the service ended after {time.monotonic() - clock:.1f} s")
    said = served.log.read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith(
        f"osd: ray.address={cluster.address}: Ray has ended on this machine"
    )
    wait_until(lambda: not alive(processes), 15, "nothing of it is left")
