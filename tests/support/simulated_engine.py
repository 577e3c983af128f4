"""An engine made of two formulas in place of vLLM: the time of a step, and acceptance.

The control of speculation runs against it for thousands of steps in a second, where the best
choice is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.speculation.control import Settings, Speculation
from serving.speculation.goodput import Plan
from serving.speculation.step_seen import DraftWork, Stamp, StepSeen

StepTime = Callable[[int, int, int], float]
"""(requests, verified tokens, draft passes) -> seconds"""


def cpu(batch: int, tokens: int, passes: int) -> float:
    """About what the cost-shaped target takes on two cores."""
    draft = 0.002 + 0.0015 * passes + 0.0001 * passes * batch if passes else 0.0
    return (
        0.014 + 0.0004 * max(tokens - 4, 0) + 0.0015 * max(tokens - 16, 0) + 0.0002 * batch + draft
    )


@dataclass
class SimulatedEngine:
    """`alpha`: conditional acceptance of the draft; `found` and `copied`: how often n-grams
    propose, and are right; `period`: every text repeats after so many tokens, which lookups in
    shadow see (0 = nothing ever repeats).

    A run is the same each time: the thread that fits step times is waited for."""

    settings: Settings
    step_time: StepTime = cpu
    alpha: float = 0.7
    found: float = 0.0
    copied: float = 0.0
    noise: float = 0.03
    seed: int = 0
    output_tokens: int = 150
    period: int = 0
    now: float = 0.0
    plans: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.control = Speculation(self.settings, clock=lambda: self.now)
        self._drafted: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._proposed_by = Stamp(self.control.present, "")
        self._next = 0
        self._text: list[int] = []

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
            self.control.begin(req_id)

    def _end(self, req_id: str) -> None:
        del self._left[req_id], self._drafted[req_id]
        self.control.end(req_id)

    def _step(self) -> int:
        ids = list(self._left)
        proposed_by = self._proposed_by
        stamp = self.control.plan(ids, 100 * len(ids))
        plan = stamp.plan
        self.plans.append(plan.name)
        drafted = [self._drafted[r] for r in ids]
        alpha = self.copied if proposed_by.plan.proposer == "ngram" else self.alpha
        accepted = [self._accept(num, alpha) for num in drafted]
        seconds = self.step_time(len(ids), len(ids) + sum(drafted), plan.passes)
        seconds *= float(np.exp(self.random.normal(0, self.noise)))
        self.now += seconds
        tokens = self._tokens()
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
        )
        self.control.observe(seen, lambda _: tokens)
        if (fitting := self.control.times._fitting) is not None:
            fitting.join()
        self._proposed_by = stamp
        for req_id, num in zip(ids, accepted, strict=True):
            self._drafted[req_id] = self._draft(req_id, plan)
            self._left[req_id] -= 1 + num
            if self._left[req_id] <= 0:
                self._end(req_id)
        return len(ids) + sum(accepted)

    def _draft(self, req_id: str, plan: Plan) -> int:
        if plan.proposer == "ngram":
            return plan.k if self.random.random() < self.found else 0
        return min(plan.passes, self.control.cap(req_id))

    def _accept(self, drafted: int, alpha: float) -> int:
        misses = np.nonzero(self.random.random(drafted) >= alpha)[0]
        return int(misses[0]) if len(misses) else drafted

    def _tokens(self) -> Sequence[int]:
        """What every request has written: one token a step."""
        if not self.period:
            return [1, 2, 3]
        self._text.append(len(self._text) % self.period)
        return self._text


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
