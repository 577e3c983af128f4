"""Replicas as Ray actors: how a fleet starts one, ends it, and learns why it does not serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from osd.config.schema import Config
from osd.exchange.registry import Registry
from osd.records import DraftRelease
from osd.service import cluster
from osd.service.plan import ServicePlan, without_speculation

SECONDS_TO_STOP = 5.0


class Started(NamedTuple):
    """A replica that was started."""

    name: str
    actor: Any
    ready: Any
    """Ray's reference to its URL, which comes when it answers."""


class RayEngines:
    """An `osd.service.fleet.fleet.Engines`. `arguments`: what every actor of the service takes."""

    def __init__(
        self,
        plan: ServicePlan,
        registry: Registry,
        arguments: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self._plan, self._registry = plan, registry
        self._arguments, self._report = arguments, report
        self.actors: list[Any] = []
        """All that run."""

    def start(self, name: str) -> Started:
        return self.start_with(name, self._plan.config, self._plan.release)

    def start_plain(self, name: str) -> Started:
        """One without speculation, on another port."""
        return self.start_with(name, without_speculation(self._plan.config), None)

    def start_with(self, name: str, config: Config, release: DraftRelease | None) -> Started:
        """Begin to start an engine in an actor of its own."""
        from osd.service.actors import ReplicaActor

        self._report(f"{name}: starting the engine")
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
        url = cluster.url_of(started.ready, started.name, "engine", self._log(started))
        self._report(f"{started.name}: ready at {url}")
        return url

    def end(self, handle: Started) -> None:
        self.actors.remove(handle.actor)
        cluster.stop_actors([handle.actor], [handle.actor], SECONDS_TO_STOP)

    def failure(self, handle: Started) -> str:
        return cluster.failure(handle.ready, handle.name, "engine", self._log(handle))

    def why_pending(self, name: str) -> str:
        place = next((p for p in self._registry.places() if p.part == name), None)
        config = self._plan.config
        return cluster.why_pending(place, config.ray.replica_resource, config.serving.num_gpus)

    def _log(self, started: Started) -> Path:
        return Path(self._arguments["log_dir"]) / f"{started.name}.log"
