"""What one engine step was scheduled with, and what it did, as the scheduler tells the control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from serving.speculation.goodput import Plan
from serving.speculation.net import Window
from serving.speculation.probes import Probe


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
