"""What one engine step was scheduled with, how long it took, and what it did, as the scheduler
tells the control."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serving.speculation.goodput import Plan
from serving.speculation.memory.unverified import Judged
from serving.speculation.net import Window
from serving.speculation.probes import Probe

MAX_IDLE_SECONDS = 0.002
"""A step scheduled this soon after the end of the step before counts from that end."""
HELD = "held"
"""The reason of steps in which the engine went on by itself."""


class Stamp(NamedTuple):
    """What a step was scheduled with. It stays with the step: an asynchronous engine has planned
    the next one before this one has ended."""

    plan: Plan
    """what is proposed at the end of the step"""
    reason: str
    """why: a rule of `Speculation.plan`"""
    probe: Probe | None = None
    """that the step belongs to"""
    window: Window | None = None
    """of the net gain, that the step belongs to"""


class DraftWork(NamedTuple):
    """What the draft model does at the end of a step."""

    passes: int = 0
    is_waking: bool = False
    """Whether it slept in the step before, so that it first reads what it has missed."""

    def next(self, passes: int) -> DraftWork:
        """Of the step that follows."""
        return DraftWork(passes, passes > 0 and not self.passes)

    def after(self, output: Any) -> DraftWork:
        """Of the step of this `SchedulerOutput`, which follows. Since vLLM 0.33 the V2 runner makes
        no passes where nobody can use the drafts: within a prompt, and where all requests end."""
        is_skipped = getattr(output, "skip_drafts", False)
        return self.next(0 if is_skipped else output.num_spec_tokens_to_schedule)


@dataclass(slots=True)
class Scheduled:
    """A step whose result has not come yet."""

    at: float
    stamp: Stamp
    proposed_by: Stamp
    """The stamp of the step that proposed what this one verifies."""
    draft: DraftWork
    """What of the draft's work lies within the step's time."""
    from_memory: frozenset[str] = frozenset()
    """Requests whose draft tokens are the memory's."""
    found: Mapping[str, float] = field(default_factory=dict)
    """Tokens of each request that the memory expected to be accepted."""
    follows: bool = False
    """Whether the step before it was still running or had just ended."""
    has_ended: bool = False
    seconds: float = 0.0
    """It took, once it has ended."""


class StepClock:
    """A step begins where the one before it ended, or where it is scheduled if the engine was idle.

    It ends where its result comes. An engine that runs it within the call that submits it
    (`is_inline`) has ended it when the scheduler is called next; under asynchronous scheduling that
    is one step before its result comes.
    """

    def __init__(self, *, is_inline: bool) -> None:
        self.is_inline = is_inline
        self._newest: Scheduled | None = None
        self._last_end = -math.inf

    def enter(self, now: float) -> None:
        """The scheduler is called."""
        if self.is_inline and self._newest is not None:
            self.end(self._newest, now)

    def begin(self, step: Scheduled, *, is_idle: bool) -> None:
        """A step was scheduled. `is_idle`: no result was awaited."""
        step.follows = not is_idle or step.at - self._last_end < MAX_IDLE_SECONDS
        self._newest = step

    def end(self, step: Scheduled, now: float) -> None:
        """The result of a step has come. Nothing changes where it has ended before."""
        if not step.has_ended:
            step.has_ended = True
            step.seconds = now - (self._last_end if step.follows else step.at)
            self._last_end = now


@dataclass(slots=True)
class StepSeen:
    """One step, read before vLLM trims its output. The lists are in the order of the requests."""

    req_ids: list[str]
    drafted: list[int]
    """draft tokens verified"""
    accepted: list[int]
    stamp: Stamp
    """what the step was scheduled with"""
    proposed_by: Stamp
    """what the step was scheduled with that proposed the draft tokens"""
    draft: DraftWork
    """what of the draft's work lies within the step's time"""
    context: int
    """tokens of all requests together"""
    is_pure: bool
    """Whether the step only decoded and directly followed the step before it."""
    seconds: float
    num_tokens: list[int]
    """tokens of each request before this step"""
    num_outputs: list[int] = field(default_factory=list)
    """how many of them are output"""
    num_surplus: int = 0
    """tokens that lie behind the ends of answers, and reach nobody"""
    own_seconds: float = 0.0
    """how much of `seconds` the control took for itself"""
    from_memory: Collection[str] = ()
    """requests whose draft tokens are the memory's"""
    found: Mapping[str, float] = field(default_factory=dict)
    """request -> tokens that the memory expected to be accepted, where it was asked"""
    judged: Sequence[Judged] = ()
    """what is known since the step before of drafts that nobody verified"""

    @property
    def num_delivered(self) -> int:
        return len(self.req_ids) + sum(self.accepted) - self.num_surplus


def runs_inline(config: Any) -> bool:
    """Whether a step has ended when the scheduler is called next. Under asynchronous scheduling
    that is so where the executor runs it on the CPU, in this process: its result then comes one
    step later than it ended."""
    executor = config.parallel_config.distributed_executor_backend
    is_on_cpu = config.device_config.device_type == "cpu" and executor == "uni"
    return is_on_cpu or not config.scheduler_config.async_scheduling


def drafts_after_results(config: Any, is_v2: bool) -> bool:
    """Whether a step's result comes before its draft has run. The V2 model runner sends the result
    from a device first. The draft's time is then part of the next step's."""
    return is_v2 and config.device_config.device_type != "cpu"


def num_surplus(request: Any, emitted: Sequence[int], max_model_len: int) -> int:
    """How many of these tokens vLLM drops, since they lie behind the end of the answer. A step with
    draft tokens may reach beyond it (`check_stop` in vLLM's `v1/core/sched/utils.py`)."""
    if len(emitted) == 1:
        return 0
    params = request.sampling_params
    left = min(request.max_tokens - request.num_output_tokens, max_model_len - request.num_tokens)
    ends = {params.eos_token_id, *(params.stop_token_ids or ())}
    num_kept = next((i for i, token in enumerate(emitted, 1) if token in ends), len(emitted))
    return len(emitted) - max(1, min(num_kept, left))
