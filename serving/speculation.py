"""The closed loop of one engine: before a step it says what to propose, after it, it learns what that brought.

            ┌── begin / end of requests
            ▼
    plan ──► step ──► observe ──► acceptance per request, step times ──► plan, every few steps

`Speculation` knows no vLLM (`serving/scheduler.py` does) and no time but the clock it is given. What keeps it honest:

    probes          a draft that is not used shows neither acceptance nor cost, so it is tried now and then, as often as
                    costs at most a hundredth of the time; a surprise makes all older evidence void
    shadow lookups  n-grams are judged by what the target wrote, without being verified
    net windows     now and then the whole engine runs without speculation, between two windows with it: what
                    speculation gains is then measured, not modelled (`serving/net.py`)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.anatomy import Anatomy
from serving.estimates import UNKNOWN, Acceptance
from serving.goodput import OFF, Load, Plan, candidates, caps, choose, unmeasured, with_threshold
from serving.net import NetWindows
from serving.ngram import Lookup
from serving.step_times import Shape, StepTimes

STEPS_PER_DECISION = 4
STEPS_PER_SHADOW = 8
"""A request's n-grams are looked up in shadow every so many of its steps."""
PROBE_STEPS = 3
PROBE_K = 2
PROBE_SHARE = 0.01
"""Part of the time that probing may take."""
MIN_STEPS_TO_PROBE, MAX_STEPS_TO_PROBE = 50, 2000
SURPRISE = 2.5
"""Standard deviations by which a probe must differ from what was thought, for that to be forgotten."""
STEPS_PER_TRIAL = 24
"""Steps between two tries of a choice whose step time is not known well enough."""
SWEEP_STEPS = 8
"""Steps of each choice in a sweep, with which step times are measured."""
DECISIONS_PER_OPENING = 16
"""At every so many decisions, all drafts are verified whole."""
MAX_CHANGES = 50
MAX_LOG = 20_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What the scheduler is started with (`additional_config["osd"]`)."""

    mode: str = "auto"
    k_max: int = 5
    proposers: tuple[str, ...] = ("draft", "ngram")
    predicted: float | None = None
    """conditional acceptance of the draft as its gate measured it"""
    net_interval_seconds: float = 0.0
    net_window_seconds: float = 2.0
    seed: int = 0


@dataclass(slots=True)
class _Request:
    slot: int
    ngram_slot: int
    client_cap: int
    is_counted: bool
    lookup: Lookup = field(default_factory=Lookup)
    cap: int = 0
    num_steps: int = 0
    shadow: tuple[int, list[int]] | None = None
    """length of the request when its n-grams were looked up, and what they proposed"""


@dataclass(slots=True)
class _Probe:
    """A try of the draft that was not used."""

    expected: float
    """acceptance of the first place, as it was thought to be"""
    steps_left: int = PROBE_STEPS
    tested: int = 0
    accepted: int = 0

    @property
    def is_surprise(self) -> bool:
        deviation = max(self.tested * self.expected * (1 - self.expected), 0.1) ** 0.5
        return self.accepted - self.tested * self.expected > SURPRISE * deviation


@dataclass(slots=True)
class StepSeen:
    """What one step did, read before vLLM trims anything. Lists in the order of requests."""

    req_ids: list[str]
    drafted: list[int]
    """draft tokens verified"""
    accepted: list[int]
    proposer: str
    """who had proposed them"""
    passes: int
    """passes of the draft model at the end of the step"""
    context: int
    is_pure: bool
    """nothing but decoding, and the step before it was no idle one"""
    seconds: float
    num_tokens: list[int]
    """tokens of each request so far, before this step's"""
    num_outputs: list[int] = field(default_factory=list)
    """how many of them are output"""


