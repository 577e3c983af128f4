"""The composition root: a configuration becomes a running service. The one file that builds Ray's parts.

    osd serve ──starts──► private Valkey (or --redis-url)
       │                  Ray (private, or an existing cluster)
       │                   ├─ replica actor   vLLM's OpenAI server on the service port
       │                   ├─ trainer actor   distils the draft
       │                   └─ control actor   controller, dashboard on the control port
       └─ supervises the Valkey child, leaves a note for other commands, ends all of it on Ctrl-C

Everything that can be known to be wrong is checked before anything is started (`osd/service/plan.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from osd.config.schema import Config
from osd.errors import ConfigError, OSDError, ReplayBufferError
from osd.exchange.registry import Registry
from osd.records import DraftRelease
from osd.service import note
from osd.service.plan import plan, without_speculation
from osd.service.reaper import Reaper
from trainer.trackers import check_installed

logger = logging.getLogger(__name__)

SECONDS_TO_STOP = 5.0
API_KEY = "VLLM_API_KEY"
"""Environment variable from which vLLM takes the key that clients must show."""
TRAINER_NAME = "trainer"
"""By which the control actor finds the trainer, also after either was restarted."""
Report = Callable[[str], None]


def check_gpus(config: Config, num: int) -> None:
    """Raise `ConfigError` when more GPUs are to be reserved than the machine has: Ray would wait for them for ever."""
    wanted = {"serving.num_gpus": config.serving.num_gpus}
    if config.trainer.enabled:
        wanted["trainer.num_gpus"] = config.trainer.num_gpus
    total = sum(wanted.values())
    if total > num:
        asked = ", ".join(f"{key}={value:g}" for key, value in wanted.items() if value)
        raise ConfigError(
            f"{asked}: Ray finds {num} GPUs on this machine; ask for no more, or for 0, which reserves none"
        )


class Service:
    """A running service. `start` raises what kept it from starting, with nothing left behind."""

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
        self.replica: Any = None
        self.trainer: Any = None
        self.control: Any = None
        self._actors: list[Any] = []
        self._valkey: Any = None

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
        self._start_ray()
        self._set_wanted()
        self.replica = self.start_replica("replica-0", self.plan.release)

    def wait(self) -> None:
        """Begin the trainer and the control port as well, and block until everything answers. An engine spends its
        start in one thread, importing: the others are there before it measures its step times."""
        self.trainer = self._start_trainer() if self.config.trainer.enabled else None
        self.control = self._start_control()
        self.url = self.wait_for(self.replica, "replica-0", "engine")
        self.control_url = self.wait_for(self.control, "control", "control port")
        self._leave_note()

    def stop(self) -> None:
        """End everything that `start` started; safe to call twice."""
        self._stack.close()

    def supervise(self, stop: threading.Event) -> None:
        """Until `stop` is set: keep the private Valkey alive."""
        while not stop.wait(0.5):
            if self._valkey is not None and not self._valkey.is_alive():
                logger.warning("the private Valkey died and is started again")
                with suppress(OSDError):
                    self._valkey.restart()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _start_redis(self) -> str:
        url = self.config.buffer.redis_url
        if url:
            try:
                self._reach_redis(url)
            except ReplayBufferError as error:
                remedy = "start that server, or leave the key out for a private one"
                raise ConfigError(f"buffer.redis_url: {error}; {remedy}") from None
        else:
            url = self._start_valkey()
            self._reach_redis(url)
        self._report("replay buffer: " + ("private Valkey" if self._valkey else "redis at the given URL"))
        return url

    def _start_valkey(self) -> str:
        from buffers.embedded import EmbeddedValkey

        self._valkey = EmbeddedValkey(self.config.data_path / "valkey", max_memory=self.config.buffer.max_memory)
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

    def _start_ray(self) -> None:
        if self.config.ray.address == "local":
            # Ray listens on all addresses: without a token whoever reaches its ports could run code here.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        # Ray would hide all GPUs from an actor that asks for none, also where there is nothing to share.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray runs its workers at niceness 15: an engine would give way to anything else on the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options: dict[str, Any] = {
            "address": self.config.ray.address,
            "namespace": f"osd-{self.config.deployment}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if self.config.ray.address == "local":
            directory = tempfile.mkdtemp(prefix="osd-ray-")  # short: socket paths below it have a length limit
            self._stack.callback(Reaper(directory).close)
            options |= {"include_dashboard": False, "object_store_memory": 128 << 20, "_temp_dir": directory}
        self._stack.callback(ray.shutdown)
        with signals_kept():  # Ray puts handlers of its own in place
            try:
                ray.init(**options)
            except ConnectionError as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(f"ray.address={self.config.ray.address}: no Ray cluster there ({reason})") from None
            except Exception as error:  # noqa: BLE001  Ray's own limits on a start, which it raises as plain exceptions
                reason = str(error).splitlines()[0]
                raise OSDError(f"ray does not start: {reason}; is the machine overloaded? Try again") from None
        self._stack.callback(self._stop_actors)
        if self.config.ray.address == "local":
            check_gpus(self.config, int(ray.cluster_resources().get("GPU", 0)))
        self._report(f"ray: {'private' if self.config.ray.address == 'local' else self.config.ray.address}")

    def start_replica(self, name: str, release: DraftRelease | None) -> Any:
        """One engine in an actor of its own. `release` None serves without speculation, on a port of its own."""
        from osd.service.actors import ReplicaActor

        config = self.config if release is not None else without_speculation(self.config)
        self._report(f"{name}: starting the engine")
        handle = self._actor(
            ReplicaActor,
            num_gpus=config.serving.num_gpus,
            env=config.serving.env,
            args={
                "config": config,
                "name": name,
                "target_dir": str(self.plan.target_dir),
                "target_id": self.plan.target_id,
                "draft_release": release,
                "redis_url": self.redis_url,
                "log_dir": str(self.log_dir),
            },
        )
        self._actors.append(handle)
        return handle

    def _start_trainer(self) -> Any:
        from osd.service.actors import TrainerActor

        return self._actor(
            TrainerActor,
            num_gpus=self.config.trainer.num_gpus,
            name=TRAINER_NAME,
            resource=self.config.ray.trainer_resource,
            env={"OMP_NUM_THREADS": str(self.config.trainer.num_threads)},
            args={
                "config": self.config,
                "redis_url": self.redis_url,
                "target_id": self.plan.target_id,
                "log_dir": str(self.log_dir),
            },
        )

    def _start_control(self) -> Any:
        from osd.service.actors import ControlActor

        handle = self._actor(
            ControlActor,
            num_gpus=0,
            env={"OMP_NUM_THREADS": "1"},
            args={
                "config": self.config,
                "redis_url": self.redis_url,
                "target_id": self.plan.target_id,
                "token": self.token,
                "trainer": TRAINER_NAME if self.trainer is not None else "",
                "log_dir": str(self.log_dir),
            },
        )
        self._actors.append(handle)
        return handle

    def _actor(
        self,
        cls: type,
        *,
        num_gpus: float,
        env: dict[str, str],
        args: dict[str, Any],
        name: str = "",
        resource: str = "",
    ) -> Any:
        """A restartable actor: on this machine (its ports, its files), or where a custom resource is."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": -1, "max_concurrency": 8}
        if name:
            options["name"] = name
        if resource:
            options["resources"] = {resource: 1}
        else:
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        config = args.pop("config")
        if API_KEY in os.environ:  # the processes of a cluster that was there before do not have our environment
            env = {API_KEY: os.environ[API_KEY], **env}
        return ray.remote(cls).options(**options, runtime_env={"env_vars": env}).remote(config, **args)

    def _set_wanted(self) -> None:
        """What Redis remembers of an earlier run gives way to what the release store on disk says."""
        registry = Registry(self.redis_url, self.config.deployment)
        registry.set_wanted(self.plan.release)
        registry.close()

    def wait_for(self, handle: Any, name: str, what: str) -> str:
        import ray

        try:
            url: str = ray.get(handle.wait_ready.remote())
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, OSDError):
                raise cause from None
            log = self.log_dir / f"{name}.log"
            raise OSDError(f"{name}: the {what} did not start: {reason_from_log(log) or cause}; see {log}") from None
        except ray.exceptions.RayError:
            log = self.log_dir / f"{name}.log"
            raise OSDError(f"{name}: the process of the {what} ended: {reason_from_log(log)}; see {log}") from None
        self._report(f"{name}: ready at {url}")
        return url

    def _stop_actors(self) -> None:
        """Ports close first, with a moment for requests in flight; then the processes end."""
        import ray

        with suppress(Exception):
            seconds = SECONDS_TO_STOP if self.url else 0  # before that there are no requests to wait for
            actors = [*self._actors]
            if self.trainer is not None and self.config.trainer.trackers:
                actors.append(self.trainer)  # its curves are to be whole
            ray.wait([a.stop.remote() for a in actors], num_returns=len(actors), timeout=seconds)
        for actor in [*self._actors, *([self.trainer] if self.trainer is not None else [])]:
            with suppress(Exception):
                ray.kill(actor)

    def _leave_note(self) -> None:
        running = note.Running(self.config.deployment, os.getpid(), self.url, self.control_url, self.token)
        note.write(running)
        self._stack.callback(note.remove, self.config.deployment)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Whoever listens to SIGINT and SIGTERM goes on doing so, whatever runs inside."""
    is_main = threading.current_thread() is threading.main_thread()
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def reason_from_log(path: Path) -> str:
    """The last line of a log that names an error; "" when there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-400:]
    except OSError:
        return ""
    marked = [line for line in lines if "Error: " in line and "See root cause" not in line]
    return marked[-1].split("Error: ", 1)[1].strip()[:300] if marked else ""


def serve(config: Config, report: Report) -> None:
    """Run a service until SIGINT or SIGTERM. Returns when nothing of it is left."""
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
        report(f"serving: {service.url}/v1    dashboard: {service.control_url}/dashboard")
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
