"""The plan of a service, made before anything starts: free ports, models on disk, the first draft.

It finds every fault of a configuration that shows before a start on this machine.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from osd.config.schema import Config
from osd.config.serving import ReplicasConfig, SpeculationConfig, argument
from osd.errors import ConfigError, ReleaseError
from osd.exchange.redis_url import is_loopback, mask_url, names_its_own_machine
from osd.models import resolve, teacher
from osd.models.fit import check_fit, is_head
from osd.models.vocab_padding import write_fitting
from osd.records import DraftRelease
from osd.releases.store import ReleaseStore
from osd.service.fleet.haproxy import find_program

logger = logging.getLogger(__name__)

PORTS = range(20_000, 32_000)
"""Free ports are taken from this range."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A concrete configuration: ports are chosen, models found, and the first draft is on disk."""

    config: Config
    target_dir: Path
    target_id: str
    release: DraftRelease
    is_head: bool
    """Whether the draft is a head, which learns from the target's hidden states."""


def plan(config: Config) -> ServicePlan:
    """Check everything that can be checked before a start. Raises `OSDError` with key, value and
    remedy."""
    with_free_ports(config)  # a port in use is told now; asked again after an hour of fetching
    target, draft, num_tokens = check(config)
    config = with_free_ports(config)
    target_id = resolve.fingerprint(target)
    release = first_release(config, draft, target_id, num_tokens)
    return ServicePlan(config, target, target_id, release, is_head(draft))


def check(config: Config) -> tuple[Path, Path, int]:
    """What can be checked while another service runs here: whether the parts would reach each
    other, and whether the models are there and fit. Returns target, draft, and how many tokens they
    have."""
    check_remote_parts(config)
    check_front_door(config)
    check_attached(config)
    resolve.check_name(config.serving.target, "serving.target")
    resolve.check_name(config.serving.draft, "serving.draft")  # before the target is fetched
    target = resolve.resolve(config.serving.target, "serving.target")
    draft = resolve.resolve(config.serving.draft, "serving.draft")
    num_tokens = check_fit(target, draft, max_model_len(config))
    check_sampled(config, is_head=is_head(draft))
    if teacher.is_needed(config, is_head=is_head(draft)):
        teacher.check_teacher(config, target, head=draft if is_head(draft) else None)
    return target, draft, num_tokens


def check_sampled(config: Config, *, is_head: bool) -> None:
    """Sampled drafts are for what they were run with: each rank draws for itself."""
    if config.speculation.is_sampled and config.serving.num_ranks > 1 and is_head:
        raise ConfigError(
            "speculation.draft_sample_method=probabilistic: was not run with an EAGLE-3 head over "
            "several ranks; use greedy"
        )


def check_remote_parts(config: Config) -> None:
    """A part on another machine needs a Redis that both machines reach."""
    for key, who in remote_parts(config).items():
        _check_remote(config, key, who)


def remote_parts(config: Config) -> dict[str, str]:
    """What runs on a machine with a custom resource: the key of `ray` that names it -> who."""
    parts = {"trainer_resource": "the trainer"} if config.trainer.enabled else {}
    parts |= {"replica_resource": "the engines"} if config.serving.engines == "own" else {}
    return {key: who for key, who in parts.items() if getattr(config.ray, key)}


def asked_of_machines(config: Config) -> dict[str, float]:
    """Custom resource of a machine -> GPUs that a part reserves there, the most of all that ask
    for the resource; "" -> those of all parts together on the machine of the service.

    Example:
        asked_of_machines(config) == {"": 1.0, "train": 0.5}
    """
    asked = {"": 0.0}
    engines, trainers = config.serving.replicas.max, int(config.trainer.enabled)
    engines *= config.serving.engines == "own"
    for resource, num_gpus, num in (
        (config.ray.replica_resource, config.serving.num_gpus, engines),
        (config.ray.trainer_resource, config.trainer.num_gpus, trainers),
    ):
        if resource and num:
            asked[resource] = max(asked.get(resource, 0.0), num_gpus)
        elif num:
            asked[""] += num * num_gpus
    return asked


def _check_remote(config: Config, key: str, who: str) -> None:
    resource = getattr(config.ray, key)
    why = f"ray.{key}={resource} puts {who} on another machine"
    if config.ray.address == "local":
        raise ConfigError(f"{why}, and a private Ray has none; set ray.address (--address)")
    if not config.buffer.redis_url and is_loopback(config.buffer.host):
        raise ConfigError(
            f"{why}, which cannot reach buffer.host={config.buffer.host} of the private Valkey; "
            "set it to an address of this machine that the other reaches, or buffer.redis_url"
        )
    if names_its_own_machine(config.buffer.redis_url):
        raise ConfigError(
            f"buffer.redis_url={mask_url(config.buffer.redis_url)}: {why}, for which that is "
            "another server; name it by an address that both reach"
        )


def check_front_door(config: Config) -> None:
    """Several replicas need one, and replicas on other machines."""
    if config.serving.engines != "own":
        if config.serving.replicas.max > 1:
            raise ConfigError(
                f"serving.replicas.max={config.serving.replicas.max}: attached engines are started "
                "by others; leave it out"
            )
    elif config.has_front_door:
        for name in ("ssl_certfile", "ssl_keyfile"):
            if argument(config.serving.vllm, name) is not None:
                raise ConfigError(
                    f"serving.vllm.{name}: the replicas behind the front door speak plain HTTP; "
                    "leave it out and end TLS before the service port"
                )
        find_program()


