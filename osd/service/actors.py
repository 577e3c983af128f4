"""The plain parts as Ray actors. Each runs in a process of its own, logs to a file, and is
restarted when it dies. These classes only build it there, and make no decisions."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.exchange.registry import Registry
from osd.exchange.transfer import DraftsHere, FetchedDrafts
from osd.records import DraftRelease, EarlierReport, RoundOutcome, RoundSize
from osd.service import cluster
from osd.service.give_way import give_way, limit_gpu_memory, started_again_when_out
from osd.service.logs import PartLogs, begin_log
from osd.service.plan import free_port
from osd.service.remote import TRAINER_NAME, RemoteTrainer
from serving.vllm import server

if TYPE_CHECKING:
    from trainer.sampling.teacher import Teacher

logger = logging.getLogger(__name__)

CONTROL_NAME = "control"
"""As `TRAINER_NAME`: they find each other by name, also after one was restarted."""
SECONDS_BEFORE_RESTART = 3.0
PATIENCE = 120.0
"""Seconds for which a replica waits for its first draft: the control actor starts beside it."""


def was_restarted() -> bool:
    """Whether Ray runs this constructor again after the process died."""
    import ray

    return ray.get_runtime_context().was_current_actor_reconstructed


def exit_when_failed(wait_ready: Any) -> None:
    """In a restarted process, exit when the part cannot start, so that Ray tries again."""

    def watch() -> None:
        try:
            wait_ready()
        except BaseException as error:  # noqa: BLE001  any failure; the next process may succeed
            print(f"restart failed: {error}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(SECONDS_BEFORE_RESTART)
            os._exit(1)

    if was_restarted():
        threading.Thread(target=watch, daemon=True).start()


def awake_note(config: Config, name: str, *, is_restart: bool) -> Path:
    """Where a replica keeps its `AwakeNote` from one engine to the next of the same service."""
    path = config.data_path / f"{name}.awake"
    if not is_restart:
        path.unlink(missing_ok=True)
    return path


def drafts_here(config: Config, *, patience: float = 0.0) -> DraftsHere:
    """For a part that may run on another machine than the store."""
    return DraftsHere(
        FetchedDrafts(config.data_path / "fetched"),
        partial(cluster.call, CONTROL_NAME, "read_release"),
        patience=patience,
    )


def target_here(config: Config, target_id: str) -> Path:
    """The target on this machine. Raises `ConfigError` when it is not the one that the service was
    started with."""
    from osd.models import resolve

    try:
        found = resolve.resolve(config.serving.target, "serving.target")
    except ConfigError as error:
        raise ConfigError(f"on {socket.gethostname()}: {error}") from None
    if (is_here := resolve.fingerprint(found)) != target_id:
        raise ConfigError(
            f"serving.target={config.serving.target}: another model on {socket.gethostname()} "
            f"(fingerprint {is_here}) than where the service was started ({target_id}); copy that "
            "one here"
        )
    return found


def behind_front_door(config: Config) -> Config:
    """The configuration of one of several replicas: a port of its own on this machine."""
    host = cluster.address_here(config)
    own = {"host": host, "port": free_port(host, [config.serving.port, config.control.port])}
    return config.model_copy(update={"serving": config.serving.model_copy(update=own)})


class ReplicaActor:
    """`serving.replica.Replica` in a process of its own.

    Ray restarts it with the first arguments. Their `draft_release` may have been pruned since, so
    the store on disk says which release serves now. `home` is the machine that holds the store.
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        target_dir: str,
        target_id: str,
        draft_release: DraftRelease | None,
        redis_url: str,
        log_dir: str,
        home: str,
    ) -> None:
        os.environ.update(config.serving.env)  # with what is secret
        registry = Registry(redis_url, config.deployment)
        begin_log(Path(log_dir), name, registry)
        server.prepare_environment()
        from buffers.recent import recent
        from osd.releases.store import what_serves
        from osd.service.worker import QUALIFIED_NAME
        from serving.pull import as_it_lies
        from serving.replica import Replica

        if config.has_front_door:
            config = behind_front_door(config)
        is_home = cluster.node_id() == home
        sink = buffer_settings(config, redis_url, target_id)
        if is_home and draft_release is not None:
            draft_release = what_serves(config.releases_path, draft_release)
        self._replica = Replica(
            config,
            name=name,
            target_dir=target_dir if is_home else str(target_here(config, target_id)),
            target_id=target_id,
            draft_release=draft_release,
            registry=registry,
            worker_extension=QUALIFIED_NAME,
            sink=sink,
            recent=recent(sink),
            awake_note=str(awake_note(config, name, is_restart=was_restarted())),
            here=as_it_lies if is_home else drafts_here(config, patience=PATIENCE),
        )
        exit_when_failed(self._replica.wait_ready)

    def wait_ready(self) -> str:
        return self._replica.wait_ready()

    def wait_ended(self) -> None:
        self._replica.join()

    def stop(self) -> None:
        self._replica.close()


