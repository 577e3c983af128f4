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
    what was served judges what nobody verified: tokens of the memory and of drafts (`memory/`)
    net windows     now and then the whole engine runs without speculation between two windows with
                    it, so that the gain is measured and not modelled (`net.py`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from osd.records import SpeculationReport
from serving.speculation.accounts import Accounts
from serving.speculation.goodput import OFF, Load, Plan, candidates, choose, whole
from serving.speculation.memory.remembers import Remembers
from serving.speculation.net import NetWindows
from serving.speculation.probes import PROBE_K, PROBE_SHARE, WATCHED_SHARE, Probes
from serving.speculation.requests import Requests
from serving.speculation.step_seen import Stamp, StepSeen
from serving.speculation.step_times import Shape, StepTimes
from serving.speculation.sweep import Sweep
from serving.speculation.trials import Trials
from serving.speculation.worth import Worth

STEPS_PER_DECISION = 4
SETTINGS_KEY = "osd"  # in vLLM's additional_config
DECISIONS_PER_OPENING, DECISIONS_PER_WORTH = 16, 4
"""At every 16th all drafts are verified whole: a request that never is could never show that it has
changed, nor a drawn one its worth. At every fourth it is asked what the draft is worth."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the scheduler is started with (`additional_config["osd"]`)."""

    mode: str = "auto"
    k_max: int = 5
    proposers: tuple[str, ...] = ("draft", "memory")
    predicted: float | None = None
    """conditional acceptance of the draft as its gate measured it"""
    net_interval_seconds: float = 0.0
    net_window_seconds: float = 2.0
    seed: int = 0
    memory_k_max: int = 8
    memory_bytes: int = 64 << 20
    memory_fraction: float = 1.0
    """Share of the requests that are remembered beyond their end."""
    memory_by_domain: bool = False
    """Whether requests of different classes are proposed nothing of each other's."""
    is_alone: bool = False
    """Whether no other engine will start in this process (`memory/compiled.py`)."""
    is_drawn: bool = False
    """Whether the draft's tokens are drawn (`proposals.fitted`)."""
    is_held: bool = False
    """Whether the engine begins as without this control (`Controlled.osd_command("hold")`)."""


def settings_of(additional_config: Any) -> Settings:
    """The settings within vLLM's `additional_config`."""
    given = additional_config.get(SETTINGS_KEY, {}) if isinstance(additional_config, dict) else {}
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in given.items()
    }
    return Settings(**values)


