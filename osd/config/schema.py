"""The whole configuration as one strict typed tree: every key, its default and its limits.

The text under a field is its documentation: `docs/configuration.md` is made from it. The sections
of the engine stand in `serving.py`, those of training in `training.py`, all others here.
`reading.py` reads a configuration.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, field_validator

from osd.config.section import Section, check_home
from osd.config.serving import CaptureConfig, ServingConfig, SpeculationConfig
from osd.config.training import BufferConfig, GateConfig, TrainerConfig


class ControlConfig(Section):
    """The control port: dashboard, status, metrics, administration."""

    host: str = "127.0.0.1"
    """Address of the control port."""
    port: int = Field(8001, ge=0, le=65535)
    """Control port. 0 = any free one."""
    seconds_between_looks: float = Field(0.5, gt=0)
    """Pause between two looks of the watch loop."""
    history_seconds: int = Field(7 * 24 * 3600, ge=60)
    """How much history the dashboard keeps, in memory and in `history.db` under the data directory:
    seconds for the last two hours, minutes before."""


class ReleasesConfig(Section):
    """The store of drafts on disk."""

    dir: str = ""
    """Where releases are kept; empty = `releases` under the data directory."""
    keep: int = Field(8, ge=2)
    """Newest releases kept; pinned, serving and first ones are never pruned."""

    _check_dir = field_validator("dir")(check_home)


class RayConfig(Section):
    """The Ray cluster the service runs on."""

    address: str = "local"
    """"local" = a private one, started and stopped with the service; "auto" or an address = an
    existing cluster."""
    replica_resource: str = ""
    """Custom Ray resource of the machines the engines run on, one for each unit of it; empty = the
    machine the service was started on. Such a machine has the target at the same name or path, and
    needs a Redis that it reaches."""
    trainer_resource: str = ""
    """Custom Ray resource of the machine the trainer runs on; empty = the machine the service was
    started on. Another machine has a data directory of its own at the same path, gets releases over
    the network, and needs a Redis that both reach (`buffer.host` or `buffer.redis_url`)."""


class Config(Section):
    """Everything the service can be told."""

    deployment: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Name of this deployment: keeps its data, Redis keys and actors apart from others."""
    data_dir: str = ""
    """Where releases, checkpoints and the private Valkey's file live; empty = `osd/DEPLOYMENT`
    under `$XDG_DATA_HOME`, or `~/.local/share` where that is not set."""
    serving: ServingConfig = ServingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    capture: CaptureConfig = CaptureConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    gate: GateConfig = GateConfig()
    control: ControlConfig = ControlConfig()
    releases: ReleasesConfig = ReleasesConfig()
    ray: RayConfig = RayConfig()

    _check_data_dir = field_validator("data_dir")(check_home)

    @property
    def has_front_door(self) -> bool:
        """Whether HAProxy has the service port, and engines have ports of their own."""
        return self.serving.replicas.max > 1 or bool(self.ray.replica_resource)

    @property
    def front_door_url(self) -> str:
        """Where clients find several replicas; "" where one has the service port to itself."""
        host = f"[{self.serving.host}]" if ":" in self.serving.host else self.serving.host
        is_there = self.has_front_door and self.serving.engines == "own"
        return f"http://{host}:{self.serving.port}" if is_there else ""

    @property
    def data_path(self) -> Path:
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(self.data_dir or f"{base}/osd/{self.deployment}").expanduser().resolve()

    @property
    def releases_path(self) -> Path:
        return (
            Path(self.releases.dir).expanduser().resolve()
            if self.releases.dir
            else self.data_path / "releases"
        )

    @property
    def history_path(self) -> Path:
        return self.data_path / "history.db"

    @property
    def checkpoint_path(self) -> Path:
        return self.data_path / "trainer"
