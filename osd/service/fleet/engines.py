"""Replicas as Ray actors: how a fleet starts one, ends it, and learns why it does not serve."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from osd.config.schema import Config
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import DraftRelease, Place
from osd.service import cluster
from osd.service.fleet import room
from osd.service.plan import ServicePlan, without_speculation

API_KEY = "VLLM_API_KEY"
"""Environment variable from which vLLM takes the key that clients must show."""
SECONDS_TO_STOP = 5.0
SECONDS_BETWEEN_QUESTIONS = 5.0
SECONDS_TO_RETURN = 120.0
"""For so long a replica whose process was lost may be started again by Ray before it answers. Ray
cannot be asked meanwhile how far it is."""


@dataclass(slots=True)
class Started:
    """A replica that was started."""

    name: str
    actor: Any
    ready: Any
    """Ray's reference to its URL, which comes when it answers."""
    lost_since: float | None = None
    """Monotonic time; None while it is not known to be lost."""
    end: Any = None
    """Ray's reference that is ready when its process has ended; None = it is not watched."""

    def ask(self) -> None:
        """Ask anew when it answers."""
        self.ready = self.actor.wait_ready.remote()


class RayEngines:
    """An `osd.service.fleet.fleet.Engines`. `arguments`: what every actor of the service takes."""

    def __init__(
        self,
        plan: ServicePlan,
        registry: Registry,
        arguments: dict[str, Any],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._plan, self._registry = plan, registry
        self._arguments, self._report = arguments, report
        self.actors: list[Any] = []
        """All that run."""
        self._reasons: dict[str, str] = {}
        self._asked_for: set[str] = set()
        """Those whose reason was wanted since Ray was asked."""
        self._asked_at = -SECONDS_BETWEEN_QUESTIONS
        self._asking: threading.Thread | None = None

    def start(self, name: str) -> Started:
        self._registry.clear_place(name)  # of an earlier life
        self._reasons.pop(name, None)
        return self.start_with(name, self._plan.config, self._plan.release)

    def start_plain(self, name: str) -> Started:
        """One without speculation, on another port."""
        return self.start_with(name, without_speculation(self._plan.config), None)

    def start_with(self, name: str, config: Config, release: DraftRelease | None) -> Started:
        """Begin to start an engine in an actor of its own."""
        from osd.service.actors import ReplicaActor

        self._report(f"{name}: starting the engine")
        config = with_key(config)
        actor = cluster.start_actor(
            ReplicaActor,
            config,
            {
                **self._arguments,
                "name": name,
                "target_dir": str(self._plan.target_dir),
                "draft_release": release,
                "home": cluster.node_id(),
            },
            num_gpus=config.serving.num_gpus,
            resource=config.ray.replica_resource,
            env=config.serving.env,
        )
        self.actors.append(actor)
        return Started(name, actor, actor.wait_ready.remote())

    def wait(self, started: Started) -> str:
        """Block until it answers; returns its URL. Raises `OSDError`."""
        url = cluster.url_of(started.ready, started.name, "engine", partial(self._log, started))
        self._report(f"{started.name}: ready at {url}")
        return url

    def wait_for_first(self, started: Sequence[Started]) -> tuple[str, str]:
        """Block until one of them answers; returns its name and URL. What they wait for is told.
        Raises `OSDError` where the first that is decided does not start."""
        told = ""
        while (first := cluster.first_ready([each.ready for each in started], 2.0)) is None:
            reason = next((r for each in started if (r := self.why_pending(each.name))), "")
            if reason and reason != told:
                self._report(f"waiting for a machine: {reason}")
            told = reason
        return started[first].name, self.wait(started[first])

    def end(self, handle: Started) -> None:
        self.actors.remove(handle.actor)
        actors = [handle.actor]
        stop = threading.Thread(
            target=cluster.stop_actors, args=(actors, actors, SECONDS_TO_STOP), daemon=True
        )
        stop.start()

    def watch(self, handle: Started) -> None:
        handle.end = handle.actor.wait_ended.remote()

    def has_ended(self, handle: Started) -> bool:
        return handle.end is not None and cluster.first_ready([handle.end], 0) is not None

    def expect(self, handle: Started) -> None:
        handle.lost_since = None
        handle.ask()

    def failure(self, handle: Started) -> str:
        if cluster.is_lost(handle.ready):
            now = self._clock()
            handle.lost_since = now if handle.lost_since is None else handle.lost_since
            if now - handle.lost_since < SECONDS_TO_RETURN:
                handle.ask()
                return ""
        return cluster.failure(handle.ready, handle.name, "engine", partial(self._log, handle))

    def why_pending(self, name: str) -> str:
        is_asking = self._asking is not None and self._asking.is_alive()
        now = self._clock()
        self._asked_for.add(name)
        if not is_asking and now - self._asked_at >= SECONDS_BETWEEN_QUESTIONS:
            # Ray's head may be gone, and its answer never come.
            self._asked_at = now
            names, self._asked_for = self._asked_for, set()
            self._asking = threading.Thread(target=self._ask_why, args=(names,), daemon=True)
            self._asking.start()
        return self._reasons.get(name, "")

    def _place(self, name: str) -> Place | None:
        """Where it was last, as it said itself. Raises `OSDError`."""
        return next((place for place in self._registry.places() if place.part == name), None)

    def _ask_why(self, names: set[str]) -> None:
        config = self._plan.config
        resource, num_gpus = config.ray.replica_resource, config.serving.num_gpus
        with suppress(OSDError):
            for name in names:
                self._reasons[name] = room.why_pending(self._place(name), resource, num_gpus)

    def _log(self, started: Started) -> Path | Place:
        """Its log: a place where that may be on another machine."""
        with suppress(OSDError):
            is_elsewhere = self._plan.config.ray.replica_resource
            if is_elsewhere and (place := self._place(started.name)) is not None:
                return place
        return Path(self._arguments["log_dir"]) / f"{started.name}.log"


def with_key(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration with the key of our environment, which processes of an existing cluster do
    not inherit."""
    env = {name: environ[name] for name in (API_KEY,) if name in environ} | config.serving.env
    return config.model_copy(update={"serving": config.serving.model_copy(update={"env": env})})