class Speculation:
    """One per engine, in the scheduler's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        padded: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        memory: Remembers | None = None,
    ) -> None:
        self.settings = settings
        self.times = StepTimes(padded)
        self.memory = memory
        """None: what was served is not remembered."""
        self.requests = Requests(settings.k_max, settings.proposers, settings.predicted, memory)
        net_interval_s = settings.net_interval_seconds if settings.mode == "auto" else 0.0
        self.net = NetWindows(net_interval_s, settings.net_window_seconds, settings.seed, clock)
        self.accounts = Accounts()
        self._forced: Plan | None = None
        self._newest = self._decided = Stamp(self._resting_plan(), settings.mode)
        self._told = self._newest.plan
        """The newest plan, sweeps left out."""
        self._batch = self._decided_for = self._num_decisions = 0
        self._num_since_decision = STEPS_PER_DECISION
        self.probes = Probes()
        self._trials = Trials()
        self._worth = Worth()
        self._sweep = Sweep(settings.k_max, settings.proposers)

    # -- requests ---------------------------------------------------------------------------------

    def begin(
        self,
        req_id: str,
        *,
        domain: str = "",
        client_cap: int | None = None,
        is_counted: bool = True,
        prompt: Sequence[int] = (),
        scope: str = "",
        is_kept: bool = True,
    ) -> None:
        """A request has come. `client_cap`: draft tokens per step that its client allows. One that
        is not counted leaves no trace in any estimate; one that is not kept, none in the memory.
        `scope`: the memory proposes what requests of the same scope were served."""
        self.requests.begin(
            req_id, domain, client_cap, is_counted, prompt=prompt, scope=scope, is_kept=is_kept
        )

    def end(self, req_id: str) -> None:
        """A request has gone."""
        self.requests.end(req_id)

    # -- before a step ----------------------------------------------------------------------------

    def plan(self, req_ids: Sequence[str], context: int) -> Stamp:
        """What the step that is about to be scheduled proposes at its end, and why. `req_ids` are
        those that decode; `context` counts their tokens."""
        self._trials.add_step()
        self._num_since_decision += 1
        stamp = self._first_rule(req_ids, context)
        if stamp.reason != "sweep":
            stamp = stamp._replace(window=self.net.newest)
            self._tell_change(stamp, len(req_ids))
        self._newest, self._batch = stamp, len(req_ids) or self._batch
        return stamp

    def give_back(self, stamp: Stamp) -> None:
        """The newest step ran nothing."""
        self.probes.give_back(stamp.probe)
        if stamp.reason == "sweep":
            self._sweep.give_back(stamp.plan)

    def _first_rule(self, req_ids: Sequence[str], context: int) -> Stamp:
        """The first rule that says anything holds."""
        if self._forced is not None:
            return Stamp(self._forced, "forced")
        if self._sweep.is_due(len(req_ids)):
            return Stamp(self._sweep.take(), "sweep")
        if self.net.is_off():
            return Stamp(OFF, "net window")
        if self.settings.mode != "auto":
            return Stamp(self._resting_plan(), self.settings.mode)
        if self._is_decision_due(len(req_ids)):
            self._decide(req_ids, context)
        if (probe := self.probes.take()) is not None:
            return Stamp(probe.plan, "probe", probe)
        return self._decided

    def _is_decision_due(self, batch: int) -> bool:
        is_old = self._num_since_decision >= STEPS_PER_DECISION or batch != self._decided_for
        return batch > 0 and is_old and not self.probes.has_steps_left

    def _decide(self, req_ids: Sequence[str], context: int) -> None:
        """Choose what the next few steps follow, by goodput; or begin a trial or a probe."""
        if not self.times.is_fitted:
            return self._begin_or_end_first_sweep()
        started = time.perf_counter()
        load = self.requests.load(req_ids, context)
        plans = candidates(load, self.times)
        decided = Stamp(choose(plans, self._decided.plan), "goodput")
        is_probe = not decided.plan.passes and self._begin_probe(plans, req_ids, load)
        if decided.plan.passes or is_probe:
            self.requests.has_changed = False  # the draft shows by itself what it is worth
        if load.batch != self._decided_for:
            decided = decided._replace(reason="load")
        elif not is_probe and (trial := self._trials.next(plans, load, self.times)):
            decided = Stamp(trial, "trial")
        self._num_decisions += 1
        if self._num_decisions % DECISIONS_PER_OPENING == 0:
            decided = decided._replace(plan=self._whole(decided.plan, load))
        if self._num_decisions % DECISIONS_PER_WORTH == 0:
            self._worth.add(load, plans, self.times)
        self._trials.note_use(load.batch, decided.plan)
        self.requests.set_caps(decided.plan, req_ids, load)
        self._decided, self._decided_for, self._num_since_decision = decided, load.batch, 0
        return self.accounts.add_decision(time.perf_counter() - started)

    # -- at the end of a step ---------------------------------------------------------------------

    def cap(self, req_id: str) -> int:
        """Draft tokens of this request that are verified, of those that the draft model
        proposes."""
        return self.requests.cap(req_id, self.present)

    @property
    def may_memory_propose(self) -> bool:
        """Whether anything that the memory finds now may be verified."""
        return self.memory is not None and self.present.may_memory_propose

    @property
    def present(self) -> Plan:
        """The plan of the newest step."""
        return self._newest.plan

    @property
    def has_caps(self) -> bool:
        """Whether any request may get fewer draft tokens than the plan says."""
        return self.present.draft_price > 0 or self.requests.has_cap_below(self.present.k)

    def look_up(self, req_id: str, ahead: Sequence[int] = ()) -> list[int]:
        """What the memory proposes for a request in the place of the draft; nothing where the draft
        does, and in net windows. `ahead`: tokens that were sampled, and not served yet."""
        if self._newest.reason == "net window":
            return []
        return self.requests.look_up(req_id, self.present, ahead)

    # -- after a step -----------------------------------------------------------------------------

    def observe(self, step: StepSeen) -> None:
        """Learn from a step."""
        self._learn_of_draft(step)
        if self.memory is not None:
            self.memory.work()
        if not step.req_ids:
            return
        tokens = step.num_delivered
        if step.is_pure:
            if not step.draft.is_waking:
                num, width = len(step.req_ids), len(step.req_ids) + sum(step.drafted)
                shape = Shape(num, width, step.context, step.draft.passes)
                self.times.add(shape, step.seconds)
            if step.stamp.reason != "sweep":
                self.accounts.add_step(step.stamp.plan, step.seconds, tokens)
        is_without = step.stamp.reason == "net window"  # as in an engine that has no control
        seconds = step.seconds - step.own_seconds if is_without else step.seconds
        self.net.add_step(step.stamp.window, max(seconds, 0.0), tokens, len(step.req_ids))
        self.accounts.add_sources(step, self.requests.is_counted)
        self.accounts.write(step)

    def _learn_of_draft(self, step: StepSeen) -> None:
        num_tested, num_accepted = self.requests.learn(step)
        probe = step.proposed_by.probe
        if self.probes.add_step(num_tested, num_accepted, probe):
            assert probe is not None
            self._num_since_decision = STEPS_PER_DECISION
            if probe.surprise is not None:
                self.requests.restart(probe.surprise)

    def restart(self, predicted: float | None) -> None:
        """Another draft serves from now on."""
        self.requests.restart(predicted)
        self._worth.restart()
        self._num_since_decision = STEPS_PER_DECISION
        self.probes.renew()

    def force(self, plan: Plan | None) -> None:
        """Follow this plan whatever the goodput says; None = decide again."""
        self._forced = plan
        self.probes.stop()
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

    def report(self) -> SpeculationReport:
        """Counters since the start, newest changes of plan. What waits in the memory goes on."""
        if self.memory is not None:
            self.memory.work()
        return SpeculationReport(
            mode=self.settings.mode,
            plan=self.present.name,
            proposer=self.present.proposer,
            k=self.present.k,
            batch=self._batch,
            predicted_tokens_per_second=self.present.goodput,
            num_probes=self.probes.num,
            net=self.net.report(),
            num_cells=self.times.num_cells,
            pace=self.times.pace,
            worth=self._worth.report(),
            **self.accounts.report(),
            **self.requests.breakdown.report(),
        )

    # -- inside -----------------------------------------------------------------------------------

    def _resting_plan(self) -> Plan:
        """The plan while nothing is known, and in the modes that decide nothing."""
        if self.settings.mode == "off" or not self.settings.proposers:
            return OFF
        proposer = self.settings.proposers[0] if self.settings.mode == "fixed" else "draft"
        if proposer not in self.settings.proposers:
            return OFF
        if proposer == "memory":
            return Plan("memory", self.settings.memory_k_max)
        return Plan("draft", self.settings.k_max)

    def _whole(self, plan: Plan, load: Load) -> Plan:
        return whole(plan, load, self.times, is_alone=self.settings.is_drawn)

    def _begin_or_end_first_sweep(self) -> None:
        """An engine that was not measured beforehand measures its first steps."""
        if self._sweep.has_begun:
            return self.times.fit()
        return self.sweep(1)

    def _tell_change(self, stamp: Stamp, batch: int) -> None:
        if (stamp.plan.proposer, stamp.plan.k) != (self._told.proposer, self._told.k):
            self.accounts.add_change(self._told, stamp.plan, batch, stamp.reason)
            self._told = stamp.plan

    def _begin_probe(self, plans: Sequence[Plan], req_ids: Sequence[str], load: Load) -> bool:
        """Begin a probe of the draft, if one is due and would show anything."""
        if load.draft_BG is None or not self.requests.can_show_acceptance(req_ids):
            return False
        plan = next(plan for plan in plans if plan.passes == PROBE_K)
        if self.memory is None or self.settings.is_drawn:  # else it is judged by what was served
            plan = self._whole(plan, load)
        rate, proposer = max((each.goodput, each.proposer) for each in plans)
        share = WATCHED_SHARE if proposer == "memory" else PROBE_SHARE
        best_s = plan.seconds * plan.goodput / rate
        if not self.probes.is_due(best_s, plan.seconds, self.requests.has_changed, share):
            return False
        tested_BG = load.draft_BG[load.allowed_B > 0]  # the others' clients allow nothing
        self.probes.begin(plan, expected=float(tested_BG[:, 0].mean()))
        self.requests.set_caps(plan, req_ids, load)
        self._trials.note_use(load.batch, plan)
        return True
