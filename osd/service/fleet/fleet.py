"""The replicas of a service, from their start to their end.

    load ──► wanted (`scaling.py`) ──► more:  start ──► heartbeat ──► serves, the front door asks it
                                  └──► fewer: drain ──► answers what it has ──► ended, forgotten

The service asks it to `look` about once a second. It looks at heartbeats alone, so that a replica
may run on any machine; what it finds is written to Redis, where the controller shows it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, Protocol

from osd.common.clock import Clock
from osd.config.serving import ReplicasConfig
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import Event, Member, ReplicaStatus
from osd.service.fleet.alone import name_of
from osd.service.fleet.scaling import Scaler

logger = logging.getLogger(__name__)

SECONDS_TO_DRAIN = 3600.0
"""Then a replica is ended with what it still answers."""
HEARTBEATS_TO_END = 3
"""Heartbeats of a drained replica that must show it idle: requests may have been on their way."""
SECONDS_SILENT = 60.0
"""A drained replica without a heartbeat for so long has died. A short silence says nothing: it may
be that of Redis."""
SECONDS_OF_LAST_WORDS = 15.0
"""One that has ended is heard of no longer: a heartbeat lasts for 12 s."""
FIRST_DELAY, LONGEST_DELAY = 15.0, 600.0
"""Seconds without another start after one that failed; the delay doubles each time."""
SECONDS_TO_WAIT = 10.0
"""After so long without a machine, a replica is told to wait for one."""


class Engines(Protocol):
    """What starts and ends the processes of replicas. No call waits for them."""

    def start(self, name: str) -> Any:
        """Begin to start one; returns its handle."""

    def end(self, handle: Any) -> None:
        """End one, whatever it does."""

    def watch(self, handle: Any) -> None:
        """It serves: notice when its process ends."""

    def has_ended(self, handle: Any) -> bool:
        """Whether the process that was watched has ended."""

    def expect(self, handle: Any) -> None:
        """It has died, and starts again by itself."""

    def failure(self, handle: Any) -> str:
        """Why its newest start has failed for good; "" while it goes on or where it has not."""

    def why_pending(self, name: str) -> str:
        """Why no machine runs it yet; "" where one does, or nothing is known."""


class Door(Protocol):
    """What passes requests on to replicas."""

    def drop(self, name: str) -> None:
        """Send this one no new requests."""


@dataclass(slots=True)
class _Replica:
    handle: Any
    since: float
    """Monotonic time of its newest change."""
    since_unix: float
    state: str = "starting"
    why: str = ""
    is_lost: bool = False
    """Whether it served before it had to start again. The control actor tells that as an event."""
    seen: ReplicaStatus | None = None
    """Its newest heartbeat; None while it has none."""
    life: tuple[int, float] | None = None
    """The one that is watched."""
    silent_since: float | None = None
    num_requests: float = 0.0
    """In flight, on average between its last two heartbeats."""
    num_idle: int = 0
    """Heartbeats since it was drained in which it had nothing to do."""


class Fleet:
    """The replicas of one service. Only `asked` may be read by other threads.

    Example:
        fleet = Fleet(config.serving.replicas, registry, engines, door)
        fleet.start()
        while not stop.wait(1):
            fleet.look()
    """

    def __init__(
        self,
        config: ReplicasConfig,
        registry: Registry,
        engines: Engines,
        door: Door | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._config, self._registry = config, registry
        self._engines, self._door, self._clock = engines, door, clock or Clock()
        self._scaler = Scaler(config, self._clock.monotonic)
        self._replicas: dict[str, _Replica] = {}
        self._ended: dict[str, tuple[int, float]] = {}
        """name -> the last life of it that was ended, whose heartbeat may still be there"""
        self._delay, self._not_before = FIRST_DELAY, 0.0
        self.asked: frozenset[str] = frozenset()
        """Those that are to get requests."""

    @property
    def handles(self) -> dict[str, Any]:
        """name -> handle of every replica"""
        return {name: replica.handle for name, replica in self._replicas.items()}

    def start(self) -> None:
        """Begin to start as many as there are at least."""
        for _ in range(self._config.min):
            self._start_one()
        self._tell()

    def look(self) -> None:
        """Follow the heartbeats and the load. Raises `ReplayBufferError` while Redis is away:
        nothing changes then."""
        heartbeats: dict[str, ReplicaStatus] = {}
        for status in self._registry.replicas():
            if self._is_alive(status):
                heartbeats[status.replica] = status
            elif status.replica not in self._replicas:
                self._registry.forget(status.replica)  # it said so on its way out
        for name, replica in list(self._replicas.items()):
            self._note(replica, heartbeats.get(name))
            if replica.state == "draining":
                self._end_if_drained(name, replica)
            else:
                self._follow(name, replica)
        self._scale()
        self._tell()

    # -- inside -----------------------------------------------------------------------------------

    def _is_alive(self, status: ReplicaStatus) -> bool:
        """Whether a heartbeat is of a life that goes on."""
        name = status.replica
        if self._ended.get(name) != _life(status):
            return True
        replica, now = self._replicas.get(name), self._clock.monotonic()
        if replica is None or not replica.is_lost or now - replica.since < SECONDS_OF_LAST_WORDS:
            return False
        del self._ended[name]  # not its process was lost, but Ray's connection to it
        return True

    def _note(self, replica: _Replica, heartbeat: ReplicaStatus | None) -> None:
        before, replica.seen = replica.seen, heartbeat
        if heartbeat is None:
            replica.silent_since = replica.silent_since or self._clock.monotonic()
            replica.num_requests = 0.0
        elif before is None or heartbeat.at != before.at:
            replica.silent_since = None
            replica.num_requests = _mean_open(before, heartbeat)
            is_idle = not heartbeat.num_open and not heartbeat.num_running
            replica.num_idle = replica.num_idle + 1 if is_idle else 0

    def _follow(self, name: str, replica: _Replica) -> None:
        if replica.state == "serving" and self._engines.has_ended(replica.handle):
            self._note_end(name, replica)
        if replica.seen is not None:
            if replica.state != "serving":
                self._change(replica, "serving")
                self._watch(replica, replica.seen)
                replica.is_lost = False
                self._delay = FIRST_DELAY
        elif replica.state == "serving":
            self._change(replica, "starting")
            replica.is_lost = True
            self._engines.expect(replica.handle)
        elif reason := self._engines.failure(replica.handle):
            self._give_up(name, replica, reason)
        elif self._clock.monotonic() - replica.since >= SECONDS_TO_WAIT:
            replica.why = self._engines.why_pending(name)

    def _watch(self, replica: _Replica, heartbeat: ReplicaStatus) -> None:
        self._engines.watch(replica.handle)
        replica.life = _life(heartbeat)

    def _note_end(self, name: str, replica: _Replica) -> None:
        """The process that was watched has ended: what it said last is true no more."""
        if replica.seen is not None and _life(replica.seen) != replica.life:
            return self._watch(replica, replica.seen)  # it has started again meanwhile
        if replica.life is not None:
            self._ended[name] = replica.life
        self._registry.forget(name)
        replica.seen, replica.num_requests = None, 0.0

    def _end_if_drained(self, name: str, replica: _Replica) -> None:
        self._drop(name)  # again: the front door may have been told of it meanwhile
        now, silent_since = self._clock.monotonic(), replica.silent_since
        is_silent = silent_since is not None and now - silent_since > SECONDS_SILENT
        is_over = now - replica.since > SECONDS_TO_DRAIN
        if is_silent or is_over or replica.num_idle >= HEARTBEATS_TO_END:
            self._end(name, replica)
            what = "ended after an hour" if is_over else "drained, and ended"
            self._say("scaled", f"{name} is {what}")

    def _scale(self) -> None:
        num = len(self._asked())
        num_requests = sum(replica.num_requests for replica in self._replicas.values())
        load = f"{num_requests:.1f} requests in flight"
        for name in [n for n, r in self._replicas.items() if r.state == "draining"]:
            if self._scaler.needed(num_requests) > num:
                self._change(self._replicas[name], "starting")
                self._say("scaled", f"{name} is asked again: {load}")
                num += 1
        wanted = self._scaler.wanted(num, num_requests)
        if wanted > num and self._clock.monotonic() >= self._not_before:
            for _ in range(num, wanted):
                self._say("scaled", f"{self._start_one()} is started: {load}")
        for name in self._asked()[wanted:]:
            self._change(self._replicas[name], "draining")
            self._drop(name)
            self._say("scaled", f"{name} is drained: {load}")

    def _asked(self) -> list[str]:
        """Those that get requests, or will: the ones to keep first."""
        names = [name for name, replica in self._replicas.items() if replica.state != "draining"]
        return sorted(names, key=lambda n: (self._replicas[n].state != "serving", _number(n)))

    def _start_one(self) -> str:
        names = (name_of(i) for i in range(len(self._replicas) + 1))
        name = next(name for name in names if name not in self._replicas)
        clock = self._clock
        handle = self._engines.start(name)
        self._replicas[name] = _Replica(handle, clock.monotonic(), clock.time())
        return name

    def _give_up(self, name: str, replica: _Replica, reason: str) -> None:
        """It is started again later, if it is still needed."""
        self._end(name, replica)
        self._not_before = self._clock.monotonic() + self._delay
        self._say("replica_failed", f"{name} did not start: {reason}")
        self._delay = min(2 * self._delay, LONGEST_DELAY)

    def _end(self, name: str, replica: _Replica) -> None:
        del self._replicas[name]
        self._drop(name)
        self._engines.end(replica.handle)
        if replica.seen is not None:
            self._ended[name] = _life(replica.seen)
        try:
            self._registry.forget(name)
        except OSDError as error:  # its heartbeat expires
            logger.warning("%s", error)

    def _drop(self, name: str) -> None:
        if self._door is not None:
            self._door.drop(name)

    def _change(self, replica: _Replica, state: str) -> None:
        replica.state = state
        replica.since, replica.since_unix = self._clock.monotonic(), self._clock.time()
        replica.why, replica.num_idle = "", 0

    def _tell(self) -> None:
        self.asked = frozenset(self._asked())
        self._registry.set_members(
            [
                Member(
                    replica=name, state=r.state, since=r.since_unix, why=r.why, is_lost=r.is_lost
                )
                for name, r in sorted(self._replicas.items())
            ]
        )

    def _say(self, kind: str, text: str) -> None:
        logger.info("%s", text)
        try:
            self._registry.publish(Event(at=self._clock.time(), kind=kind, text=text))
        except OSDError as error:
            logger.warning("%s", error)


def _mean_open(before: ReplicaStatus | None, now: ReplicaStatus) -> float:
    """Requests in flight between two heartbeats."""
    if before is None or _life(before) != _life(now) or now.at <= before.at:
        return now.num_open
    return max(now.open_seconds - before.open_seconds, 0.0) / (now.at - before.at)


def _life(status: ReplicaStatus) -> tuple[int, float]:
    """The same as long as a replica lives."""
    return status.pid, status.started_at


def _number(name: str) -> int:
    found = re.search(r"(\d+)$", name)
    return int(found[0]) if found else 0
