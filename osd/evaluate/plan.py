"""What is measured: arms, loads, and which engine serves which arms.

    methods x lengths ──► arms ──► engines: one for each method that needs its own
    loads x temperatures x repeats ──► turns: all arms of an engine serve the same requests

Every engine serves `none` as well, so that each arm is compared with it in one process, minutes
apart at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from osd.errors import ConfigError

NONE, NGRAM, MEMORY, SUFFIX, DRAFT, EAGLE3 = "none", "ngram", "memory", "suffix", "draft", "eagle3"
AUTO = "auto"
"""The control of speculation, as it serves: the draft or head and the memory, and what pays."""
CLOSED = "batch "
"""How the names of loads begin that keep a number of requests in flight."""
METHODS = (NONE, NGRAM, MEMORY, SUFFIX, DRAFT, EAGLE3, AUTO)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A way to speculate.

    Example:
        Arm(method="draft", k=3)
    """

    method: str
    k: int = 0
    """Draft tokens of a step, at most where the control decides; 0 = none."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.k}" if self.k else self.method

    @property
    def slug(self) -> str:
        """For the names of files."""
        return self.name.replace(" ", "-k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How requests come: so many at a time, or each at its time.

    Example:
        Load(streams=4)
    """

    streams: int = 0
    """Requests in flight, as long as there are any; 0 = they come at times of their own."""
    rate: float = 0.0
    """Requests per second, as a Poisson process; 0 = at the times recorded in the data."""

    @property
    def name(self) -> str:
        if self.streams:
            return f"{CLOSED}{self.streams}"
        return f"{self.rate:g}/s" if self.rate else "recorded"

    @property
    def slug(self) -> str:
        """For the names of files."""
        return self.name.replace(" ", "-").replace("/", "-per-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One run: an arm serves all requests once.

    Example:
        Planned(engine="draft", arm=Arm(method="draft", k=3), load=Load(streams=4),
                temperature=0.0, repeat=0)
    """

    engine: str
    arm: Arm
    load: Load
    temperature: float
    repeat: int

    @property
    def file(self) -> str:
        """Where it is kept, below the directory of the runs."""
        what = f"{self.load.slug}_t{self.temperature:g}_{self.repeat}"
        return f"{self.engine}/{self.arm.slug}_{what}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is to be measured.

    Example:
        Plan(methods=("none", "draft"), lengths=(1, 3), loads=(Load(streams=1),))
    """

    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    """Ascending."""
    loads: tuple[Load, ...]
    temperatures: tuple[float, ...] = (0.0,)
    num_repeats: int = 1

    @property
    def engines(self) -> tuple[str, ...]:
        """By the method they are for. Without speculation, one that cannot speculate."""
        return tuple(m for m in METHODS if m in self.methods and m != NONE) or (NONE,)

    def arms(self, engine: str) -> tuple[Arm, ...]:
        """That an engine serves, `none` first."""
        lengths = {NONE: (), AUTO: self.lengths[-1:]}.get(engine, self.lengths)
        return (Arm(method=NONE), *(Arm(method=engine, k=k) for k in lengths))

    def runs(self, engine: str) -> Iterator[Planned]:
        """In the order in which they are done: turns, in each of which the arms begin with another
        one."""
        arms = self.arms(engine)
        for load in self.loads:
            for temperature in self.temperatures:
                for repeat in range(self.num_repeats):
                    shift = repeat % len(arms)
                    for arm in (*arms[shift:], *arms[:shift]):
                        yield Planned(
                            engine=engine,
                            arm=arm,
                            load=load,
                            temperature=temperature,
                            repeat=repeat,
                        )

    @property
    def num_runs(self) -> int:
        return sum(len(list(self.runs(engine))) for engine in self.engines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Directories of the target and of what may draft for it; None = not given."""

    target: Path
    draft: Path | None = None
    head: Path | None = None


def methods_of(text: str | None, models: Models, *, has_suffix: bool) -> tuple[str, ...]:
    """The methods named, or all that can be run. Raises `ConfigError` for one that cannot be."""
    missing = _missing(models, has_suffix)
    if text is None:
        return tuple(method for method in METHODS if method not in missing)
    named = tuple(filter(None, (name.strip() for name in text.split(","))))
    for method in named:
        if method not in METHODS:
            raise ConfigError(f"--methods: {method!r} is none of {', '.join(METHODS)}")
        if method in missing:
            raise ConfigError(f"--methods: {method} needs {missing[method]}")
    if not named:
        raise ConfigError(f"--methods: is empty; name some of {', '.join(METHODS)}")
    return tuple(method for method in METHODS if method in (NONE, *named))


def _missing(models: Models, has_suffix: bool) -> dict[str, str]:
    """Method that cannot be run -> what it needs."""
    return {
        method: need
        for method, need, is_there in (
            (SUFFIX, "the package arctic-inference, which is not installed", has_suffix),
            (DRAFT, "a draft model: --draft DIRECTORY", models.draft is not None),
            (EAGLE3, "an EAGLE-3 head: --head DIRECTORY", models.head is not None),
        )
        if not is_there
    }


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """`1,3` as numbers of at least 1, ascending, each once. Raises `ConfigError`."""
    return tuple(map(int, _numbers(text, flag, "whole numbers of at least 1", _is_count)))


def numbers(text: str, flag: str, *, least: float) -> tuple[float, ...]:
    """`0,0.7` as numbers, ascending, each once. Raises `ConfigError` below the least."""
    return tuple(_numbers(text, flag, f"numbers of at least {least:g}", lambda n: n >= least))


def _is_count(number: float) -> bool:
    return number >= 1 and number == int(number)


def _numbers(text: str, flag: str, what: str, fits: Callable[[float], bool]) -> Sequence[float]:
    try:
        found = sorted({float(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(math.isfinite(n) and fits(n) for n in found):
        raise ConfigError(f"{flag}={text}: must be {what}, with commas between them")
    return found
