"""The replicas of a service, from their start to their end.

    load ──► wanted (`scaling.py`) ──► more:  start ──► heartbeat ──► serves, the front door asks it
                                  └──► fewer: drain ──► answers what it has ──► ended, forgotten

The service asks it to `look` about once a second. It looks at heartbeats alone, so that a replica
may run on any machine; what it finds is written to Redis, where the controller shows it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from osd.config.serving import ReplicasConfig
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import Event, Member, ReplicaStatus
from osd.service.fleet.scaling import Scaler

logger = logging.getLogger(__name__)

SECONDS_TO_DRAIN = 3600.0
"""Then a replica is ended with what it still answers."""
HEARTBEATS_TO_END = 2
"""Heartbeats of a drained replica that must show it idle: one may have been on its way."""
FIRST_DELAY, LONGEST_DELAY = 15.0, 600.0
"""Seconds without another start after one that failed; the delay doubles each time."""


class Engines(Protocol):
    """What starts and ends the processes of replicas."""

    def start(self, name: str) -> Any:
        """Begin to start one; returns its handle."""

    def end(self, handle: Any) -> None:
        """End one, whatever it does."""

    def failure(self, handle: Any) -> str:
        """Why its start has failed; "" while it goes on or where it has not."""

    def why_pending(self, name: str) -> str:
        """Why no machine runs it yet; "" where one does, or nothing is known."""


class Door(Protocol):
    """What passes requests on to replicas."""

    def drop(self, name: str) -> None:
        """Send this one no new requests."""


@dataclass(slots=True)
class _Replica:
    handle: Any
    state: str = "starting"
    since: float = field(default_factory=time.time)
    why: str = ""
    seen: ReplicaStatus | None = None
    """Its newest heartbeat; None while it has none."""
    num_requests: float = 0.0
    """In flight, on average between its last two heartbeats."""
    num_idle: int = 0
    """Heartbeats since it was drained in which it had nothing to do."""


class Fleet:
    """The replicas of one service. Not thread-safe.

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._registry = config, registry
        self._engines, self.door, self._clock = engines, door, clock
        self._scaler = Scaler(config, clock)
        self._replicas: dict[str, _Replica] = {}
        self._delay, self._not_before = FIRST_DELAY, 0.0

    @property
    def handles(self) -> dict[str, Any]:
        """name -> handle of every replica"""
        return {name: replica.handle for name, replica in self._replicas.items()}

    @property
    def asked(self) -> set[str]:
        """Those that are to get requests."""
        return {name for name, r in self._replicas.items() if r.state != "draining"}

    def start(self) -> None:
        """Begin to start as many as there are at least."""
        for _ in range(self._config.min):
            self._start_one()
        self._tell()

    def look(self) -> None:
        """Follow the heartbeats and the load. Raises `ReplayBufferError` while Redis is away:
        nothing changes then."""
        heartbeats = {status.replica: status for status in self._registry.replicas()}
        for name, replica in list(self._replicas.items()):
            self._follow(name, replica, heartbeats.get(name))
        self._scale()
        self._tell()

    # -- inside -----------------------------------------------------------------------------------

    def _follow(self, name: str, replica: _Replica, heartbeat: ReplicaStatus | None) -> None:
        is_new = heartbeat is not None and (replica.seen is None or heartbeat.at != replica.seen.at)
        if is_new or heartbeat is None:
            replica.num_requests = _mean_open(replica.seen, heartbeat)
            replica.seen = heartbeat
        if replica.state == "draining":
            return self._end_if_drained(name, replica, heartbeat, is_new)
        if heartbeat is not None:
            if replica.state != "serving":
                self._change(replica, "serving")
                self._delay = FIRST_DELAY
        elif replica.state == "serving":
            self._change(replica, "starting")
        elif reason := self._engines.failure(replica.handle):
            self._give_up(name, replica, reason)
        else:
            replica.why = self._engines.why_pending(name)
        return None

    def _end_if_drained(
        self, name: str, replica: _Replica, heartbeat: ReplicaStatus | None, is_new: bool
    ) -> None:
        self._drop(name)  # again: the front door may have been told of it meanwhile
        if heartbeat is not None and is_new:
            replica.num_idle = 0 if heartbeat.num_open else replica.num_idle + 1
        is_over = self._clock() - replica.since > SECONDS_TO_DRAIN
        if heartbeat is None or replica.num_idle >= HEARTBEATS_TO_END or is_over:
            self._end(name, replica)
            what = "ended after an hour" if is_over else "drained, and ended"
            self._say("scaled", f"{name} is {what}")

    def _scale(self) -> None:
        num = len(self.asked)
        num_requests = sum(replica.num_requests for replica in self._replicas.values())
        wanted = self._scaler.wanted(num, num_requests)
        if wanted > num and self._clock() < self._not_before:
            return
        load = f"{num_requests:.1f} requests in flight"
        draining = [name for name in self._replicas if name not in self.asked]
        for _ in range(num, wanted):
            if draining:
                self._change(self._replicas[name := draining.pop(0)], "starting")
                self._say("scaled", f"{name} is asked again: {load}")
            else:
                self._say("scaled", f"{self._start_one()} is started: {load}")
        for name in sorted(self.asked, key=_number)[wanted:]:
            self._change(self._replicas[name], "draining")
            self._drop(name)
            self._say("scaled", f"{name} is drained: {load}")

    def _start_one(self) -> str:
        name = next(
            n for i in range(len(self._replicas) + 1) if (n := f"replica-{i}") not in self._replicas
        )
        self._replicas[name] = _Replica(self._engines.start(name), since=self._clock())
        return name

    def _give_up(self, name: str, replica: _Replica, reason: str) -> None:
        """It is started again later, if it is still needed."""
        self._end(name, replica)
        self._not_before = self._clock() + self._delay
        self._say("replica_failed", f"{name} did not start: {reason}")
        self._delay = min(2 * self._delay, LONGEST_DELAY)

    def _end(self, name: str, replica: _Replica) -> None:
        del self._replicas[name]
        self._drop(name)
        self._engines.end(replica.handle)
        self._registry.forget(name)

    def _drop(self, name: str) -> None:
        if self.door is not None:
            self.door.drop(name)

    def _change(self, replica: _Replica, state: str) -> None:
        replica.state, replica.since = state, self._clock()
        replica.why, replica.num_idle = "", 0

    def _tell(self) -> None:
        self._registry.set_members(
            [
                Member(replica=name, state=r.state, since=r.since, why=r.why)
                for name, r in sorted(self._replicas.items())
            ]
        )

    def _say(self, kind: str, text: str) -> None:
        logger.info("%s", text)
        try:
            self._registry.publish(Event(at=self._clock(), kind=kind, text=text))
        except OSDError as error:
            logger.warning("%s", error)


def _mean_open(before: ReplicaStatus | None, now: ReplicaStatus | None) -> float:
    """Requests in flight between two heartbeats."""
    if now is None:
        return 0.0
    if before is None or before.started_at != now.started_at or now.at <= before.at:
        return now.num_open
    return max(now.open_seconds - before.open_seconds, 0.0) / (now.at - before.at)


def _number(name: str) -> int:
    found = re.search(r"(\d+)$", name)
    return int(found[0]) if found else 0
