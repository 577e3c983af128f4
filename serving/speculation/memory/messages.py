"""What a scheduler and a memory in its workers' processes tell each other, beside what vLLM sends.

with a step                      to all ranks          `Ask`, and `Begun` of new requests
with what the step sampled       from the first rank   `Told`
"""

from __future__ import annotations

from typing import NamedTuple

from serving.speculation.goodput import Plan
from serving.speculation.memory.choice import Terms


class Ask(NamedTuple):
    """At the end of this step the memory may propose."""

    plan: Plan
    ratios: tuple[float, ...]
    """By kind of look-up, as in `memory/hybrid.py`."""
    terms: dict[str, Terms]
    """Of the requests for which it may."""


class Begun(NamedTuple):
    """A request that the memory does not know yet."""

    scope: str
    is_kept: bool


class Told(NamedTuple):
    """What became of a step."""

    found: dict[str, int]
    """Tokens of the memory that go in the place of the draft's at its end, by request."""
    unverified: dict[str, list[int]]
    """Drafts from the end of the step before, which this one does not verify."""
    problem: str = ""
    """The error that has ended it."""
