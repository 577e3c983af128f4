"""Replicas on machines that do not see the release store: each machine fetches a draft once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from osd.common.model_directory import digests
from osd.errors import AwayError, ReleaseError
from osd.exchange.transfer import DraftsHere, FetchedDrafts, read_part
from osd.records import DraftRelease, SwapReport
from osd.releases.store import ReleaseStore
from tests.unit.osd.releases.test_store import make_model
from tests.unit.serving.test_pull import FakeRegistry, Pulled, release

NUM_REPLICAS = 16
MACHINES = ("one", "other")


class Store:
    """A release store that counts what leaves it, and the machines that fetch from it."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._store = directory, ReleaseStore(directory / "releases")
        self.left = Counter[tuple[str, int, str, int]]()
        """machine, version, file, offset -> how often"""
        self.is_cut_off, self.is_full, self.spoils = set[str](), set[str](), set[str]()

    def publish(self, weights: bytes) -> DraftRelease:
        model = make_model(self._directory / "model", weights)
        found = self._store.publish(model, parent=0, target_id="target")
        return replace(found, path=f"/of/the/head/v{found.version}")

    def seen_from(self, machine: str) -> DraftsHere:
        fetched = FetchedDrafts(self._directory / machine)
        return DraftsHere(fetched, partial(self._read, machine))

    def _read(self, machine: str, version: int, name: str, offset: int, size: int) -> bytes:
        if machine in self.is_cut_off:
            raise AwayError("the service's part 'control' does not answer")
        if machine in self.is_full:
            raise ReleaseError("a draft is not fetched: /data: No space left on device")
        self.left[machine, version, name, offset] += 1
        found = self._store.get(version)
        part = read_part(Path(found.path), found.files, name, offset, min(size, 400))
        return b"?" * len(part) if machine in self.spoils else part


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def replicas(store: Store) -> list[tuple[str, Pulled]]:
    """Half of them on each machine."""
    found = []
    for i in range(NUM_REPLICAS):
        machine = MACHINES[i % 2]
        found.append((machine, Pulled(here=store.seen_from(machine))))
    return found


async def want(replicas: list[tuple[str, Pulled]], wanted: DraftRelease, later: float = 0) -> None:
    for _, pulled in replicas:
        pulled.registry.want = wanted
    await asyncio.gather(*(pulled.look(later) for _, pulled in replicas))


def live(replicas: list[tuple[str, Pulled]], machine: str) -> set[int]:
    return {pulled.engine.live for where, pulled in replicas if where == machine}


async def test_each_release_leaves_the_store_once_per_machine(
    store: Store, replicas: list[tuple[str, Pulled]]
) -> None:
    for n in (1, 2, 3):
        wanted = store.publish(b"weights %d" % n * 100)
        if n > 1:
            await want(replicas, wanted)
            assert live(replicas, "one") == live(replicas, "other") == {n}
    assert {key[:2] for key in store.left} == {(m, v) for m in MACHINES for v in (2, 3)}
    assert set(store.left.values()) == {1}
    for machine, pulled in replicas:
        staged = pulled.engine.releases[-1]
        assert digests(Path(staged.path)) == staged.files
        assert f"/{machine}/" in staged.path


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("is_cut_off", "'control' does not answer"),
        ("is_full", "No space left on device"),
        ("spoils", "came damaged"),
    ],
)
async def test_a_machine_that_cannot_fetch_lags_says_why_and_catches_up(
    store: Store, replicas: list[tuple[str, Pulled]], trouble: str, says: str
) -> None:
    store.publish(b"first")
    getattr(store, trouble).add("other")
    wanted = store.publish(b"second")
    await want(replicas, wanted)
    assert (live(replicas, "one"), live(replicas, "other")) == ({2}, {1})
    for machine, pulled in replicas:
        (report,) = pulled.registry.of(SwapReport)
        assert report.ok is (machine == "one")
        assert says in report.error if machine == "other" else report.error == ""
        assert machine == "one" or pulled.engine.releases == [], "nothing is staged"
    getattr(store, trouble).clear()
    await want(replicas, wanted, later=1)
    assert live(replicas, "one") == live(replicas, "other") == {2}


async def test_heartbeats_go_on_while_a_draft_is_fetched() -> None:
    is_there = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(wanted: DraftRelease) -> DraftRelease:
        asyncio.run_coroutine_threadsafe(is_there.wait(), loop).result(10)
        return wanted

    pulled = Pulled(here=slow)
    registry: FakeRegistry = pulled.registry
    registry.want = release(2)
    look = asyncio.create_task(pulled.look())
    while registry.num_heartbeats < 2:
        await asyncio.sleep(0.01)
        pulled.now += 0.5
    assert pulled.engine.releases == []
    is_there.set()
    await look
    assert pulled.engine.live == 2