def check_attached(config: Config) -> None:
    """Engines of others outlive a service, so it has to be found again at the same place."""
    if config.serving.engines != "attached":
        return
    usual = SpeculationConfig()
    for key in (
        *("mode", "proposers", "calibration_seconds", "net_interval_seconds"),
        *("memory_k_max", "memory_bytes"),
    ):
        if (value := getattr(config.speculation, key)) != getattr(usual, key):
            raise ConfigError(
                f"speculation.{key}={value}: engines that are attached are not told; leave it out, "
                "and switch their control on or off with serving.steps"
            )
    if not config.buffer.redis_url and not config.buffer.port:
        raise ConfigError(
            "serving.engines=attached: engines would not find a private Valkey again after a "
            "restart; give it a port with buffer.port=N, or set buffer.redis_url"
        )


def max_model_len(config: Config) -> int | None:
    """The context length that the configuration asks for; None = the target's own."""
    vllm = {key.replace("-", "_"): value for key, value in config.serving.vllm.items()}
    value = vllm.get("max_model_len")
    return value if isinstance(value, int) else None


def with_free_ports(config: Config) -> Config:
    """Replace ports 0 by free ones. Raises `ConfigError` for a port that is in use."""
    taken: list[int] = []
    sections = ("serving", "control") if config.serving.engines == "own" else ("control",)
    for section in sections:
        part = getattr(config, section)
        port = part.port or free_port(part.host, taken)
        try:
            try_port(part.host, port)
        except OSError as error:
            raise ConfigError(
                f"{section}.port={port}: cannot listen on {part.host}:{port} ({error.strerror}); "
                f"choose another with {section}.port=N, or 0 for any free one"
            ) from None
        if port in taken:
            raise ConfigError(
                f"{section}.port={port}: the service port and the control port must differ"
            )
        taken.append(port)
        config = config.model_copy(update={section: part.model_copy(update={"port": port})})
    return config


def free_port(host: str, taken: Sequence[int] = ()) -> int:
    """A port that nobody listens on.

    The engine opens it only after loading. Meanwhile the system gives out ports from 32768 on, and
    Ray from 10002 to 19999, so those are avoided.
    """
    for port in random.sample(PORTS, 100):
        with suppress(OSError):
            try_port(host, port)
            if port not in taken:
                return port
    raise ConfigError(
        f"no free port on {host} between {PORTS[0]} and {PORTS[-1]}; name one instead of 0"
    )


def try_port(host: str, port: int) -> None:
    """Raise `OSError` when no server can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def first_release(config: Config, draft: Path, target_id: str, num_tokens: int) -> DraftRelease:
    """The release to serve first: the pinned or the current one of this target.

    Without any, `draft` is published, fitted to the target's `num_tokens`. The log warns when the
    release began with another draft. Raises `ConfigError` when that was a head and `draft` is a
    model of its own, or the other way round: they are served and trained in different ways.
    """
    try:
        store = ReleaseStore(config.releases_path)
        origin = resolve.fingerprint(draft)
        if (found := newest_undamaged(store, target_id)) is not None:
            release = found
        else:
            fitting = partial(write_fitting, num_tokens=num_tokens)
            release = store.publish(
                draft, parent=0, target_id=target_id, origin=origin, copy=fitting
            )
        _refuse_other_kind(release, draft)
        if release.origin not in ("", origin):
            logger.warning(
                "v%d serves, which comes of another draft: %s is not used; to begin with it, name "
                "another deployment=NAME",
                release.version,
                draft,
            )
        return release
    except ReleaseError as error:
        key = "releases.dir" if config.releases.dir else "data_dir"
        raise ConfigError(f"{key}: {error}; choose another with {key}=DIRECTORY") from None


def _refuse_other_kind(release: DraftRelease, draft: Path) -> None:
    if is_head(Path(release.path)) != is_head(draft):
        kinds = ("a draft model", "a head")
        raise ConfigError(
            f"serving.draft={draft}: is {kinds[is_head(draft)]}, and v{release.version}, which "
            f"serves this target, is {kinds[not is_head(draft)]}; to begin with it, name another "
            "deployment=NAME (or data_dir=DIRECTORY)"
        )


def newest_undamaged(store: ReleaseStore, target_id: str) -> DraftRelease | None:
    """The pinned release, or the current one. Damaged ones are marked bad and skipped: a pin on
    one of them ends."""
    while (release := _first_choice(store, target_id)) is not None:
        try:
            store.verify(release)
        except ReleaseError as error:
            logger.warning("%s", error)
            store.mark_bad(release.version, "damaged on disk")
            continue
        return release
    return None


def _first_choice(store: ReleaseStore, target_id: str) -> DraftRelease | None:
    pinned = store.pinned(target_id)
    return store.current(target_id) if pinned is None else store.get(pinned)


def without_speculation(config: Config) -> Config:
    """The same engine without a draft, on another free port."""
    vllm = {k: v for k, v in config.serving.vllm.items() if k != "per_request_spec_decode_metrics"}
    port = free_port(config.serving.host, [config.serving.port, config.control.port])
    return config.model_copy(
        update={
            "serving": config.serving.model_copy(
                update={"port": port, "vllm": vllm, "replicas": ReplicasConfig()}
            )
        }
    )