def teacher_here(config: Config, target_id: str, *, is_head: bool = False) -> Teacher | None:
    """The target as the trainer's teacher, where `trainer.sampling` or a head needs one."""
    from osd.models import teacher
    from trainer.sampling.teacher import Teacher

    if not teacher.is_needed(config, is_head=is_head):
        return None
    return Teacher(
        target_here(config, target_id),
        top_k=config.capture.top_k,
        dtype=teacher.dtype_of(config),
        memory=config.trainer.target_memory_bytes,
    )


class TrainerActor:
    """`trainer.loop.Trainer` in a process of its own, which gives way to an engine beside it."""

    def __init__(
        self, config: Config, *, redis_url: str, target_id: str, is_head: bool, log_dir: str
    ) -> None:
        registry = Registry(redis_url, config.deployment)
        begin_log(Path(log_dir), TRAINER_NAME, registry)
        give_way(config.trainer)
        with started_again_when_out():
            from osd.service.pace import Pace, busy_replicas
            from trainer.eagle3.purges import Purges

            self._here = drafts_here(config)
            self._pace = Pace(config.trainer.duty_cycle, busy_replicas(registry))
            self._begin(config, redis_url, target_id, is_head)
        self._purges = Purges(registry.num_purges, self._trainer.forget)

    def _begin(self, config: Config, redis_url: str, target_id: str, is_head: bool) -> None:
        from buffers.redis_stream import RedisTraceBuffer
        from trainer.files import directory_of
        from trainer.loop import Trainer

        limit_gpu_memory(config.trainer)
        buffer = RedisTraceBuffer(**buffer_settings(config, redis_url, target_id))
        directory, k = directory_of(config.checkpoint_path, target_id), config.speculation.k_max
        self._trainer = Trainer(
            *(config.trainer, config.gate, k, buffer, directory, target_id),
            teacher=teacher_here(config, target_id, is_head=is_head),
            is_sampled=config.speculation.is_sampled,
        )

    def machine(self) -> str:
        return socket.gethostname()

    def run_round(self, base: DraftRelease, line: int, size: RoundSize) -> RoundOutcome:
        base = self._here(base)
        self._pace.begin()
        with self._purges.around_round():
            return self._trainer.run_round(base, on_step=self._pace, line=line, size=size)

    def num_new_traces(self) -> int:
        self._purges.look()
        return self._trainer.num_new_traces()

    def evaluate_releases(self, versions: list[DraftRelease], num_traces: int) -> dict[int, float]:
        return self._trainer.evaluate_releases([self._here(v) for v in versions], num_traces)

    def compare_earlier(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport]:
        return self._trainer.compare_earlier(
            self._here(base), self._here.those_of(earlier), num_traces
        )

    def read_candidate(
        self, path: str, files: dict[str, str], name: str, offset: int, size: int
    ) -> bytes:
        return self._trainer.read_candidate(path, files, name, offset, size)

    def stop(self) -> None:
        """Write the training curves to their end."""
        self._trainer.close()


class ControlActor:
    """`ControlPlane` (controller, dashboard) in a process of its own. `trainer`: actor's name."""

    def __init__(
        self,
        config: Config,
        *,
        redis_url: str,
        target_id: str,
        token: str,
        trainer: str,
        log_dir: str,
    ) -> None:
        registry = Registry(redis_url, config.deployment)
        begin_log(Path(log_dir), CONTROL_NAME, registry)
        import ray

        from osd.control.plane import ControlPlane
        from osd.releases.store import ReleaseStore

        self._releases = ReleaseStore(config.releases_path)
        self._plane = ControlPlane(
            config,
            redis_url=redis_url,
            buffer_settings=buffer_settings(config, redis_url, target_id),
            target_id=target_id,
            token=token,
            trainer=RemoteTrainer(ray.get_actor(trainer), config) if trainer else None,
            logs=PartLogs(registry),
        )
        exit_when_failed(self._plane.wait_ready)

    def wait_ready(self) -> str:
        return self._plane.wait_ready()

    def read_release(self, version: int, name: str, offset: int, size: int) -> bytes:
        """A part of a file of a release, for other machines. Raises `ReleaseError`."""
        return self._releases.read_part(version, name, offset, size)

    def stop(self) -> None:
        self._plane.stop()


def buffer_settings(config: Config, redis_url: str, target_id: str) -> dict[str, Any]:
    """The arguments of `RedisTraceBuffer` for this deployment."""
    return {
        "url": redis_url,
        "deployment": config.deployment,
        "target_id": target_id,
        "max_traces": config.buffer.max_traces,
        "max_domains": config.buffer.max_domains,
    }
