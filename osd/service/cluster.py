"""Ray: joined or started, and the actors on it.

No other file builds actors.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, cast

from osd.config.schema import Config
from osd.config.secrets import SECRET
from osd.errors import AwayError, ConfigError, OSDError, first_line
from osd.records import Place
from osd.service.ray_watch import RayWatch, patience
from osd.service.reaper import PREFIX, Reaper
from osd.service.reasons import in_one_line, last_line, reason_from_log, refused

OBJECT_STORE_BYTES = 128 << 20
SECONDS_TO_ANSWER = 30.0
SECONDS_FOR_A_REASON = 3.0
T = TypeVar("T")


def start_ray(config: Config, stack: ExitStack) -> RayWatch:
    """Start a private Ray, or join the cluster at `ray.address`. Closing `stack` undoes it. Returns
    what tells when that Ray has ended.

    Raises `ConfigError` when no cluster answers or GPUs are missing, `OSDError` when Ray fails.
    """
    is_private = config.ray.address == "local"
    if is_private:
        _require_token()
    import ray

    set_ray_defaults()
    options: dict[str, Any] = {
        "address": config.ray.address,
        "namespace": f"osd-{config.deployment}",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if is_private:
        # Ray's socket paths have a length limit, so the directory's path must be short. Ray lets
        # everybody into its own, with its logs and sockets, but not into the one around it.
        directory = tempfile.mkdtemp(prefix=PREFIX)
        stack.callback(Reaper(directory).close)
        options |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": f"{directory}/r",
        }
    stack.callback(ray.shutdown)
    with signals_kept():  # Ray installs signal handlers of its own
        _init_ray(options)
    if is_private:
        check_gpus(config, int(ray.cluster_resources().get("GPU", 0)))
        return RayWatch(ray.get_runtime_context().gcs_address, ray_here())
    return RayWatch(ray.get_runtime_context().gcs_address, ray_here(), patience())


def schema_problem(content: dict[str, Any]) -> str:
    """Why Ray's own schema refuses a file for `ray up`; "" when it does not."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(deepcopy(content)))
    except Exception as error:  # noqa: BLE001  Ray raises what its schema library raises
        return str(getattr(error, "message", error)).splitlines()[0]
    return ""


def _require_token() -> None:
    """Ray listens on all addresses. Without a token, anybody who reaches its ports can run code."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))


def set_ray_defaults() -> None:
    """How Ray's processes are to run, wherever they are started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Otherwise Ray hides all GPUs from an actor that reserves none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray runs its workers at niceness 15, so any other process would slow the engine down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Where memory runs out, Ray would end engines like any other process, and the kernel the
    # largest of its workers, which all count 1000. The trainer is to go first (`give_way.py`): it
    # does, however large an engine is, if that counts by its size alone.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_worker_oom_score_adjustment", "0")


def _init_ray(options: dict[str, Any]) -> None:
    import ray

    try:
        ray.init(**options)
    except ConnectionError as error:
        raise ConfigError(
            f"ray.address={options['address']}: no Ray cluster there ({first_line(error)})"
        ) from None
    except Exception as error:  # noqa: BLE001  Ray raises plain exceptions when its start times out
        raise OSDError(
            f"ray does not start: {first_line(error)}; is the machine overloaded? Try again"
        ) from None


def check_gpus(config: Config, num: int) -> None:
    """Raise `ConfigError` when the configuration reserves more than `num` GPUs. Ray would wait for
    them for ever."""
    serving = config.serving
    wanted = {"serving.num_gpus": (serving.num_gpus, serving.replicas.max)}
    if config.trainer.enabled:
        wanted["trainer.num_gpus"] = (config.trainer.num_gpus, 1)
    if sum(each * times for each, times in wanted.values()) > num:
        asked = ", ".join(
            f"{key}={each:g}" + (f" for each of {times} replicas" if times > 1 else "")
            for key, (each, times) in wanted.items()
            if each
        )
        raise ConfigError(
            f"{asked}: Ray finds {num} GPUs on this machine; ask for no more, or for 0, which "
            "reserves none"
        )


def start_actor(
    cls: type,
    config: Config,
    arguments: dict[str, Any],
    *,
    num_gpus: float,
    env: dict[str, str],
    name: str = "",
    resource: str = "",
) -> Any:
    """Start a restartable actor and return its handle.

    It runs on this machine, whose ports and files it uses, or on one that has `resource`. Of `env`
    it has what is not secret: Ray shows that in lists of processes, and in logs of its own.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_restarts": -1,
        "max_concurrency": 8,
    }
    if name:
        options["name"] = name
    if resource:
        options["resources"] = {resource: 1}
    else:
        here = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    shown = {variable: value for variable, value in env.items() if not SECRET.search(variable)}
    options["runtime_env"] = {"env_vars": shown}
    return ray.remote(cls).options(**options).remote(config, **arguments)


def address_here(config: Config) -> str:
    """Where the front door reaches an engine on this machine."""
    import ray

    is_here = not config.ray.replica_resource
    return "127.0.0.1" if is_here else str(ray.util.get_node_ip_address())


def network_address() -> str:
    """The address by which this machine reaches the network; a loopback address where it reaches
    none."""
    import ray

    return str(ray.util.get_node_ip_address())


def machines() -> tuple[list[dict[str, Any]], dict[str, float], dict[str, float]]:
    """Those that live, as Ray describes them; the resources of all, and what of them is free."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return alive, ray.cluster_resources(), ray.available_resources()


