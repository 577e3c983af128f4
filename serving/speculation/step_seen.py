"""What one engine step did, as the scheduler tells it to the control."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepSeen:
    """One step, read before vLLM trims its output. The lists are in the order of the requests."""

    req_ids: list[str]
    drafted: list[int]
    """draft tokens verified"""
    accepted: list[int]
    proposer: str
    """who had proposed them"""
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
