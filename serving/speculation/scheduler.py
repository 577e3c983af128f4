"""vLLM's schedulers under control: before each step they ask how to speculate, after it they tell
what it brought.

    schedule()                 the plan's k becomes vLLM's number of draft tokens for this step
                               (`dynamic_sd_lookup`)
    update_from_output()       drafted and accepted tokens and the step's time go to `control.py`
    update_draft_token_ids()   the memory is asked, and drafts are cut to what is worth verifying
                               (`proposals.py`); under asynchronous scheduling, and with the V2
                               model runner, the worker asks (`osd_propose`)

vLLM loads `controlled_scheduler` by name (`scheduler_cls`) in the process of the engine core. The
replica asks for reports through `EngineCore.osd_speculation`. Importing this module imports nothing
of vLLM.

A request never fails because of the control. Its first error ends it, is logged once, and leaves
the engine at its largest k (in mode `off` at 0).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import msgspec

from serving.speculation.control import Speculation, settings_of
from serving.speculation.goodput import Plan
from serving.speculation.memory.elsewhere import ProposalsElsewhere, most_waiting, proposals_of
from serving.speculation.proposals import Drafts, Sampled, fitted, memory_of
from serving.speculation.step_seen import (
    HELD,
    DraftWork,
    Scheduled,
    Stamp,
    StepClock,
    StepSeen,
    drafts_after_results,
    num_surplus,
    runs_inline,
)
from serving.speculation.step_times import padded_sizes
from serving.vllm import names
from serving.vllm.name import resolve
from serving.vllm.undrafted import Undrafted

logger = logging.getLogger(__name__)


class Controlled(Undrafted):
    """Mixed into vLLM's scheduler, where a step is scheduled when the one before it is done."""

    IS_ASYNC = False
    osd_clock: Callable[[], float] = staticmethod(time.perf_counter)
    use_v2_model_runner: bool
    running: list[Any]
    requests: dict[str, Any]
    max_model_len: int
    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        is_v2, largest_k = self.use_v2_model_runner, int(self.num_spec_tokens)  # type: ignore[attr-defined]
        settings = replace(settings, memory_k_max=min(settings.memory_k_max, largest_k))
        settings, self._osd_left_out = fitted(settings, config, is_v2=is_v2)
        self.osd = Speculation(settings, padded=padded_sizes(config), memory=memory_of(settings))
        self._osd_proposals = proposals_of(self.osd, settings, config, is_v2=is_v2)
        self.is_asked_by_worker = self._osd_proposals.is_left_to_worker
        self.has_memory_elsewhere = isinstance(self._osd_proposals, ProposalsElsewhere)
        self._osd_problem = ""
        self._osd_resting_k = 0 if settings.mode == "off" else min(largest_k, settings.k_max)
        self._osd_lookups: dict[int, list[int]] = {}
        self._osd_open: dict[int, Scheduled] = {}
        """By the id of vLLM's output."""
        self._osd_proposed_by = Stamp(self.osd.present, settings.mode)
        """The stamp of the step that proposes what the next one verifies."""
        self._osd_drafting = DraftWork(self.osd.present.passes)
        """What the draft does at the end of that step."""
        self._osd_drafts_late = drafts_after_results(config, is_v2)
        self._osd_steps = StepClock(is_inline=runs_inline(config))
        self._osd_is_held = settings.is_held
        self._osd_own_s = 0.0
        """Time that the control itself has taken since the last step was read."""
        IN_THIS_PROCESS.add(self)

    # -- vLLM's methods ---------------------------------------------------------------------------

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        added = super().add_request(request, *args, **kwargs)
        if self.requests.get(request.request_id) is request:  # else more of a session
            begin, why = self._osd_proposals.begin, self._osd_why_undrafted
            self._osd_guard(lambda: begin(request, bool(why(request))))
        return added

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._osd_is_held or self._osd_problem:
            self.dynamic_sd_lookup = self._osd_lookup_table(self._osd_resting_k)
            output = super().schedule(*args, **kwargs)
            self._osd_proposals.scheduled_while_held(output)
            return output
        started = self.osd_clock()
        self._osd_steps.enter(started)
        stamp = self._osd_guard(self._osd_plan)
        k = self._osd_resting_k if stamp is None else stamp.plan.passes
        # Never None: vLLM would pad new decodes with draft tokens that nobody proposed.
        self.dynamic_sd_lookup = self._osd_lookup_table(k)
        output = super().schedule(*args, **kwargs)
        self._osd_guard(lambda: self._osd_scheduled(output, started, stamp))
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        seen = None
        if id(scheduler_output) in self._osd_open:  # else scheduled while it was held
            self._osd_steps.enter(self.osd_clock())
            # Before vLLM trims the sampled tokens, and a request's last step looks rejected.
            seen = self._osd_guard(lambda: self._osd_read(scheduler_output, model_runner_output))
        running = [self.requests[r] for r in seen.req_ids] if seen is not None else []
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output, *args, **kwargs
        )
        if seen is not None:
            self._osd_guard(lambda: self._osd_learn(scheduler_output, seen, running))
        elif self.osd.memory is not None:
            self._osd_guard(self.osd.memory.work)
        self._osd_guard(self._osd_close)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any, *args: Any, **kwargs: Any) -> None:
        ids, rows = draft_token_ids.req_ids, draft_token_ids.draft_token_ids
        if self._osd_is_held or self._osd_problem:  # they may be as wide as what a memory found
            rows[:] = [row[: (self.dynamic_sd_lookup or [0])[0]] for row in rows]
        else:
            self._osd_guard(lambda: self._osd_proposals.redraft(ids, rows, self.requests))
        super().update_draft_token_ids(draft_token_ids, *args, **kwargs)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        super()._update_after_schedule(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.IS_ASYNC and not self._osd_is_held:
            make_room = self._osd_proposals.make_room
            self._osd_guard(lambda: make_room(scheduler_output, self.requests))

    # -- from the worker --------------------------------------------------------------------------

    def osd_begin_to_ask(self) -> None:
        """From now on the worker asks within its steps."""
        self._osd_proposals.is_asked_by_worker = True
        self._osd_proposals.let_go()

    def osd_begin_to_mix(self) -> None:
        """From now on the worker tells tokens of the memory from drawn ones."""
        self._osd_proposals.waits_for_worker = False

    def osd_propose(self, sampled: Sampled | None, drafts: Drafts) -> None:
        """Within the worker's step, which has sampled and drafted."""
        if sampled is not None and not self._osd_is_held:
            self._osd_guard(lambda: self._osd_proposals.propose(sampled, drafts, self.requests))

    # -- from the replica -------------------------------------------------------------------------

    def osd_command(self, name: str, argument: str) -> str:
        """`report`, `sweep`, `end_sweep`, `sweep_steps_left`, `rows`, `load_rows`, `restart`,
        `force`, `forget`, `remember`, `keep`, `hold` or `log`. All in JSON text."""
        given = json.loads(argument or "null")
        result: Any = {}
        match name:
            case "report":
                result = msgspec.structs.replace(
                    self.osd.report(),
                    problem=self._osd_problem,
                    is_async=self.IS_ASYNC,
                    left_out=self._osd_left_out,
                    undrafted=dict(self.osd_undrafted),
                )
            case "sweep":
                self.osd.sweep(given)
            case "end_sweep":
                self.osd.end_sweep()
            case "sweep_steps_left":
                result = self.osd.num_sweep_steps_left
            case "rows":
                self.osd.times.fit()
                result = self.osd.times.to_rows()
            case "load_rows":
                self.osd.times.load_rows(given)
                result = True
            case "restart":
                self.osd.restart(given)
            case "force":
                self.osd.force(Plan(*given) if given else None)
            case "forget":
                self._osd_proposals.forget()
            case "remember":
                result = self._osd_proposals.remember(given)
            case "keep":
                self._osd_proposals.memory_fraction = float(given)
            case "hold":
                self._osd_hold(bool(given))
            case "log":
                result = self.osd.accounts.keep_log(bool(given))
            case _:
                raise ValueError(f"unknown command {name!r}")
        return msgspec.json.encode(result).decode()

    # -- inside -----------------------------------------------------------------------------------

    def _osd_guard(self, act: Callable[[], Any]) -> Any:
        if self._osd_problem:
            return None
        started = self.osd_clock()
        try:
            return act()
        except Exception as error:
            self._osd_problem = f"{type(error).__name__}: {error}"
            logger.exception(
                "control of speculation has ended, until the engine restarts: k stays at %d; "
                "serving is not affected",
                self._osd_resting_k,
            )
            return None
        finally:
            self._osd_own_s += self.osd_clock() - started

    def _osd_plan(self) -> Stamp:
        decoding = [r for r in self.running if r.num_output_tokens > 0]
        return self.osd.plan([r.request_id for r in decoding], sum(r.num_tokens for r in decoding))

    def _osd_hold(self, is_held: bool) -> None:
        """Held, the engine speculates as vLLM by itself: with its largest k, and nothing is decided
        or learnt. Requests are still known, so that it can be let go at any time."""
        if is_held == self._osd_is_held:
            return
        self._osd_proposals.let_go()
        # Steps that end while it is held are never observed.
        self.osd.probes.stop()
        self.osd.net.stop()
        if not is_held:
            plan = Plan("draft", self._osd_resting_k)
            self._osd_proposed_by = Stamp(plan, HELD)
            self._osd_drafting = DraftWork(plan.passes)
            self._osd_steps = StepClock(is_inline=runs_inline(self.vllm_config))  # type: ignore[attr-defined]
        self._osd_is_held = is_held

    def _osd_lookup_table(self, k: int) -> list[int]:
        table = self._osd_lookups.get(k)
        if table is None:
            size = self.scheduler_config.max_num_seqs + 1  # type: ignore[attr-defined]
            table = self._osd_lookups.setdefault(k, [k] * size)
        return table

    def _osd_scheduled(self, output: Any, started: float, stamp: Stamp) -> None:
        before = self._osd_drafting
        drafting = before.after(output)
        draft = before if self._osd_drafts_late else drafting
        step = Scheduled(started, stamp, self._osd_proposed_by, draft)
        self._osd_steps.begin(step, is_idle=not self._osd_open)
        self._osd_open[id(output)] = step
        step.from_memory = self._osd_proposals.scheduled(output)
        if self.osd.memory is not None:
            step.found = self.osd.requests.found(output.scheduled_spec_decode_tokens)
        if output.num_scheduled_tokens:
            self._osd_proposed_by, self._osd_drafting = stamp, drafting
        else:  # nothing runs, and nothing is proposed
            self.osd.give_back(stamp)

    def _osd_read(self, output: Any, result: Any) -> StepSeen | None:
        step = self._osd_open.pop(id(output))
        self._osd_steps.end(step, self.osd_clock())
        sampled, index = result.sampled_token_ids, result.req_id_to_index
        drafts, scheduled = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        if not scheduled:
            return None
        invalid = output.num_invalid_spec_tokens or {}
        seen = StepSeen(
            [], [], [], step.stamp, step.proposed_by, step.draft, 0, True, step.seconds, []
        )
        own_s, self._osd_own_s = self._osd_own_s, 0.0
        seen.own_seconds = own_s if self._osd_steps.is_inline else 0.0
        for req_id, num_scheduled in scheduled.items():
            request = self.requests.get(req_id)
            emitted = sampled[index[req_id]] if sampled else ()
            drafted = len(drafts.get(req_id, ()))
            if num_scheduled != 1 + drafted or request is None or not request.num_output_tokens:
                seen.is_pure = False
            if not emitted or request is None:
                continue
            seen.req_ids.append(req_id)
            seen.drafted.append(drafted - invalid.get(req_id, 0))
            seen.accepted.append(len(emitted) - 1)
            seen.num_tokens.append(request.num_tokens)
            seen.num_outputs.append(request.num_output_tokens)
            seen.context += request.num_tokens
            seen.num_surplus += num_surplus(request, emitted, self.max_model_len)
        seen.from_memory = self._osd_proposals.verified(step, output, result, self.requests)
        seen.found = step.found
        return seen

    def _osd_learn(self, output: Any, seen: StepSeen, running: list[Any]) -> None:
        seen.judged = self._osd_proposals.served(running)
        self._osd_proposals.told(output, running)
        self.osd.observe(seen)

    def _osd_close(self) -> None:
        for req_id in self.osd.requests.gone(self.requests):
            self._osd_proposals.end(req_id)


IN_THIS_PROCESS: WeakSet[Controlled] = WeakSet()
"""Schedulers that a worker beside them may ask."""


class ControlledAsync(Controlled):
    """Mixed into vLLM's asynchronous scheduler, for engines that schedule ahead."""

    IS_ASYNC = True


def controlled_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """What `scheduler_cls` names. vLLM calls it when it has settled how the engine schedules."""
    return controlled_class(vllm_config)(vllm_config, *args, **kwargs)


def controlled_class(vllm_config: Any) -> type[Controlled]:
    """vLLM's scheduler that fits the engine, under control. It also gives the engine core the
    method that the replica calls by name (`engine_core.call_utility`)."""
    Scheduler, AsyncScheduler, EngineCore = map(resolve, names.CONTROLLED)
    EngineCore.osd_speculation = _command
    EngineCore.osd_undrafted = _undrafted_problem
    is_async = vllm_config.scheduler_config.async_scheduling
    bases = (ControlledAsync, AsyncScheduler) if is_async else (Controlled, Scheduler)
    return type("ControlledScheduler", bases, {})


def _command(core: Any, name: str, argument: str = "null") -> str:
    answer = str(core.scheduler.osd_command(name, argument))
    if core.scheduler.has_memory_elsewhere and name in ("forget", "remember"):
        answers = core.model_executor.collective_rpc("osd_memory", args=(name, argument))
        answer = json.dumps(most_waiting([answer, *answers]))
    return answer


def _undrafted_problem(core: Any) -> str:
    return str(core.scheduler.osd_undrafted_problem)
