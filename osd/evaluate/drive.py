"""One run: all requests through one engine, under one load, written down step by step.

closed    so many requests in flight as long as there are any; each arrives when it is sent
open      each arrives at its time, whether or not the engine is busy
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from osd.errors import ConfigError
from osd.evaluate.plan import Load
from osd.evaluate.recorder import Seen
from osd.evaluate.runs import Request, Served, Step, Verified

SEED = 0
"""Of Poisson arrivals: the same times for every arm."""
LONGEST_SLEEP = 0.05


class Timed(Protocol):
    """What comes at a time."""

    @property
    def at(self) -> float | None: ...


class Engine(Protocol):
    """What is driven."""

    def add(
        self,
        req_id: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
    ) -> None: ...
    def step(self) -> Any:
        """request -> what the step brought it (`serving.vllm.in_process.Brought`)."""

    def take(self) -> Seen: ...


@dataclass(slots=True)
class _Open:
    """A request in flight."""

    arrived: float
    first_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    steps: list[Verified] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """What a run brought."""

    seconds: float
    steps: tuple[Step, ...]
    requests: tuple[Served, ...]


def arrivals(load: Load, requests: Sequence[Timed]) -> list[float] | None:
    """Seconds after the beginning at which each request arrives; None = when one before it has
    ended. Raises `ConfigError` where recorded times are missing."""
    if load.streams:
        return None
    if load.rate:
        rng = random.Random(SEED)
        gaps = [0.0, *(rng.expovariate(load.rate) for _ in requests[1:])]
        return list(accumulate(gaps))
    times = [request.at for request in requests]
    if not times or any(at is None for at in times):
        raise ConfigError('--arrivals: the data has requests without "at", their time in seconds')
    first = min(at for at in times if at is not None)
    return [at - first for at in times if at is not None]


class Driver:
    """Serves all requests once."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        load: Load,
        *,
        temperature: float,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._engine, self._requests, self._load = engine, requests, load
        self._times = arrivals(load, requests)
        self._settings: dict[str, Any] = {
            "temperature": temperature,
            "stop_token_ids": stop_token_ids,
        }
        at = self._times or [0.0] * len(requests)
        self._waiting = sorted(range(len(requests)), key=lambda i: (at[i], i), reverse=True)
        """Indices of requests; the last one is next."""
        self._running: dict[str, _Open] = {}
        self._steps: list[Step] = []
        self._served: list[Served] = []

    def run(self) -> Drive:
        """To the last token."""
        self._began = time.perf_counter()
        while self._waiting or self._running:
            self._send()
            if self._running:
                self._step()
            else:
                self._rest()
        seconds = self._now()
        self._engine.step()  # tells the worker that they have ended
        self._engine.take()
        served = tuple(sorted(self._served, key=lambda one: one.index))
        return Drive(seconds=seconds, steps=tuple(self._steps), requests=served)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _send(self) -> None:
        """All requests whose turn it is."""
        now = self._now()
        while self._waiting and self._is_due(self._waiting[-1], now):
            index = self._waiting.pop()
            request = self._requests[index]
            self._engine.add(
                str(index), request.prompt_ids, max_tokens=request.max_tokens, **self._settings
            )
            arrived = now if self._times is None else self._times[index]
            self._running[str(index)] = _Open(arrived)

    def _is_due(self, index: int, now: float) -> bool:
        if self._times is None:
            return len(self._running) < self._load.streams
        return self._times[index] <= now

    def _rest(self) -> None:
        assert self._times is not None, "requests wait, and nothing runs"
        time.sleep(min(max(self._times[self._waiting[-1]] - self._now(), 0.0), LONGEST_SLEEP))

    def _step(self) -> None:
        at = self._now()
        brought = self._engine.step()
        ended = self._now()
        seen = self._engine.take()
        for inner_id, (before, drafted, accepted) in seen.verified.items():
            part = Verified(len(self._steps), before, tuple(drafted), accepted)
            self._running[outer(inner_id)].steps.append(part)
        self._steps.append(_step(seen, at, ended - at))
        for req_id, (tokens, has_ended) in brought.items():
            one = self._running[req_id]
            one.first_at = one.first_at or (ended if tokens else 0.0)
            one.token_ids += tokens
            if has_ended:
                self._served.append(_served(int(req_id), self._running.pop(req_id), ended))


def outer(inner_id: str) -> str:
    """vLLM's scheduler knows a request by the name it came with, a hyphen and random letters."""
    return inner_id.partition("-")[0]


def _step(seen: Seen, at: float, seconds: float) -> Step:
    return Step(
        at=at,
        seconds=seconds,
        scheduling=seen.scheduling,
        own=seen.own,
        batch=seen.batch,
        width=seen.width,
        is_pure=seen.is_pure and seen.batch > 0,
        proposed=seen.proposed,
    )


def _served(index: int, one: _Open, ended: float) -> Served:
    return Served(
        index=index,
        arrived=one.arrived,
        first_at=one.first_at,
        ended=ended,
        token_ids=tuple(one.token_ids),
        steps=tuple(one.steps),
    )
