"""Drift schedules: which traffic comes when, as files define it (`configs/drift/NAME.yaml`).

A schedule is a list of phases. Within a phase each request is drawn from a mix, which may change
linearly into another until the phase ends. The contenders never see the domain of a request.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from benchmarks.traffic.family import FAMILIES, Family
from osd.errors import ConfigError

DIRECTORY = Path(__file__).resolve().parents[2] / "configs" / "drift"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Phase(_Part):
    """So many requests drawn from one mix, or from one mix that turns into another."""

    name: str = Field(min_length=1)
    requests: int = Field(gt=0)
    mix: dict[str, float] = Field(min_length=1)
    """Domain -> weight."""
    mix_at_end: dict[str, float] = Field(default_factory=dict)
    """What the mix has become with the last request, linearly; empty = it stays."""

    @field_validator("mix", "mix_at_end")
    @classmethod
    def _are_weights(cls, value: dict[str, float]) -> dict[str, float]:
        if any(not 0 < weight < float("inf") for weight in value.values()):
            raise ValueError("weights must be above 0; leave out what does not come")
        return value

    def shares(self, at: int) -> dict[str, float]:
        """Domain -> probability at the `at`-th request of the phase; no domain that cannot come."""
        done = at / (self.requests - 1) if self.mix_at_end and self.requests > 1 else 0.0
        found = {domain: (1 - done) * share for domain, share in _normalised(self.mix).items()}
        for domain, share in _normalised(self.mix_at_end).items():
            found[domain] = found.get(domain, 0.0) + done * share
        return {domain: share for domain, share in found.items() if share}


class Schedule(_Part):
    """A file of `configs/drift`."""

    family: str
    """The models that serve, and with them the domains there are: tiny, natural or prose."""
    requests_per_second: float | None = Field(None, gt=0)
    """When requests arrive; none = as fast as they are served."""
    phases: tuple[Phase, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _knows_its_domains(self) -> Schedule:
        if self.family not in FAMILIES:
            names = ", ".join(name for name, one in FAMILIES.items() if not one.recorded_as)
            raise ValueError(f"family must be one of {names}, not {self.family!r}")
        known = FAMILIES[self.family].domains()
        for domain in self.domains:
            if domain not in known:
                raise ValueError(
                    f"family {self.family} has no domain {domain!r}; it has {', '.join(known)}"
                )
        if len({phase.name for phase in self.phases}) < len(self.phases):
            raise ValueError("two phases have the same name; give each its own")
        return self

    @property
    def domains(self) -> tuple[str, ...]:
        """Every domain that may come, in the order of first mention."""
        return tuple(
            dict.fromkeys(d for phase in self.phases for d in (*phase.mix, *phase.mix_at_end))
        )

    def shortened(self, requests: Sequence[int]) -> Schedule:
        """The first phases of it, with so many requests each."""
        phases = tuple(
            p.model_copy(update={"requests": n})
            for p, n in zip(self.phases, requests, strict=False)
        )
        return self.model_copy(update={"phases": phases})

    @property
    def num_requests(self) -> int:
        return sum(phase.requests for phase in self.phases)

    @property
    def bounds(self) -> tuple[int, ...]:
        """First request of each phase, and the end."""
        return tuple(int(n) for n in np.cumsum([0, *(phase.requests for phase in self.phases)]))

    def last_third(self, phase: int) -> tuple[int, int]:
        """First request of a phase's last third, and its end: what has settled."""
        start, stop = self.bounds[phase : phase + 2]
        return stop - max((stop - start) // 3, 1), stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request to come: the `index`-th of its domain's stream, `at` seconds after the first.

    Example:
        Arrival(domain="sql", index=17, at=209.0)
    """

    domain: str
    index: int
    at: float


def read(path: Path) -> Schedule:
    """The schedule in a file. Raises `ConfigError` naming file, key, value and remedy."""
    try:
        tree: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); run the bench from a checkout"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({getattr(error, 'problem', error)})") from None
    try:
        return Schedule.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: {key}: {first['msg'].removeprefix('Value error, ')}") from None


def read_all(directory: Path = DIRECTORY) -> dict[str, Schedule]:
    """Name -> schedule, for every file there."""
    found = {path.stem: read(path) for path in sorted(directory.glob("*.yaml"))}
    if not found:
        raise ConfigError(
            f"{directory}: holds no schedules; run the bench from a checkout of the project"
        )
    return found


def arrivals(schedule: Schedule, name: str, seed: int) -> list[Arrival]:
    """The requests in order. Each stream is taken from its beginning without gaps, so nothing comes
    twice."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    taken: dict[str, int] = dict.fromkeys(schedule.domains, 0)
    found: list[Arrival] = []
    for phase in schedule.phases:
        for at in range(phase.requests):
            shares = phase.shares(at)
            domain = str(rng.choice(list(shares), p=list(shares.values())))
            second = len(found) / (schedule.requests_per_second or 1.0)
            found.append(Arrival(domain=domain, index=taken[domain], at=second))
            taken[domain] += 1
    return found


def shifts(schedule: Schedule, family: Family) -> list[int]:
    """The phases that bring traffic other than before them: the draft knows home, so a first phase
    may be one too."""
    before = {family.home(): 1.0}
    found = []
    for number, phase in enumerate(schedule.phases):
        if phase.shares(0) != before or phase.mix_at_end:
            found.append(number)
        before = phase.shares(phase.requests - 1)
    return found


def returns(schedule: Schedule) -> list[tuple[int, int]]:
    """(earlier, later): phases with one and the same traffic, with something else between them."""
    steady = [
        (number, phase.shares(0))
        for number, phase in enumerate(schedule.phases)
        if not phase.mix_at_end
    ]
    found = []
    for index, (later, shares) in enumerate(steady):
        earlier = [
            number for number, other in steady[:index] if other == shares and number < later - 1
        ]
        found += [(earlier[-1], later)] if earlier else []
    return found


def _normalised(mix: dict[str, float]) -> dict[str, float]:
    total = sum(mix.values())
    return {domain: weight / total for domain, weight in mix.items()}
