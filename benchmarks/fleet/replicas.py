"""Replicas without engines, in a process of their own: `python -m benchmarks.fleet.replicas`.

Each is the product's loop (`DraftPuller`) over a simulated engine, with a `Registry` and a replay
buffer of its own, so that Redis sees the connections, commands and pauses of a real one. Traces
come at a rate that the bench sets, from one replica after another; meanwhile the loops may pause.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.costs.buffer import make_trace
from benchmarks.fleet import parts, records
from buffers.redis_stream import RedisTraceBuffer
from osd.config.schema import Config
from osd.exchange.registry import Registry
from osd.records import DraftRelease, Trace, decode, encode
from serving.activity import Activity
from serving.pull import DraftPuller
from serving.speculation.client import SpeculationClient
from serving.swap.ranks import Ranks

NUM_TRACES = 64
"""Different traces; each is put again and again, under another id."""
NUM_WRITERS = 2
"""Threads that put traces."""


class SimulatedEngine:
    """Answers as a worker and an engine's core do, at once."""

    def __init__(self, name: str, version: int) -> None:
        self.seen_at: dict[str, float] = {}
        """A draft's version -> Unix time at which it was last told to serve it."""
        self._name, self._version = name, version
        self._staged = DraftRelease(
            version=0, parent=0, path="", sha256="", target_id="", created_at=0.0
        )
        self._num_reports = 0

    async def worker(self, method: str, *arguments: Any) -> list[str]:
        return [json.dumps({}) if method == "osd_drop" else self._answer(method, arguments)]

    def _answer(self, method: str, arguments: Any) -> str:
        match method:
            case "osd_stage":
                self._staged = decode(arguments[0], DraftRelease)
                self.seen_at[str(self._staged.version)] = time.time()
                return "{}"
            case "osd_staging":
                staging = {"version": self._staged.version, "done": True, "seconds": 0.08}
                return encode(staging).decode()
            case "osd_put":
                return encode({"version": self._version, "seconds": 0.004}).decode()
            case "osd_confirm":
                self._version = self._staged.version
                return encode({"version": self._version, "seconds": 0.001}).decode()
        assert method == "osd_report", method
        self._num_reports += 1
        report = records.worker_report(self._name, self._version, self._num_reports)
        return encode(report).decode()

    async def core(self, utility: str, name: str, argument: str) -> str:
        if name == "report":
            return encode(records.speculation(self._num_reports)).decode()
        return "null"


class Replica:
    """One of them. It pulls and reports until its task is cancelled."""

    def __init__(self, settings: dict[str, Any], number: int, release: DraftRelease) -> None:
        self.name = f"replica-{number}"
        url, deployment = settings["url"], settings["deployment"]
        self.engine = SimulatedEngine(self.name, release.version)
        self.buffer = RedisTraceBuffer(
            url,
            deployment=deployment,
            target_id=records.TARGET_ID,
            max_traces=settings["max_traces"],
        )
        self.num_polls, self.is_paused = 0, False
        self._pause = settings["seconds_between_polls"]
        activity = Activity()
        activity.is_always = True
        ranks = Ranks(self.engine.worker)
        ranks.unproved = "this engine is simulated"
        self._puller = DraftPuller(
            Registry(url, deployment),
            ranks,
            activity,
            name=self.name,
            url=f"http://10.0.{number // 256}.{number % 256}:8000",
            k=records.K,
            release=release,
            speculation_client=SpeculationClient(self.engine.core, Config()),
        )

    async def run(self) -> None:
        """As beside an engine; those of a fleet do not begin at the same time."""
        await asyncio.sleep(random.uniform(0, 1))
        while True:
            if not self.is_paused:
                await self._puller.look()
                self.num_polls += 1
            await asyncio.sleep(self._pause)


class Traffic:
    """Puts traces at a rate, from one replica after another."""

    def __init__(self, replicas: list[Replica], size: tuple[int, int]) -> None:
        rng = np.random.default_rng(0)
        made = [make_trace("", *size, rng) for _ in range(NUM_TRACES)]
        self._traces = itertools.cycle(
            [replace(trace, target_id=records.TARGET_ID) for trace in made]
        )
        self._turns = itertools.cycle(replicas)
        self._rate, self._due_at = 0.0, time.monotonic()
        self._num_begun = self.num_put = 0
        self._lock = threading.Lock()
        for _ in range(NUM_WRITERS):
            threading.Thread(target=self._run, daemon=True).start()

    def set_rate(self, per_second: float) -> None:
        with self._lock:
            self._rate, self._due_at = per_second, time.monotonic()

    def _run(self) -> None:
        while True:
            trace, replica, wait_s = self._next()
            time.sleep(wait_s)
            if trace is not None:
                num_put = replica.buffer.put([trace])
                with self._lock:
                    self.num_put += num_put

    def _next(self) -> tuple[Trace | None, Replica, float]:
        """The next trace, whose it is, and the seconds until it is due."""
        with self._lock:
            replica = next(self._turns)
            if not self._rate:
                return None, replica, 0.02
            now, self._due_at = time.monotonic(), self._due_at + 1 / self._rate
            self._num_begun += 1
            trace_id = f"cmpl-{replica.name}-{self._num_begun}"
            trace = replace(next(self._traces), trace_id=trace_id, finished_at=time.time())
            return trace, replica, max(0.0, self._due_at - now)


def main() -> None:
    """Begin, and answer until the bench ends."""
    given = parts.settings()
    release = Registry(given["url"], given["deployment"]).wanted()
    assert release is not None, "the controller has not begun"
    numbers = range(given["first"], given["first"] + given["num"])
    replicas = [Replica(given, number, release) for number in numbers]
    traffic = Traffic(replicas, tuple(given["trace_tokens"]))

    async def run() -> None:
        await asyncio.gather(*(replica.run() for replica in replicas))

    threading.Thread(target=partial(asyncio.run, run()), daemon=True).start()

    def pace(traces_per_second: float, polls: bool) -> dict[str, Any]:
        traffic.set_rate(traces_per_second)
        for replica in replicas:
            replica.is_paused = not polls
        return {}

    def report() -> dict[str, Any]:
        num_polls = sum(replica.num_polls for replica in replicas)
        cpu_s = time.process_time()
        return {"num_put": traffic.num_put, "num_polls": num_polls, "cpu_seconds": cpu_s}

    def seen(version: int) -> dict[str, Any]:
        return {"at": [replica.engine.seen_at.get(str(version), 0.0) for replica in replicas]}

    parts.answer({"pace": pace, "report": report, "seen": seen})


if __name__ == "__main__":
    main()
