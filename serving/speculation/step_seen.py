"""What one engine step was scheduled with, how long it took, and what it did, as the scheduler
tells the control."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.speculation.goodput import Plan
from serving.speculation.net import Window
from serving.speculation.probes import Probe

MAX_IDLE_SECONDS = 0.002
"""A step scheduled this soon after the end of the step before counts from that end."""


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


@dataclass(slots=True)
class Scheduled:
    """A step whose result has not come yet."""

    at: float
    stamp: Stamp
    proposed_by: Stamp
    """The stamp of the step that proposed what this one verifies."""
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
        self._is_inline = is_inline
        self._newest: Scheduled | None = None
        self._last_end = -math.inf

    def enter(self, now: float) -> None:
        """The scheduler is called."""
        if self._is_inline and self._newest is not None:
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
    passes: int
    """passes of the draft model at the end of the step"""
    context: int
    """tokens of all requests together"""
    is_pure: bool
    """Whether the step only decoded and directly followed the step before it."""
    seconds: float
    num_tokens: list[int]
    """tokens of each request before this step"""
    num_outputs: list[int] = field(default_factory=list)
    """how many of them are output"""
