"""The composition root: a configuration becomes a running service.

    osd serve ──starts──► private Valkey (or --redis-url)
       │                  Ray (private, or an existing cluster)
       │                   ├─ replica actors  vLLM's OpenAI server; one has the service port
       │                   ├─ trainer actor   distils the draft
       │                   └─ control actor   controller, dashboard on the control port
       │                  (serving.engines=attached: no replica; engines of others come to it)
       │                  HAProxy on the service port, before several replicas
       └─ supervises the Valkey child, leaves a note for other commands, ends all of it on Ctrl-C

`osd/service/plan.py` checks the configuration before anything is started.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from osd.common.files import replace_file
from osd.config.schema import Config
from osd.errors import ConfigError, OSDError, ReplayBufferError
from osd.exchange.registry import Registry
from osd.service import cluster, note
from osd.service.fleet.alone import wait_until_alone
from osd.service.fleet.engines import RayEngines
from osd.service.fleet.fleet import Fleet
from osd.service.fleet.front_door import PART, FrontDoor
from osd.service.logs import note_log
from osd.service.plan import plan
from osd.service.ray_watch import RayWatch, why_ended
from trainer.trackers import check_installed

logger = logging.getLogger(__name__)

SECONDS_TO_STOP = 5.0
SECONDS_BETWEEN_LOOKS = 1.0  # at the engines
Report = Callable[[str], None]


class Service:
    """A running service. When `start` raises, it leaves nothing behind."""

    def __init__(self, config: Config, report: Report = lambda text: None) -> None:
        self._report = report
        self._stack = ExitStack()
        if config.trainer.enabled and not config.ray.trainer_resource:
            check_installed(config.trainer.trackers)
        self.plan = plan(config)
        self.config = self.plan.config
        self.log_dir = self.config.data_path / "logs"
        self.token = secrets.token_urlsafe(24)
        self.redis_url = ""
        self.url = ""
        self.control_url = ""
        self.engines: RayEngines | None = None  # None where others start them
        self._fleet: Fleet | None = None
        self._trouble = ""  # why the fleet could not be looked after
        self._door: FrontDoor | None = None
        self.trainer: Any = None
        self.control: Any = None
        self._actors: list[Any] = []
        self._valkey: Any = None
        self._ray_watch: RayWatch | None = None

    def start(self) -> Service:
        """Bring everything up and wait until it answers."""
        try:
            self.launch()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Begin: the replay buffer, Ray, and the engine, which takes longest."""
        self.redis_url = self._start_redis()
        if self.has_engine and self.config.has_front_door:
            self._door = self._open_front_door()
        self._start_ray()
        self._set_wanted()
        if self.has_engine:
            self._fleet = self._start_fleet()

    def wait(self) -> None:
        """Start the trainer and the control port as well, and block until everything answers.

        The engine first imports for seconds, on one thread. The others start meanwhile, before it
        measures its step times.
        """
        self.trainer = self._start_trainer() if self.config.trainer.enabled else None
        self.control = self._start_control()
        urls = self._wait_for_engines()
        if self._door is not None:
            self._door.follow(urls)
            note_log(PART, self._door.log, Registry(self.redis_url, self.config.deployment))
        if urls:
            self.url = next(iter(urls.values())) if self._door is None else self._door.url
        log = self.log_dir / "control.log"
        self.control_url = cluster.wait_ready(self.control, "control", "control port", log)
        self._report(f"control: ready at {self.control_url}")
        if not self.has_engine:
            self._tell_engines()
        self._leave_note()

    @property
    def has_engine(self) -> bool:
        """Whether the service starts an engine; else engines of others are attached to it."""
        return self.config.serving.engines == "own"

    def stop(self) -> None:
        """End everything that `start` started; safe to call twice."""
        self._stack.close()

    def supervise(self, stop: threading.Event) -> None:
        """Until `stop` is set: keep the private Valkey alive. Raises `OSDError` when Ray has
        ended."""
        looked_at, watch = time.monotonic(), self._ray_watch
        while not stop.wait(0.5):
            if watch is not None and (gone := watch.what_is_gone()):
                raise OSDError(why_ended(gone, self.config.ray.address))
            if self._valkey is not None:
                self._valkey.keep_alive()
            if watch is not None and watch.is_head_away:
                continue  # nothing can be started, and Ray would let us wait
            if time.monotonic() - looked_at >= SECONDS_BETWEEN_LOOKS:
                self._look_after_fleet()
                looked_at = time.monotonic()

    # -- replay buffer -----------------------------------------------------------------------------

    def _start_redis(self) -> str:
        url = self.config.buffer.redis_url
        if url:
            try:
                self._reach_redis(url)
                if self.has_engine:
                    self._refuse_second(url)
            except ReplayBufferError as error:
                remedy = "start that server, or leave the key out for a private one"
                raise ConfigError(f"buffer.redis_url: {error}; {remedy}") from None
        else:
            url = self._start_valkey()
            self._reach_redis(url)
        self._report(
            "replay buffer: " + ("private Valkey" if self._valkey else "redis at the given URL")
        )
        return url

    def _start_valkey(self) -> str:
        from buffers.embedded import EmbeddedValkey

        self._valkey = EmbeddedValkey(
            self.config.data_path / "valkey",
            max_memory=self.config.buffer.max_memory,
            host=self.config.buffer.host,
            port=self.config.buffer.port,
            keeps_password=not self.has_engine,
        )
        self._stack.callback(self._valkey.stop)
        self._valkey.start()
        return str(self._valkey.url)

    def _reach_redis(self, url: str) -> None:
        from buffers.redis_stream import RedisTraceBuffer
        from osd.service.actors import buffer_settings

        buffer = RedisTraceBuffer(**buffer_settings(self.config, url, self.plan.target_id))
        try:
            buffer.ping()
        finally:
            buffer.close()

    def _refuse_second(self, url: str) -> None:
        registry = Registry(url, self.config.deployment)
        try:
            wait_until_alone(registry, self.config)
        finally:
            registry.close()

    def _set_wanted(self) -> None:
        """Redis may remember the draft and the parts of an earlier run. The release store on disk
        overrides it."""
        registry = Registry(self.redis_url, self.config.deployment)
        registry.set_wanted(self.plan.release)
        registry.clear_places()
        registry.set_members([])
        registry.close()

    # -- Ray's parts -------------------------------------------------------------------------------

    def _start_ray(self) -> None:
        address = self.config.ray.address
        self._ray_watch = cluster.start_ray(self.config, self._stack)
        self._stack.callback(self._stop_actors)
        self._report(f"ray: {'private' if address == 'local' else address}")

    @property
    def replicas(self) -> dict[str, Any]:
        """name -> actor"""
        handles = {} if self._fleet is None else self._fleet.handles
        return {name: started.actor for name, started in handles.items()}

    def _start_fleet(self) -> Fleet:
        registry = Registry(self.redis_url, self.config.deployment)
        self.engines = RayEngines(self.plan, registry, self._arguments(), self._report)
        fleet = Fleet(self.config.serving.replicas, registry, self.engines, self._door)
        fleet.start()
        return fleet

    def _wait_for_engines(self) -> dict[str, str]:
        """The URL of the first that answers; {} where others start them."""
        if self._fleet is None or self.engines is None:
            return {}
        name, url = self.engines.wait_for_first([*self._fleet.handles.values()])
        return {name: url}

    def _look_after_fleet(self) -> None:
        if self._fleet is None:
            return
        try:
            self._fleet.look()
            self._trouble = ""
        except Exception as error:  # noqa: BLE001  whatever it is, the engines serve on
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the engines are not looked after: %s", error)

    def _open_front_door(self) -> FrontDoor:
        """Put HAProxy before the replicas. Stopped after them, so that it passes on what they still
        answer."""
        serving = self.config.serving
        registry = Registry(self.redis_url, self.config.deployment)

        def where_they_are() -> dict[str, str]:
            found = registry.replicas()
            asked = self._fleet.asked if self._fleet is not None else ()
            return {status.replica: status.url for status in found if status.replica in asked}

        log = self.log_dir / f"{PART}.log"
        door = FrontDoor(serving.host, serving.port, where_they_are, log=log)
        self._stack.callback(door.stop)
        return door.start()

    def _start_trainer(self) -> Any:
        from osd.service.actors import TRAINER_NAME, TrainerActor

        return cluster.start_actor(
            TrainerActor,
            self.config,
            self._arguments() | {"is_head": self.plan.is_head},
            num_gpus=self.config.trainer.num_gpus,
            name=TRAINER_NAME,
            resource=self.config.ray.trainer_resource,
            env={"OMP_NUM_THREADS": str(self.config.trainer.num_threads)},
        )

    def _start_control(self) -> Any:
        from osd.service.actors import CONTROL_NAME, TRAINER_NAME, ControlActor

        handle = cluster.start_actor(
            ControlActor,
            self.config,
            {
                **self._arguments(),
                "token": self.token,
                "trainer": TRAINER_NAME if self.trainer is not None else "",
            },
            num_gpus=0,
            name=CONTROL_NAME,
            env={"OMP_NUM_THREADS": "1"},
        )
        self._actors.append(handle)
        return handle

    def _arguments(self) -> dict[str, Any]:
        """Those that every actor takes."""
        return {
            "redis_url": self.redis_url,
            "target_id": self.plan.target_id,
            "log_dir": str(self.log_dir),
        }

    def _stop_actors(self) -> None:
        """Close the ports first, so that requests in flight can end, then end the processes."""
        engines = [] if self.engines is None else self.engines.actors
        asked, trainer = [*engines, *self._actors], [] if self.trainer is None else [self.trainer]
        ended = [*asked, *trainer]
        if trainer and self.config.trainer.trackers:
            asked += trainer  # it writes its curves to the end
        seconds = SECONDS_TO_STOP if self.url else 0  # without a URL there were no requests
        cluster.stop_actors(asked, ended, seconds)

    def _tell_engines(self) -> None:
        """Leave a file with the environment of engines that are to be attached. It holds the
        password of Redis."""
        path = self.config.data_path / "engines.env"
        lines = (
            f"export OSD_ATTACH={shlex.quote(self.redis_url)}",
            f"export OSD_DEPLOYMENT={self.config.deployment}",
            'export VLLM_PLUGINS="${VLLM_PLUGINS:+$VLLM_PLUGINS,}osd"',
        )
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())
        self._report(f"engines: attach them with the environment in {path}")

    def _leave_note(self) -> None:
        running = note.Running(
            self.config.deployment, os.getpid(), self.url, self.control_url, self.token
        )
        note.write(running)
        self._stack.callback(note.remove, self.config.deployment)


def serve(config: Config, report: Report) -> None:
    """Run a service until SIGINT or SIGTERM, then end all of it."""
    note.refuse_second(config.deployment)
    stop = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            return
        stop.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    service = None
    try:
        service = Service(config, report).start()
        report(note.addresses(service.url, service.control_url))
        service.supervise(stop)
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        if service is not None:
            report("stopping")
            started = time.monotonic()
            service.stop()
            report(f"stopped in {time.monotonic() - started:.1f} s")
