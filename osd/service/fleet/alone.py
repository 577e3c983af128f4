"""Whether replicas of another service live under the names of those that are to be started.

Two services of one name on one Redis, each on a machine of its own, would overwrite each other's
heartbeats and wanted drafts, and a front door would send requests to the engines of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.exchange.registry import Registry
from osd.records import ReplicaStatus

SECONDS_STILL = 4.0
"""A replica whose heartbeat does not change for so long has ended."""
SECONDS_TO_END = 20.0
"""Those of a service that was killed have ended by then."""
SECONDS_BETWEEN_LOOKS = 0.5


def name_of(number: int) -> str:
    """Of a replica of the service's own; from 0 on."""
    return f"replica-{number}"


def wait_until_alone(
    registry: Registry,
    config: Config,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no replica beats under a name that this service gives. Raises `ConfigError` where
    one goes on, and `ReplayBufferError` where Redis is away."""
    names = {name_of(number) for number in range(config.serving.replicas.max)}
    begun = changed_at = clock()
    before: dict[str, ReplicaStatus] = {}
    while living := {s.replica: s for s in registry.replicas() if s.replica in names}:
        now = clock()
        if not before or any(before.get(name) != status for name, status in living.items()):
            before, changed_at = living, now
        if now - changed_at >= SECONDS_STILL:
            return
        if now - begun >= SECONDS_TO_END:
            status = max(living.values(), key=lambda status: status.at)
            raise ConfigError(
                f"deployment={config.deployment}: {status.replica} of another service of that name "
                f"lives at {status.url}, on the same Redis; name another with deployment=NAME, or "
                "end that service"
            )
        sleep(SECONDS_BETWEEN_LOOKS)
