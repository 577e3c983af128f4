"""Runs as they are kept: one file each, and what they all have in common.

    DIR/settings.json    what every run here was measured with
    DIR/requests.json    the requests, in the order in which they are sent
    DIR/runs/ENGINE/ARM_LOAD_TEMPERATURE_REPEAT.json

A run has its file once it is whole, and is not done again. Of each request it holds the tokens that
were served and, step by step, which draft tokens were verified and how many of them were accepted:
enough to say later what another choice of lengths would have brought.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from osd.common.files import explain, replace_file
from osd.errors import ConfigError, OSDError
from osd.evaluate.plan import Arm, Planned

SCHEMA_VERSION = 1
SETTINGS, REQUESTS, RUNS = "settings.json", "requests.json", "runs"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request that every arm serves.

    Example:
        Request(prompt_ids=(17, 4), data="gsm8k", max_tokens=64, at=0.0)
    """

    prompt_ids: tuple[int, ...]
    data: str
    """Data set."""
    max_tokens: int
    at: float | None = None
    """Seconds after the first request, where its arrival was recorded."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the engine.

    Example:
        Step(at=0.02, seconds=0.004, scheduling=0.0002, own=0.0001, batch=4, width=16,
             is_pure=True, proposed=12, parts=(0.001, 0.002, 0.0003, 0.0005))
    """

    at: float
    """Seconds from the beginning of the run to that of the step."""
    seconds: float
    scheduling: float
    """Seconds of it in the scheduler."""
    own: float
    """Seconds of it that the control of speculation took, within `scheduling` or beside it."""
    batch: int
    """Requests that got tokens."""
    width: int
    """Tokens that the target computed."""
    is_pure: bool
    """Whether all of them were new tokens and draft tokens of running answers."""
    proposed: int
    """Draft tokens that were proposed at its end."""
    parts: tuple[float, float, float, float] | None = None
    """Seconds in the worker: draft, verify, sample, other. On a GPU, of launching them. None where
    this engine does not tell them."""


class Verified(msgspec.Struct, frozen=True, array_like=True):
    """A request's part in a step.

    Example:
        Verified(step=7, at=12, drafted=(5, 6, 9), accepted=2)
    """

    step: int
    """Index of the step."""
    at: int
    """Output tokens before it."""
    drafted: tuple[int, ...]
    """Draft tokens that the target verified; -1 where the engine keeps them to itself."""
    accepted: int
    """How many of them it accepted, those behind the end of the answer too."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A request as one arm served it. Times in seconds since the beginning of the run.

    Example:
        Served(index=0, arrived=0.0, first_at=0.03, ended=0.2, token_ids=(5, 6),
               steps=(Verified(step=0, at=0, drafted=(), accepted=0),))
    """

    index: int
    """Among the requests."""
    arrived: float
    first_at: float
    ended: float
    token_ids: tuple[int, ...]
    steps: tuple[Verified, ...]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's own counters of a run (`vllm:spec_decode_*` of its /metrics).

    Example:
        Counters(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=21,
                 accepted_per_position=(9, 7, 5))
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All requests, served once by one arm."""

    schema_version: int = SCHEMA_VERSION
    engine: str
    method: str
    k: int
    load: str
    temperature: float
    repeat: int
    started: str
    """Names the start of the engine: arms are paired that ran in one."""
    seconds: float
    """From the first request to the last token."""
    steps: tuple[Step, ...]
    requests: tuple[Served, ...]
    counters: Counters

    @property
    def arm(self) -> Arm:
        return Arm(method=self.method, k=self.k)

    @property
    def num_tokens(self) -> int:
        """Served."""
        return sum(len(one.token_ids) for one in self.requests)


class Directory:
    """Where the runs of one configuration are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, settings: dict[str, Any], requests: Sequence[Request]) -> None:
        """Begin, or go on with what is there. Raises `ConfigError` where that was measured with
        other settings."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / RUNS).mkdir(exist_ok=True)
            if (self.path / SETTINGS).exists():
                return self._compare(settings)
            replace_file(self.path / REQUESTS, msgspec.json.encode(requests))
            replace_file(self.path / SETTINGS, _readable(settings))
        except OSError as error:
            raise ConfigError(f"--out: {explain(error, self.path)}") from None

    def file(self, planned: Planned) -> Path:
        return self.path / RUNS / planned.file

    def missing(self, planned: Sequence[Planned]) -> list[Planned]:
        """Those that have no file yet."""
        return [one for one in planned if not self.file(one).exists()]

    def read(self, planned: Planned) -> Run:
        """Raises `ConfigError` where the file is no run, or another one."""
        file = self.file(planned)
        try:
            run = msgspec.json.decode(file.read_bytes(), type=Run)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{file}: is not a run ({error}); remove it") from None
        what = (run.engine, run.arm, run.load, run.temperature, run.repeat)
        wanted = (planned.engine, planned.arm, planned.load.name, planned.temperature)
        if what != (*wanted, planned.repeat) or run.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"{file}: holds another run than its name says; remove it")
        return run

    def requests(self) -> tuple[Request, ...]:
        file = self.path / REQUESTS
        return msgspec.json.decode(file.read_bytes(), type=tuple[Request, ...])

    def _compare(self, settings: dict[str, Any]) -> None:
        file = self.path / SETTINGS
        try:
            known = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file}: cannot be read ({error}); remove the directory") from None
        wanted = msgspec.json.decode(msgspec.json.encode(settings))
        for name in [*wanted, *known]:
            if known.get(name) != wanted.get(name):
                raise ConfigError(
                    f"--out: {self.path} holds runs with another {name} ({known.get(name)}, not "
                    f"{wanted.get(name)}); give another directory"
                )


def write(path: Path, run: Run) -> None:
    """Keep a run. Raises `OSDError` where it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(run))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises `OSDError` where a file or directory below --out cannot be written, or one elsewhere
    cannot be read."""
    try:
        yield
    except OSError as error:
        is_elsewhere = error.filename and not Path(error.filename).is_relative_to(path.parent)
        where = "" if is_elsewhere else "--out: "
        raise OSDError(f"{where}{explain(error, path)}") from None


def _readable(tree: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"
