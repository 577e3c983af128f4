"""The closed loop of one engine: before a step it says what to propose, after it, it learns what that brought.

            ┌── begin / end of requests
            ▼
    plan ──► step ──► observe ──► acceptance per request, step times ──► plan, every few steps

`Speculation` knows no vLLM (`serving/speculation/scheduler.py` does) and no time but the clock it is given. What keeps
it honest:

    probes          a draft that is not used is tried now and then; a surprise makes all older evidence void
    shadow lookups  n-grams are judged by what the target wrote, without being verified
    net windows     now and then the whole engine runs without speculation, between two windows with it: what
                    speculation gains is then measured, not modelled (`serving/speculation/net.py`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from serving.speculation.acceptance_breakdown import Anatomy
from serving.speculation.accounts import Accounts
from serving.speculation.estimates import UNKNOWN, Acceptance
from serving.speculation.goodput import OFF, Load, Plan, candidates, caps, choose, unmeasured, with_threshold
from serving.speculation.net import NetWindows
from serving.speculation.ngram import Lookup, Shadow
from serving.speculation.probes import PROBE_K, Probes
from serving.speculation.step_times import Shape, StepTimes

STEPS_PER_DECISION = 4
STEPS_PER_TRIAL = 24
"""Steps between two tries of a choice whose step time is not known well enough."""
ENOUGH_STEPS = 6
"""Steps of a shape that make its time known."""
MAX_TRIALS = 2
"""Tries by which it should be: n-grams that find nothing never make the step that is asked for."""
STEPS_TO_RETRY = 400
"""Steps after which a choice that was not made is worth another try: what was known of it is old."""
MAX_TRIED = 1024
SWEEP_STEPS = 8
"""Steps of each choice in a sweep, with which step times are measured."""
DECISIONS_PER_OPENING = 16
"""At every so many decisions, all drafts are verified whole."""


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
    shadow: Shadow = field(default_factory=Shadow)
    cap: int = 0


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
        net_interval_s = settings.net_interval_seconds if settings.mode == "auto" else 0.0
        self.net = NetWindows(net_interval_s, settings.net_window_seconds, settings.seed, clock)
        self.accounts = Accounts()
        self._draft = Acceptance(settings.k_max, UNKNOWN if settings.predicted is None else settings.predicted)
        self._ngram = Acceptance(settings.k_max, 0.3)
        self._requests: dict[str, _Request] = {}
        self._forced: Plan | None = None
        self._plan = self._resting_plan()
        self._batch = 0
        self._num_since_decision = STEPS_PER_DECISION
        self._num_since_trial = 0
        self._num_steps = 0
        self._used: dict[tuple[int, str, int], tuple[int, int]] = {}
        """(batch, proposer, k) -> trials of it, and the step in which it was last chosen"""
        self._probes = Probes()
        self._sweep: list[Plan] = []
        """plans of the next steps, the last first"""
        self._sweep_batch = 0
        self._has_swept = False
        self._is_sweeping = False
        self._needs_catching_up = False
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
        self._num_steps += 1
        if self._forced is not None:
            return self._adopt(self._forced, "forced", req_ids)
        if self._sweep and len(req_ids) >= self._sweep_batch:
            return self._adopt(self._sweep.pop(), "sweep", req_ids)
        if self.net.is_off():
            return self._adopt(OFF, "net window", req_ids)
        if self.settings.mode != "auto":
            return self._adopt(self._resting_plan(), self.settings.mode, req_ids)
        if not req_ids:
            return self._plan
        if not self.times.is_fitted:
            self._begin_or_end_first_sweep()
            return self._plan
        if self._probes.is_under_way:
            return self._plan
        is_due = self._num_since_decision >= STEPS_PER_DECISION or len(req_ids) != self._batch
        if not is_due:
            return self._plan
        started = time.perf_counter()
        load = self._load(req_ids, context)
        plans = candidates(load, self.times)
        plan, reason = with_threshold(choose(plans, self._plan), load, self.times), "goodput"
        if plan.proposer != "draft" and self._can_probe(req_ids) and self._is_probe_due(plans):
            self._probes.begin(expected=float(load.survival["draft"][:, 0].mean()))
            plan, reason = self._probe_plan(plans), "probe"
        elif self._may_try(load) and (trial := self._trial(plans, load)):
            plan, reason = trial, "trial"
        adopted = self._adopt(plan, reason, req_ids, load)
        self.accounts.add_decision(time.perf_counter() - started)
        return adopted

    def cap(self, req_id: str) -> int:
        """Draft tokens of this request that are worth verifying."""
        request = self._requests.get(req_id)
        return self._plan.k if request is None else min(request.cap, request.client_cap)

    @property
    def present(self) -> Plan:
        """The plan of the newest step."""
        return self._plan

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
                self.accounts.add_step(self._plan, step.seconds, tokens)
        self.net.add_step(step.seconds, tokens, len(step.req_ids))
        self._end_step_of_probe()
        if self.accounts.has_log:
            self.accounts.write(
                self._plan,
                batch=len(step.req_ids),
                drafted=sum(step.drafted),
                accepted=sum(step.accepted),
                passes=step.passes,
                context=step.context,
                is_pure=step.is_pure,
                seconds=step.seconds,
            )

    def restart(self, predicted: float | None) -> None:
        """Another draft serves from now on."""
        self._draft.restart([request.slot for request in self._requests.values()], predicted)
        self._num_since_decision = STEPS_PER_DECISION
        self._probes.renew()

    def force(self, plan: Plan | None) -> None:
        """Do this whatever the goodput says; None = decide again."""
        self._forced = plan
        self._probes.stop()
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
        return {
            "mode": self.settings.mode,
            "plan": self._plan.name,
            "proposer": self._plan.proposer,
            "k": self._plan.k,
            "batch": self._batch,
            "predicted_tokens_per_second": self._plan.goodput,
            "num_probes": self._probes.num,
            "net": self.net.report(),
            "num_cells": self.times.num_cells,
            **self.accounts.report(),
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

    def _begin_or_end_first_sweep(self) -> None:
        """An engine that was not measured beforehand measures its first steps."""
        if self._has_swept:
            self.times.fit()
        else:
            self.sweep(1)

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

    def _may_try(self, load: Load) -> bool:
        return self._num_since_trial >= STEPS_PER_TRIAL and load.batch == self._batch

    def _trial(self, plans: Sequence[Plan], load: Load) -> Plan | None:
        def is_due(plan: Plan, num_known: int) -> bool:
            num_trials, used_at = self._used.get((load.batch, plan.proposer, plan.k), (0, 0))
            is_new = num_known < ENOUGH_STEPS and num_trials < MAX_TRIALS
            can_be_seen = num_known > 0 or plan.proposer == "draft"
            return is_new or (can_be_seen and self._num_steps - used_at >= STEPS_TO_RETRY)

        trial = unmeasured(plans, load, self.times, is_due)
        if trial is not None:
            key = load.batch, trial.proposer, trial.k
            self._used[key] = self._used.get(key, (0, 0))[0] + 1, self._num_steps
            self._num_since_trial = 0
        return trial

    def _note_use(self, plan: Plan) -> None:
        key = self._batch, plan.proposer, plan.k
        num_trials, _ = self._used.pop(key, (0, 0))
        self._used[key] = num_trials, self._num_steps  # the newest last
        if len(self._used) > MAX_TRIED:
            del self._used[next(iter(self._used))]

    def _adopt(self, plan: Plan, reason: str, req_ids: Sequence[str], load: Load | None = None) -> Plan:
        self._is_sweeping = reason == "sweep"
        if (plan.proposer, plan.k) != (self._plan.proposer, self._plan.k) and not self._is_sweeping:
            is_new_load = reason == "goodput" and len(req_ids) != self._batch
            self.accounts.add_change(self._plan, plan, len(req_ids), "load" if is_new_load else reason)
        self._plan, self._batch = plan, len(req_ids)
        if load is not None:
            self._note_use(plan)
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
        if plan.min_survival <= 0 or is_open:
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
        self._probes.add_step(num_tested, int(((accepted_B > 0) & counted_B).sum()))
        if num_tested:
            lengths = [step.num_tokens[i] for i in known], [step.num_outputs[i] for i in known if step.num_outputs]
            self.anatomy.add_step(drafted_B * counted_B, accepted_B * counted_B, *lengths)

    def _look_up_in_shadow(
        self, requests: Sequence[_Request], req_ids: Sequence[str], tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        """Judge what n-grams would have proposed by what has been written since, and look up anew now and then."""
        slots, proposed_B, accepted_B = [], [], []
        for request, req_id in zip(requests, req_ids, strict=True):
            judged = request.shadow.step(request.lookup, partial(tokens_of, req_id), self.settings.k_max)
            if judged is not None and request.is_counted:
                slots.append(request.ngram_slot)
                proposed_B.append(judged[0])
                accepted_B.append(judged[1])
        if slots:
            self._ngram.add(np.array(slots), np.array(proposed_B), np.array(accepted_B))

    def _can_probe(self, req_ids: Sequence[str]) -> bool:
        """Whether a probe would show anything."""
        if "draft" not in self.settings.proposers:
            return False
        requests = (self._requests.get(req_id) for req_id in req_ids)
        return any(r is not None and r.is_counted and r.client_cap > 0 for r in requests)

    def _probe_plan(self, plans: Sequence[Plan]) -> Plan:
        k = min(PROBE_K, self.settings.k_max)
        return next(plan for plan in plans if plan.proposer == "draft" and plan.k == k)

    def _is_probe_due(self, plans: Sequence[Plan]) -> bool:
        return self._probes.is_due(plans[0].seconds, self._probe_plan(plans).seconds)

    def _end_step_of_probe(self) -> None:
        has_ended, surprise = self._probes.end_step()
        if has_ended:
            self._num_since_decision = STEPS_PER_DECISION
        if surprise is not None:
            self._draft.restart([request.slot for request in self._requests.values()], surprise)