def ray_here() -> str:
    """Address of the Ray process that this machine's actors hang on."""
    alive, _, _ = machines()
    mine = next(node for node in alive if node["NodeID"] == node_id())
    host = mine["NodeManagerAddress"]
    return f"{f'[{host}]' if ':' in host else host}:{mine['NodeManagerPort']}"


def node_id() -> str:
    """Of the machine that this process runs on, in Ray's words."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def call(name: str, method: str, *arguments: Any) -> Any:
    """Call a named actor and wait. Raises `OSDError`: `AwayError` when it does not answer, else
    what it raised."""
    import ray

    try:
        answer = getattr(ray.get_actor(name), method).remote(*arguments)
        return ray.get(answer, timeout=SECONDS_TO_ANSWER)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OSDError):
            raise error.cause from None
        raise OSDError(f"the service's part {name!r} failed: {error.cause!r}") from None
    except (ray.exceptions.RayError, ValueError) as error:  # of what was never started
        why = first_line(error)
        raise AwayError(f"the service's part {name!r} does not answer ({why})") from None


def run_on(place: Place, function: Callable[..., T], *arguments: Any) -> T:
    """Run a function on the machine where a part runs. Raises `OSDError`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(function).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)
    )
    try:
        return cast(T, ray.get(task.remote(*arguments), timeout=SECONDS_TO_ANSWER))
    except ray.exceptions.RayTaskError as error:
        raise OSDError(f"{place.part} on {place.host}: {error.cause}") from None
    except ray.exceptions.RayError as error:
        why = first_line(error)
        raise AwayError(f"{place.part}: {place.host} does not answer ({why})") from None


def wait_ready(handle: Any, name: str, what: str, log: Path) -> str:
    """Block until the actor answers; returns its URL. Raises `OSDError` with the reason from `log`
    when it does not start."""
    return url_of(handle.wait_ready.remote(), name, what, lambda: log)


def first_ready(refs: Sequence[Any], seconds: float) -> int | None:
    """The place of the first answer that has come, good or bad, within so long."""
    import ray

    done, _ = ray.wait(list(refs), num_returns=1, timeout=seconds)
    return refs.index(done[0]) if done else None


def is_lost(ready: Any) -> bool:
    """Whether an actor, whose `wait_ready` was called, lost its process, and Ray starts it again by
    itself."""
    import ray

    if first_ready([ready], 0) is None:
        return False
    try:
        ray.get(ready)
    except ray.exceptions.ActorUnavailableError:
        return True
    except Exception:  # noqa: BLE001  `failure` tells it
        return False
    return False


def failure(ready: Any, name: str, what: str, log: Callable[[], Path | Place]) -> str:
    """Why an actor did not start, whose `wait_ready` was called; "" while it goes on, or where it
    has."""
    if first_ready([ready], 0) is None:
        return ""
    try:
        url_of(ready, name, what, log)
    except OSDError as error:
        return str(error)
    return ""


def url_of(ready: Any, name: str, what: str, log: Callable[[], Path | Place]) -> str:
    """As `wait_ready`, of an actor whose `wait_ready` was called."""
    import ray

    try:
        url: str = ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, OSDError):
            raise cause from None
        why = (refused(cause) if what == "engine" else "") or _reason(log(), in_one_line(cause))
        raise OSDError(f"{name}: the {what} did not start: {why}") from None
    except ray.exceptions.RayError as error:
        why = _reason(log(), last_line(error))
        raise OSDError(f"{name}: the process of the {what} ended: {why}") from None
    return url


def _reason(log: Path | Place, otherwise: str) -> str:
    """The reason in a log, and where to read more. A machine that is gone may never answer, so it
    is waited for in a thread."""
    if isinstance(log, Path):
        return f"{reason_from_log(log) or otherwise}; see {log}"
    found: list[str] = []

    def read() -> None:
        with suppress(OSDError):
            found.append(run_on(log, reason_from_log, Path(log.log)))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(SECONDS_FOR_A_REASON)
    return f"{''.join(found) or otherwise}; `osd logs {log.part}` says more"


def stop_actors(asked: Sequence[Any], actors: Sequence[Any], seconds: float) -> None:
    """Ask some actors to stop and give them `seconds`, then end the processes of all."""
    import ray

    with suppress(Exception):
        ray.wait([a.stop.remote() for a in asked], num_returns=len(asked), timeout=seconds)
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
