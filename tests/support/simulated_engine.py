"""An engine made of two formulas in place of vLLM: the time of a step, and acceptance.

The control of speculation runs against it for thousands of steps in a second, where the best
choice is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.speculation.control import Settings, Speculation
from serving.speculation.goodput import Plan
from serving.speculation.memory.memory import NOTHING, Found
from serving.speculation.step_seen import DraftWork, Stamp, StepSeen

StepTime = Callable[[int, int, int], float]
"""(requests, verified tokens, draft passes) -> seconds"""
NUM_PROMPT = 100
"""Tokens of a prompt."""


def cpu(batch: int, tokens: int, passes: int) -> float:
    """About what the cost-shaped target takes on two cores."""
    draft = 0.002 + 0.0015 * passes + 0.0001 * passes * batch if passes else 0.0
    return (
        0.014 + 0.0004 * max(tokens - 4, 0) + 0.0015 * max(tokens - 16, 0) + 0.0002 * batch + draft
    )


class FakeMemory:
    """Proposes for a request with the probability that `found` says, and knows how likely its
    tokens are: each is accepted with `copied`, if those before it are."""

    def __init__(
        self, k: int, found: Callable[[str], float], copied: Callable[[], float], seed: int
    ) -> None:
        self.k = k
        self.num_lookups = 0
        self._found, self._copied = found, copied
        self._random = np.random.default_rng(seed)

    def begin(
        self, req_id: str, prompt: Sequence[int], *, scope: str = "", is_kept: bool = True
    ) -> None: ...

    def advance_all(
        self,
        served: Iterable[tuple[str, Sequence[int]]],
        k: int = 0,
        least: float = 0.0,
        num: int | None = None,
    ) -> None: ...

    def propose(
        self, req_id: str, k: int, least: float = 0.0, *, ahead: Sequence[int] = ()
    ) -> Found:
        self.num_lookups += 1
        if self._random.random() >= self._found(req_id):
            return NOTHING
        survival_K = self._copied() ** np.arange(1, min(k, self.k) + 1)
        survival_K = survival_K[survival_K >= least]
        return Found([0] * len(survival_K), survival_K)

    def end(self, req_id: str) -> None: ...

    def work(self) -> None: ...


@dataclass
class SimulatedEngine:
    """`alpha`: conditional acceptance of the draft; `found` and `copied`: how often the memory
    proposes, and how likely each of its tokens is accepted. `kinds`: (alpha, found) of requests
    that differ; as many of each run.

    A run is the same each time: the thread that fits step times is waited for."""

    settings: Settings
    step_time: StepTime = cpu
    alpha: float = 0.7
    found: float = 0.0
    copied: float = 0.0
    noise: float = 0.03
    seed: int = 0
    output_tokens: int = 150
    kinds: Sequence[tuple[float, float]] = ()
    now: float = 0.0
    plans: list[str] = field(default_factory=list)
    num_verified: Counter[str] = field(default_factory=Counter)
    """proposer -> draft tokens"""
    num_expected: float = 0.0
    """Tokens of all steps, as many as each gives on average: nothing of it is luck."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.memory = None
        if "memory" in self.settings.proposers and self.settings.mode != "off":
            k = self.settings.memory_k_max
            self.memory = FakeMemory(k, self._found, lambda: self.copied, self.seed)
        self.control = Speculation(self.settings, clock=lambda: self.now, memory=self.memory)
        self._drafted: dict[str, int] = {}
        self._from_memory: set[str] = set()
        self._left: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}
        self._kinds: dict[str, int] = {}
        self._proposed_by = Stamp(self.control.present, "")
        self._next = 0

    def run(self, num_steps: int, batch: int) -> float:
        """Tokens per second of so many steps with `batch` requests running throughout."""
        began, tokens = self.now, 0
        for _ in range(num_steps):
            self._admit(batch)
            tokens += self._step()
        return tokens / (self.now - began)

    def fixed(self, plan: Plan, num_steps: int, batch: int) -> float:
        """The same with one plan throughout. The control keeps only what it learns meanwhile."""
        self.control.force(plan)
        self.run(3, batch)
        rate = self.run(num_steps, batch)
        self.control.force(None)
        return rate

    def _admit(self, batch: int) -> None:
        while len(self._left) > batch:
            self._end(next(iter(self._left)))
        while len(self._left) < batch:
            self._next += 1
            req_id = f"r{self._next}"
            self._left[req_id], self._drafted[req_id] = self.output_tokens, 0
            running = [*self._kinds.values()]
            self._kinds[req_id] = min(range(len(self.kinds)), key=running.count, default=0)
            self._num_tokens[req_id] = NUM_PROMPT
            self.control.begin(req_id, prompt=range(NUM_PROMPT))

    def _end(self, req_id: str) -> None:
        for known in (self._left, self._drafted, self._kinds, self._num_tokens):
            del known[req_id]
        self._from_memory.discard(req_id)
        self.control.end(req_id)

    def _step(self) -> int:
        ids = list(self._left)
        proposed_by = self._proposed_by
        stamp = self.control.plan(ids, 100 * len(ids))
        plan = stamp.plan
        self.plans.append(plan.name)
        drafted = [self._drafted[r] for r in ids]
        from_memory = set(self._from_memory)
        alphas = [self.copied if r in from_memory else self._alpha(r) for r in ids]
        accepted = [self._accept(num, alpha) for num, alpha in zip(drafted, alphas, strict=True)]
        self.num_expected += sum(
            sum(alpha**j for j in range(num + 1))
            for num, alpha in zip(drafted, alphas, strict=True)
        )
        seconds = self.step_time(len(ids), len(ids) + sum(drafted), plan.passes)
        seconds *= float(np.exp(self.random.normal(0, self.noise)))
        self.now += seconds
        for req_id, num, right in zip(ids, drafted, accepted, strict=True):
            self.num_verified["memory" if req_id in from_memory else "draft"] += num
            self._num_tokens[req_id] += 1 + right
            self.control.requests.served([(req_id, range(self._num_tokens[req_id]))])
        judged, self.control.requests.judged = self.control.requests.judged, []
        seen = StepSeen(
            ids,
            drafted,
            accepted,
            stamp,
            proposed_by,
            DraftWork(proposed_by.plan.passes).next(plan.passes),
            100 * len(ids),
            True,
            seconds,
            [100] * len(ids),
            from_memory=from_memory,
            judged=judged,
        )
        self.control.observe(seen)
        if (fitting := self.control.times._fitting) is not None:
            fitting.join()
        self._proposed_by = stamp
        for req_id, num in zip(ids, accepted, strict=True):
            self._left[req_id] -= 1 + num
            if self._left[req_id] <= 0:
                self._end(req_id)
            else:
                self._propose(req_id, plan)
        return len(ids) + sum(accepted)

    def _propose(self, req_id: str, plan: Plan) -> None:
        """At the end of a step."""
        self._drafted[req_id] = min(plan.passes, self.control.cap(req_id))
        self._from_memory.discard(req_id)
        if found := self.control.look_up(req_id):
            self._drafted[req_id] = len(found)
            self._from_memory.add(req_id)
        if plan.passes and (found or not self._drafted[req_id]):
            at = self._num_tokens[req_id]
            right = self._accept(plan.passes, self._alpha(req_id))
            # The token behind n tokens is n. One draft token is wrong, unless all are right.
            draft = [at + j if j != right else -1 for j in range(plan.passes)]
            self.control.requests.add_unverified(req_id, 0, at, at - NUM_PROMPT, draft)

    def _accept(self, drafted: int, alpha: float) -> int:
        misses = np.nonzero(self.random.random(drafted) >= alpha)[0]
        return int(misses[0]) if len(misses) else drafted

    def _alpha(self, req_id: str) -> float:
        return self.kinds[self._kinds[req_id]][0] if self.kinds else self.alpha

    def _found(self, req_id: str) -> float:
        return self.kinds[self._kinds[req_id]][1] if self.kinds else self.found


def best_fixed(engine: SimulatedEngine, batch: int, ks: Sequence[int]) -> tuple[str, float]:
    """The fixed k with most tokens per second, by the formulas."""
    rates = {}
    for k in ks:
        gain = sum(engine.alpha**j for j in range(1, k + 1))
        rates["off" if k == 0 else f"draft {k}"] = (
            batch * (1 + gain) / engine.step_time(batch, batch * (1 + k), k)
        )
    name = max(rates, key=lambda name: rates[name])
    return name, rates[name]
