"""The controller in a process of its own: `python -m benchmarks.fleet.controller`.

The product's, with its registry, release store, history and the history's file. Its trainer never
has anything to learn from, so that nothing is trained, and what serves is watched as ever.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fleet import parts, records
from buffers.redis_stream import RedisTraceBuffer
from osd.common.clock import Clock
from osd.config.schema import Config
from osd.control.controller import Controller
from osd.control.plane import keep
from osd.exchange.registry import Registry
from osd.observe.history import History
from osd.observe.history_file import HistoryFile
from osd.records import DraftRelease, EarlierReport, RoundOutcome, RoundSize
from osd.releases.store import ReleaseStore

FIRST = asyncio.FIRST_COMPLETED


class TimingClock(Clock):
    """Times the looks of the watch loop: what lies between two of its sleeps."""

    def __init__(self) -> None:
        self.look_seconds: list[float] = []
        self._began: float | None = None

    async def sleep(self, seconds: float) -> None:
        task = asyncio.current_task()
        is_look = task is not None and task.get_name() == "watch"
        if is_look and self._began is not None:
            self.look_seconds.append(time.perf_counter() - self._began)
        await super().sleep(seconds)
        if is_look:
            self._began = time.perf_counter()


class WatchedRegistry(Registry):
    """Notes when a release was last made the wanted one."""

    wanted_at = 0.0

    def set_wanted(self, release: DraftRelease) -> None:
        self.wanted_at = time.time()
        super().set_wanted(release)


class IdleTrainer:
    """`osd.control.protocols.Trainer` without new traces."""

    async def machine(self) -> str:
        return "bench"

    async def why_silent(self) -> str:
        return ""

    async def num_new_traces(self) -> int:
        return 0

    async def run_round(self, base: DraftRelease, line: int, size: RoundSize) -> RoundOutcome:
        raise AssertionError("there are no new traces")

    async def candidate(self, outcome: RoundOutcome) -> str:
        raise AssertionError("there is no candidate")

    async def evaluate_releases(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float]:
        return {release.version: 0.0 for release in versions}

    async def compare_earlier(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport]:
        return []


def publish(store: ReleaseStore, directory: Path) -> DraftRelease:
    """A first release, and two between which the bench goes back and forth. The weights are a few
    bytes: nobody loads them."""
    if (current := store.current(records.TARGET_ID)) is not None:
        return current
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    release = store.publish(directory, parent=0, target_id=records.TARGET_ID)
    for _ in range(2):
        release = store.publish(
            directory,
            parent=release.version,
            target_id=records.TARGET_ID,
            outcome=records.outcome(release.version),
        )
    return release


def remember(history: History, num_replicas: int, seconds: int, version: int) -> None:
    """What the history holds after so many seconds with one window of each replica in each."""
    now = time.time()
    for ago in range(seconds, 0, -1):
        for number in range(num_replicas):
            history.add(records.window(f"replica-{number}", version, now - ago))


def main() -> None:
    """Begin, and answer until the bench ends."""
    given = parts.settings()
    config = Config.model_validate(
        {"deployment": given["deployment"], "data_dir": given["data_dir"]}
    )
    store = ReleaseStore(config.releases_path)
    release = publish(store, config.data_path / "candidate")
    history = History(config.control.history_seconds, HistoryFile(config.history_path))
    memory_before = psutil.Process().memory_info().rss
    remember(history, given["num_replicas"], given["history_seconds"], release.version)
    memory_after = psutil.Process().memory_info().rss

    registry, clock = WatchedRegistry(given["url"], given["deployment"]), TimingClock()
    controller = Controller(
        config,
        registry,
        store,
        history,
        IdleTrainer(),
        RedisTraceBuffer(given["url"], deployment=given["deployment"], target_id=records.TARGET_ID),
        target_id=records.TARGET_ID,
        clock=clock,
    )
    registry.set_wanted(release)
    loop = asyncio.new_event_loop()

    async def run() -> None:
        keeping = asyncio.create_task(keep(history), name="history")
        await asyncio.wait({keeping, asyncio.create_task(controller.run())}, return_when=FIRST)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()

    def do(act: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(act, loop).result()

    def report() -> dict[str, Any]:
        assert thread.is_alive(), "the controller ended"
        looks, clock.look_seconds = clock.look_seconds, []
        return {"cpu_seconds": time.process_time(), "look_seconds": looks}

    def promote(version: int) -> dict[str, Any]:
        do(controller.promote(version))
        return {"at": registry.wanted_at}

    parts.answer(
        {"report": report, "promote": promote},
        version=release.version,
        history_bytes=memory_after - memory_before,
    )


if __name__ == "__main__":
    main()