class Speculation:
    """One per engine, in the scheduler's thread."""

    def __init__(
        self, settings: Settings, *, padded: Sequence[int] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.times = StepTimes(padded)
        self.anatomy = Anatomy(settings.k_max)
        self.net = NetWindows(settings.net_interval_seconds, settings.net_window_seconds, settings.seed, clock)
        self.log: deque[dict[str, Any]] | None = None
        self._draft = Acceptance(settings.k_max, UNKNOWN if settings.predicted is None else settings.predicted)
        self._ngram = Acceptance(settings.k_max, 0.3)
        self._requests: dict[str, _Request] = {}
        self._forced: Plan | None = None
        self._plan = self._resting_plan()
        self._batch = 0
        self._num_since_decision = STEPS_PER_DECISION
        self._num_since_tested = 0
        self._num_since_trial = 0
        self._probe: _Probe | None = None
        self._sweep: list[Plan] = []
        """plans of the next steps, the last first"""
        self._sweep_batch = 0
        self._has_swept = False
        self._is_sweeping = False
        self._needs_catching_up = False
        self._num_probes = 0
        self._changes: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        self._totals: dict[str, list[float]] = {}
        """plan -> [steps, seconds, tokens, seconds predicted]"""
        self._decisions = [0, 0.0]
        self._num_set_caps = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    def begin(self, req_id: str, *, domain: str = "", client_cap: int | None = None, is_counted: bool = True) -> None:
        """A request has come. `client_cap`: draft tokens per step its client allows; not counted = leaves no trace in
        any estimate."""
        if req_id in self._requests:
            return  # its client goes on with it
        cap = self.settings.k_max if client_cap is None else max(0, min(client_cap, self.settings.k_max))
        self._requests[req_id] = _Request(self._draft.open(domain), self._ngram.open(domain), cap, is_counted, cap=cap)

    def end(self, req_id: str) -> None:
        """A request has gone."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self.anatomy.add_finished(self._draft.close(request.slot))
            self._ngram.close(request.ngram_slot)

    # -- before a step ------------------------------------------------------------------------------------------------

    def plan(self, req_ids: Sequence[str], context: int) -> Plan:
        """What the step now to be scheduled proposes at its end. `req_ids` decode, with so many tokens in all."""
        self._num_since_decision += 1
        self._num_since_trial += 1
        if self._forced is not None:
            return self._adopt(self._forced, "forced", req_ids)
        if self._sweep and len(req_ids) >= self._sweep_batch:
            return self._adopt(self._sweep.pop(), "sweep", req_ids)
        if self.settings.mode == "auto" and self.net.is_off():
            return self._adopt(OFF, "net window", req_ids)
        if self.settings.mode != "auto":
            return self._adopt(self._resting_plan(), self.settings.mode, req_ids)
        if not req_ids:
            return self._plan
        if not self.times.is_fitted:
            self._begin_or_end_first_sweep(len(req_ids))
            return self._plan
        if self._probe is not None:
            return self._plan
        is_due = self._num_since_decision >= STEPS_PER_DECISION or len(req_ids) != self._batch
        if not is_due:
            return self._plan
        started = time.perf_counter()
        load = self._load(req_ids, context)
        plans = candidates(load, self.times)
        plan, reason = with_threshold(choose(plans, self._plan), load, self.times), "goodput"
        if plan.proposer != "draft" and self._num_since_tested >= self._interval(plans) and self._can_probe(req_ids):
            self._probe = _Probe(expected=float(load.survival["draft"][:, 0].mean()))
            self._num_probes += 1
            plan, reason = self._probe_plan(plans), "probe"
        elif self._num_since_trial >= STEPS_PER_TRIAL and (trial := unmeasured(plans, load, self.times)):
            self._num_since_trial = 0
            plan, reason = trial, "trial"
        adopted = self._adopt(plan, reason, req_ids, load)
        self._decisions[0] += 1
        self._decisions[1] += time.perf_counter() - started
        return adopted

    def cap(self, req_id: str) -> int:
        """Draft tokens of this request that are worth verifying."""
        request = self._requests.get(req_id)
        return self._plan.k if request is None else min(request.cap, request.client_cap)

    @property
    def has_caps(self) -> bool:
        """Whether any request may get fewer draft tokens than the plan says."""
        return self._plan.min_survival > 0 or any(r.client_cap < self._plan.k for r in self._requests.values())

    def lookup(self, req_id: str, tokens: Sequence[int]) -> list[int]:
        """What n-grams propose for a request."""
        request = self._requests.get(req_id)
        return [] if request is None else request.lookup.propose(tokens, min(self.cap(req_id), self._plan.k))

    # -- after a step -------------------------------------------------------------------------------------------------

    def observe(self, step: StepSeen, tokens_of: Callable[[str], Sequence[int]]) -> None:
        """Learn from a step. `tokens_of` gives a request's tokens as they were before it."""
        known = [i for i, r in enumerate(step.req_ids) if r in self._requests]
        requests = [self._requests[step.req_ids[i]] for i in known]
        drafted_B = np.array([step.drafted[i] for i in known], np.int64)
        accepted_B = np.array([step.accepted[i] for i in known], np.int64)
        if requests:
            self._learn_acceptance(step, known, requests, drafted_B, accepted_B)
        if self._may_look_up and step.proposer != "ngram":
            self._look_up_in_shadow(requests, [step.req_ids[i] for i in known], tokens_of)
        tokens = len(step.req_ids) + sum(step.accepted)
        is_catching_up = step.passes > 0 and self._needs_catching_up
        self._needs_catching_up = step.passes == 0
        if step.is_pure:
            shape = Shape(len(step.req_ids), len(step.req_ids) + sum(step.drafted), step.context, step.passes)
            if not is_catching_up:
                self.times.add(shape, step.seconds)
            if not self._is_sweeping:
                self._account(step, tokens)
        if self.settings.mode == "auto":
            self.net.add_step(step.seconds, tokens, len(step.req_ids))
        self._continue_probe()
        if self.log is not None:
            self._write_log(step)

    def restart(self, predicted: float | None) -> None:
        """Another draft serves from now on."""
        self._draft.restart([request.slot for request in self._requests.values()], predicted)
        self._num_since_decision = STEPS_PER_DECISION
        self._probe = None

    def force(self, plan: Plan | None) -> None:
        """Do this whatever the goodput says; None = decide again."""
        self._forced, self._probe = plan, None
        self._num_since_decision = STEPS_PER_DECISION

    def sweep(self, batch: int) -> None:
        """Take a few steps of every kind, as soon as so many requests decode, to learn what they cost."""
        k_max, steps = self.settings.k_max, SWEEP_STEPS
        many, one = Plan("draft", k_max), Plan("draft", 1)
        self._sweep_batch = batch
        self._sweep = [OFF] * steps
        if "draft" in self.settings.proposers:
            # In turns, steps that verify much draft little, and the other way round: else the two costs are one.
            self._sweep = [many] * steps + [one] * steps + [one, many] * (steps // 2) + self._sweep
        self._sweep.reverse()
        self._has_swept = True

    def end_sweep(self) -> None:
        """Leave out what is left of it."""
        self._sweep = []

    @property
    def num_sweep_steps_left(self) -> int:
        """Of the sweep under way."""
        return len(self._sweep)

    # -- what it says of itself ---------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Counters since the start, and the newest changes of plan."""
        num, seconds = self._decisions
        return {
            "mode": self.settings.mode,
            "plan": self._plan.name,
            "proposer": self._plan.proposer,
            "k": self._plan.k,
            "batch": self._batch,
            "predicted_tokens_per_second": self._plan.goodput,
            "plans": {
                name: {"steps": int(steps), "seconds": took, "tokens": int(tokens), "predicted_seconds": predicted}
                for name, (steps, took, tokens, predicted) in self._totals.items()
            },
            "changes": list(self._changes),
            "num_probes": self._num_probes,
            "decision_us": 1e6 * seconds / num if num else 0.0,
            "net": self.net.report(),
            "num_cells": self.times.num_cells,
            **self.anatomy.report(),
        }

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _may_look_up(self) -> bool:
        return self.settings.mode == "auto" and "ngram" in self.settings.proposers

    def _resting_plan(self) -> Plan:
        """What is done while nothing is known, and in the modes that decide nothing."""
        if self.settings.mode == "off" or not self.settings.proposers:
            return OFF
        proposer = self.settings.proposers[0] if self.settings.mode == "fixed" else "draft"
        if proposer not in self.settings.proposers:
            return OFF
        return Plan(proposer, self.settings.k_max)  # type: ignore[arg-type]

    def _begin_or_end_first_sweep(self, batch: int) -> None:
        """An engine that was not measured beforehand measures its first steps."""
        if self._has_swept:
            self.times.fit()
        else:
            self.sweep(min(batch, 1))

    def _load(self, req_ids: Sequence[str], context: int) -> Load:
        requests = [self._requests[r] for r in req_ids if r in self._requests]
        survival: dict[Any, np.ndarray] = {}
        if "draft" in self.settings.proposers:
            survival["draft"] = self._draft.survival(np.array([r.slot for r in requests], np.int64))
        if "ngram" in self.settings.proposers:
            survival["ngram"] = self._ngram.survival(np.array([r.ngram_slot for r in requests], np.int64))
        for b, request in enumerate(requests):
            if request.client_cap < self.settings.k_max:
                for survival_BG in survival.values():
                    survival_BG[b, request.client_cap :] = 0.0
        return Load(len(req_ids), context, survival)

    def _adopt(self, plan: Plan, reason: str, req_ids: Sequence[str], load: Load | None = None) -> Plan:
        self._is_sweeping = reason == "sweep"
        if (plan.proposer, plan.k) != (self._plan.proposer, self._plan.k) and not self._is_sweeping:
            self._changes.append(
                {
                    "at": time.time(),
                    "from": self._plan.name,
                    "to": plan.name,
                    "batch": len(req_ids),
                    "reason": reason if len(req_ids) == self._batch or reason != "goodput" else "load",
                }
            )
        self._plan, self._batch = plan, len(req_ids)
        if load is not None:
            self._num_since_decision = 0
            self._set_caps(plan, req_ids, load)
        elif self._num_since_decision >= STEPS_PER_DECISION:
            for request in self._requests.values():
                request.cap = request.client_cap
        return plan

    def _set_caps(self, plan: Plan, req_ids: Sequence[str], load: Load) -> None:
        requests = [self._requests[r] for r in req_ids if r in self._requests]
        self._num_set_caps += 1
        is_open = self._num_set_caps % DECISIONS_PER_OPENING == 0  # who is never verified never shows that it changed
        if plan.proposer != "draft" or plan.min_survival <= 0 or is_open:
            for request in requests:
                request.cap = request.client_cap
            return
        for request, cap in zip(requests, caps(load.survival["draft"], plan).tolist(), strict=True):
            request.cap = cap

    def _learn_acceptance(
        self,
        step: StepSeen,
        known: Sequence[int],
        requests: list[_Request],
        drafted_B: np.ndarray,
        accepted_B: np.ndarray,
    ) -> None:
        counted_B = np.array([r.is_counted for r in requests])
        slot_B = np.array([r.slot for r in requests], np.int64)
        if step.proposer == "ngram":
            # Nothing found is a draft that was not accepted.
            ngram_B = np.array([r.ngram_slot for r in requests], np.int64)
            judged_B = counted_B & np.array([r.client_cap > 0 for r in requests])
            self._ngram.add(ngram_B[judged_B], np.maximum(drafted_B, 1)[judged_B], accepted_B[judged_B])
            drafted_B = np.zeros_like(drafted_B)
            accepted_B = np.zeros_like(accepted_B)
        self._draft.add(slot_B[counted_B], drafted_B[counted_B], accepted_B[counted_B])
        num_tested = int(((drafted_B > 0) & counted_B).sum())
        self._num_since_tested = 0 if num_tested else self._num_since_tested + 1
        if self._probe is not None:
            self._probe.tested += num_tested
            self._probe.accepted += int(((accepted_B > 0) & counted_B).sum())
        if num_tested:
            lengths = [step.num_tokens[i] for i in known], [step.num_outputs[i] for i in known if step.num_outputs]
            self.anatomy.add_step(drafted_B * counted_B, accepted_B * counted_B, *lengths)

    def _look_up_in_shadow(
        self, requests: Sequence[_Request], req_ids: Sequence[str], tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        """Judge what n-grams would have proposed by what has been written since, and look up anew now and then."""
        slots, proposed_B, accepted_B = [], [], []
        for request, req_id in zip(requests, req_ids, strict=True):
            request.num_steps += 1
            if request.shadow is None:
                if request.num_steps % STEPS_PER_SHADOW == 0:
                    tokens = tokens_of(req_id)
                    if request.lookup.index(tokens):  # a long prompt takes several turns
                        request.shadow = len(tokens), request.lookup.propose(tokens, self.settings.k_max)
                continue
            at, proposed = request.shadow
            written = tokens_of(req_id)[at : at + len(proposed)]
            num = next((j for j, (a, b) in enumerate(zip(proposed, written, strict=False)) if a != b), len(written))
            if num < len(written) or len(written) == len(proposed):
                request.shadow = None
                if request.is_counted:
                    slots.append(request.ngram_slot)
                    proposed_B.append(max(len(proposed), 1))
                    accepted_B.append(num)
        if slots:
            self._ngram.add(np.array(slots), np.array(proposed_B), np.array(accepted_B))

    def _can_probe(self, req_ids: Sequence[str]) -> bool:
        """Whether a probe would show anything."""
        requests = (self._requests.get(req_id) for req_id in req_ids)
        may_draft = any(r is not None and r.is_counted and r.client_cap > 0 for r in requests)
        return may_draft and "draft" in self.settings.proposers

    def _probe_plan(self, plans: Sequence[Plan]) -> Plan:
        k = min(PROBE_K, self.settings.k_max)
        return next(plan for plan in plans if plan.proposer == "draft" and plan.k == k)

    def _interval(self, plans: Sequence[Plan]) -> int:
        """Steps between probes such that they take their share of the time."""
        if "draft" not in self.settings.proposers:
            return MAX_STEPS_TO_PROBE
        off_s = plans[0].seconds
        extra_s = (PROBE_STEPS + 1) * max(self._probe_plan(plans).seconds - off_s, 0.0)
        return int(min(max(extra_s / (PROBE_SHARE * off_s), MIN_STEPS_TO_PROBE), MAX_STEPS_TO_PROBE))

    def _continue_probe(self) -> None:
        if self._probe is None:
            return
        self._probe.steps_left -= 1
        if self._probe.steps_left > 0:
            return
        probe, self._probe = self._probe, None
        self._num_since_tested = 0
        self._num_since_decision = STEPS_PER_DECISION
        if probe.is_surprise:
            slots = [request.slot for request in self._requests.values()]
            self._draft.restart(slots, (probe.accepted + 1) / (probe.tested + 2))

    def _account(self, step: StepSeen, tokens: int) -> None:
        totals = self._totals.setdefault(self._plan.name, [0, 0.0, 0, 0.0])
        totals[0] += 1
        totals[1] += step.seconds
        totals[2] += tokens
        totals[3] += self._plan.seconds

    def _write_log(self, step: StepSeen) -> None:
        assert self.log is not None
        self.log.append(
            {
                "plan": self._plan.name,
                "batch": len(step.req_ids),
                "drafted": sum(step.drafted),
                "accepted": sum(step.accepted),
                "passes": step.passes,
                "context": step.context,
                "is_pure": step.is_pure,
                "seconds": step.seconds,
                "predicted_seconds": self._plan.seconds,
            }
        )
