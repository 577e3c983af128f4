"""The rate sweep on real engines: requests come at times of their own, by a clock that shows the
CPU time an engine has taken. What else the machine does cannot be seen on it, but for its caches
and its other hardware threads. So the engines of all arms, in one process, go through the same
moments side by side.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.control.control import seen
from benchmarks.papers.open_loop import AUTO, poisson
from benchmarks.record import Row

WARM_UP = ((1, 64), (4, 192), (16, 384))
"""Streams and tokens, served by each engine first: an engine's first steps take longer than any
other, and the control learns what steps take."""
STEPS_IN_A_ROW = 16
"""Of one engine. The control learns from steps that follow each other."""


class Engine(Protocol):
    """What is driven (`benchmarks.engines.loaded.Loaded`)."""

    def add(self, req_id: str, prompt: list[int], num_tokens: int) -> None: ...
    def step(self) -> dict[str, list[int]]: ...


class LiveLoop:
    """One engine, its requests, and its clock."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        arrivals: Sequence[float],
        *,
        num_tokens: int,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`arrivals`: seconds, in order; `num_tokens`: of each answer."""
        self.now = 0.0
        """Seconds that the engine has worked, or had nothing to do."""
        self.latencies = [0.0] * len(arrivals)
        """Seconds from each arrival to the last token, 0 until then."""
        self._engine, self._prompts, self._arrivals = engine, prompts, arrivals
        self._num_tokens, self._clock = num_tokens, clock
        self._next = 0
        self._left: dict[str, int] = {}

    @property
    def is_over(self) -> bool:
        return self._next == len(self._arrivals) and not self._left

    def step(self) -> None:
        """One step of whoever is there. Where nobody is, time jumps to the next arrival."""
        if not self._left:
            self.now = max(self.now, self._arrivals[self._next])
        began = self._clock()
        while self._next < len(self._arrivals) and self._arrivals[self._next] <= self.now:
            self._engine.add(str(self._next), self._prompts[self._next], self._num_tokens)
            self._left[str(self._next)] = self._num_tokens
            self._next += 1
        brought = self._engine.step()
        self.now += self._clock() - began
        for req_id, tokens in brought.items():
            self._left[req_id] -= len(tokens)
            if self._left[req_id] <= 0:
                self.latencies[int(req_id)] = self.now - self._arrivals[int(req_id)]
                del self._left[req_id]
        if self.is_over:
            self._engine.step()  # tells the worker that they have ended


def side_by_side(loops: Sequence[LiveLoop]) -> None:
    """All of them to the end: whose clock is furthest behind takes the next steps."""
    while running := [loop for loop in loops if not loop.is_over]:
        last = min(running, key=lambda loop: loop.now)
        for _ in range(STEPS_IN_A_ROW):
            if not last.is_over:
                last.step()


def measure(sizes: dict[str, Any], say: Callable[[str], None]) -> Iterator[Row]:
    """Rows {"draft", "share", "draw", "arm", "latency_s"}, in CPU seconds; of auto, what it did
    too (`control.seen`), with "k", the draft tokens its plans name in the mean."""
    from benchmarks.engines import loaded as engines
    from osd.tiny.models import ensure_cost_shaped

    target, prompts = ensure_cost_shaped(), engines.home_prompts()
    with tempfile.TemporaryDirectory(prefix="osd-bench-") as directory:
        drafts = engines.drafts(Path(directory))
        kept = []  # the end of one engine in a process is the end of all
        none = engines.Loaded(target, drafts["good"], k=1, settings=None, speculates=False)
        k_max = max(sizes["fixed"])
        settings = engines.settings(k_max) | {"proposers": ["draft"]}
        for draft in sizes["drafts"]:
            arms: dict[int | str, engines.Loaded] = {0: none}
            for arm in (*sizes["fixed"][1:], AUTO):
                arms[arm] = engines.Loaded(
                    target, drafts[draft], k=k_max, settings=settings, speculates=True
                )
                if arm != AUTO:
                    arms[arm].command("force", ("draft", arm))
                say(f"{draft} draft: engine for {arm}")
            kept.append(arms)
            warm_up(arms.values(), prompts)
            full = none.drive(((engines.MAX_STREAMS, sizes["full_tokens"]),), prompts, 0)
            most = full.num_tokens / full.cpu_seconds / sizes["output_tokens"]
            say(f"{draft} draft: {most:.2f} requests per CPU second without speculation")
            for draw in range(sizes["draws"]):
                for share in sizes["loads"]:
                    arms[AUTO].command("log", True)
                    found = _draw(arms, prompts, share * most, draw, sizes)
                    did = seen(arms[AUTO])
                    did["k"] = mean_k(did["plans"])
                    for arm, latency_s in found.items():
                        row = {"draft": draft, "share": share, "draw": draw, "arm": arm}
                        yield row | {"latency_s": latency_s} | (did if arm == AUTO else {})
                    say(f"{draft} draft, draw {draw + 1} of {sizes['draws']}: load {share:g}")


def warm_up(engines: Iterable[Any], prompts: Sequence[list[int]]) -> None:
    """None of the arms begins cold beside another that does not."""
    for one in engines:
        one.drive(WARM_UP, prompts, 0)


def mean_k(plans: dict[str, int]) -> float:
    """Of plans by name (`draft 4`, `off`) and how many steps each had."""
    tokens = sum(int(name.rpartition(" ")[2]) * num for name, num in plans.items() if " " in name)
    return tokens / max(sum(plans.values()), 1)


def _draw(
    arms: dict[Any, Any],
    prompts: Sequence[list[int]],
    rate: float,
    draw: int,
    sizes: dict[str, Any],
) -> dict[int | str, float]:
    """Mean latency of each arm."""
    num = sizes["requests"]
    chosen = np.random.default_rng(draw).integers(0, len(prompts), num)
    traffic = [prompts[i] for i in chosen], poisson(rate, num, draw)
    loops = {
        arm: LiveLoop(engine, *traffic, num_tokens=sizes["output_tokens"])
        for arm, engine in arms.items()
    }
    side_by_side(list(loops.values()))
    return {arm: float(np.mean(loop.latencies)) for arm, loop in loops.items()}
