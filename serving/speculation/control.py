"""The closed loop of one engine: before a step it says what to propose, after it, it learns what
that brought.

            ┌── begin / end of requests
            ▼
    plan ──► step ──► observe ──► acceptance per request, step times ──► plan, every few steps

`Speculation` knows no vLLM (`serving/speculation/scheduler.py` does), and no time but the clock it
is given. Its parts keep it honest:

    sweep, trials   steps taken to learn what they cost (`sweep.py`, `trials.py`)
    probes          an unused draft is tried now and then; a surprise voids all older evidence
                    (`probes.py`)
    shadow lookups  n-grams are judged by what the target wrote, without being verified (`ngram.py`)
    net windows     now and then the whole engine runs without speculation between two windows with
                    it, so that the gain is measured and not modelled (`net.py`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osd.records import SpeculationReport
from serving.speculation.accounts import Accounts
from serving.speculation.goodput import OFF, Load, Plan, candidates, choose, with_threshold
from serving.speculation.net import NetWindows
from serving.speculation.probes import PROBE_K, Probes
from serving.speculation.requests import Requests
from serving.speculation.step_seen import StepSeen
from serving.speculation.step_times import Shape, StepTimes
from serving.speculation.sweep import Sweep
from serving.speculation.trials import Trials

STEPS_PER_DECISION = 4


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


class Speculation:
    """One per engine, in the scheduler's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        padded: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.times = StepTimes(padded)
        self.requests = Requests(settings.k_max, settings.proposers, settings.predicted)
        net_interval_s = settings.net_interval_seconds if settings.mode == "auto" else 0.0
        self.net = NetWindows(net_interval_s, settings.net_window_seconds, settings.seed, clock)
        self.accounts = Accounts()
        self._forced: Plan | None = None
        self._plan = self._resting_plan()
        self._batch = 0
        self._num_since_decision = STEPS_PER_DECISION
        self._probes = Probes()
        self._trials = Trials()
        self._sweep = Sweep(settings.k_max, settings.proposers)
        self._is_sweeping = False
        self._needs_catching_up = False

    # -- requests ---------------------------------------------------------------------------------

    def begin(
        self,
        req_id: str,
        *,
        domain: str = "",
        client_cap: int | None = None,
        is_counted: bool = True,
    ) -> None:
        """A request has come. `client_cap`: draft tokens per step that its client allows. One that
        is not counted leaves no trace in any estimate."""
        self.requests.begin(req_id, domain, client_cap, is_counted)

    def end(self, req_id: str) -> None:
        """A request has gone."""
        self.requests.end(req_id)

    # -- before a step ----------------------------------------------------------------------------

    def plan(self, req_ids: Sequence[str], context: int) -> Plan:
        """What the step that is about to be scheduled proposes at its end. `req_ids` are those
        that decode; `context` counts their tokens."""
        self._num_since_decision += 1
        self._trials.add_step()
        if self._forced is not None:
            return self._adopt(self._forced, "forced", req_ids)
        if self._sweep.is_due(len(req_ids)):
            return self._adopt(self._sweep.take(), "sweep", req_ids)
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
        load = self.requests.load(req_ids, context)
        plans = candidates(load, self.times)
        plan, reason = with_threshold(choose(plans, self._plan), load, self.times), "goodput"
        if plan.proposer != "draft" and self._can_probe(req_ids) and self._is_probe_due(plans):
            self._probes.begin(expected=float(load.survival["draft"][:, 0].mean()))
            plan, reason = self._probe_plan(plans), "probe"
        elif load.batch == self._batch and (trial := self._trials.next(plans, load, self.times)):
            plan, reason = trial, "trial"
        adopted = self._adopt(plan, reason, req_ids, load)
        self.accounts.add_decision(time.perf_counter() - started)
        return adopted

    def cap(self, req_id: str) -> int:
        """Draft tokens of this request that are worth verifying."""
        return self.requests.cap(req_id, self._plan)

    @property
    def present(self) -> Plan:
        """The plan of the newest step."""
        return self._plan

    @property
    def has_caps(self) -> bool:
        """Whether any request may get fewer draft tokens than the plan says."""
        return self._plan.min_survival > 0 or self.requests.has_cap_below(self._plan.k)

    def lookup(self, req_id: str, tokens: Sequence[int]) -> list[int]:
        """What n-grams propose for a request."""
        return self.requests.lookup(req_id, tokens, self._plan)

    # -- after a step -----------------------------------------------------------------------------

    def observe(self, step: StepSeen, tokens_of: Callable[[str], Sequence[int]]) -> None:
        """Learn from a step. `tokens_of` gives a request's tokens as they were before it."""
        if (first_tokens := self.requests.learn(step)) is not None:
            self._probes.add_step(*first_tokens)
        if self._may_look_up and step.proposer != "ngram":
            self.requests.look_up_in_shadow(step.req_ids, tokens_of)
        tokens = len(step.req_ids) + sum(step.accepted)
        is_catching_up = step.passes > 0 and self._needs_catching_up
        self._needs_catching_up = step.passes == 0
        if step.is_pure:
            shape = Shape(
                len(step.req_ids), len(step.req_ids) + sum(step.drafted), step.context, step.passes
            )
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
        self.requests.restart(predicted)
        self._num_since_decision = STEPS_PER_DECISION
        self._probes.renew()

    def force(self, plan: Plan | None) -> None:
        """Follow this plan whatever the goodput says; None = decide again."""
        self._forced = plan
        self._probes.stop()
        self._num_since_decision = STEPS_PER_DECISION

    def sweep(self, batch: int) -> None:
        """Take a few steps of every kind, as soon as so many requests decode, to learn what they
        cost."""
        self._sweep.begin(batch)

    def end_sweep(self) -> None:
        """Leave out what is left of the sweep."""
        self._sweep.end()

    @property
    def num_sweep_steps_left(self) -> int:
        return self._sweep.num_left

    # -- what it says of itself -------------------------------------------------------------------

    def report(self) -> SpeculationReport:
        """Counters since the start, and the newest changes of plan."""
        return SpeculationReport(
            mode=self.settings.mode,
            plan=self._plan.name,
            proposer=self._plan.proposer,
            k=self._plan.k,
            batch=self._batch,
            predicted_tokens_per_second=self._plan.goodput,
            num_probes=self._probes.num,
            net=self.net.report(),
            num_cells=self.times.num_cells,
            **self.accounts.report(),
            **self.requests.breakdown.report(),
        )

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _may_look_up(self) -> bool:
        return self.settings.mode == "auto" and "ngram" in self.settings.proposers

    def _resting_plan(self) -> Plan:
        """The plan while nothing is known, and in the modes that decide nothing."""
        if self.settings.mode == "off" or not self.settings.proposers:
            return OFF
        proposer = self.settings.proposers[0] if self.settings.mode == "fixed" else "draft"
        if proposer not in self.settings.proposers:
            return OFF
        return Plan(proposer, self.settings.k_max)  # type: ignore[arg-type]

    def _begin_or_end_first_sweep(self) -> None:
        """An engine that was not measured beforehand measures its first steps."""
        if self._sweep.has_begun:
            self.times.fit()
        else:
            self.sweep(1)

    def _adopt(
        self, plan: Plan, reason: str, req_ids: Sequence[str], load: Load | None = None
    ) -> Plan:
        self._is_sweeping = reason == "sweep"
        if (plan.proposer, plan.k) != (self._plan.proposer, self._plan.k) and not self._is_sweeping:
            is_new_load = reason == "goodput" and len(req_ids) != self._batch
            self.accounts.add_change(
                self._plan, plan, len(req_ids), "load" if is_new_load else reason
            )
        self._plan, self._batch = plan, len(req_ids)
        if load is not None:
            self._trials.note_use(self._batch, plan)
            self._num_since_decision = 0
            self.requests.set_caps(plan, req_ids, load)
        elif self._num_since_decision >= STEPS_PER_DECISION:
            self.requests.lift_caps()
        return plan

    def _can_probe(self, req_ids: Sequence[str]) -> bool:
        """Whether a probe would show anything."""
        return "draft" in self.settings.proposers and self.requests.can_show_acceptance(req_ids)

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
            self.requests.restart(surprise)
