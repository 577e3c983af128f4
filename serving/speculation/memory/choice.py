"""Whose tokens are verified for one request: the draft's, or what the memory has found.

It is whoever's tokens are worth more beyond what verifying them takes. Asked in the scheduler's
process, or in a worker's (`ranks.py`), with the same answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serving.speculation.goodput import Plan
from serving.speculation.memory.memory import Found


class Terms(NamedTuple):
    """What a request allows, and what its draft is worth."""

    most: int
    """Tokens that may be verified."""
    cap: int
    """Tokens of the draft that would be."""
    gain: float
    """How many of these are accepted in the mean."""


def num_better(found: Found, plan: Plan, terms: Terms, ratio: float) -> int:
    """How many tokens of the memory are verified in the place of the draft's; 0 = the draft's are.
    `ratio`: tokens of the draft that are accepted beside such a look-up, over those in the mean."""
    if not found.tokens or not plan.may_memory_propose:
        return 0
    num = int(np.searchsorted(-found.survival_K, -plan.price, "right"))
    num = min(num, terms.most)
    if plan.proposer == "memory":
        num = min(num, plan.k)
    worth = float(found.survival_K[:num].sum()) - plan.price * num
    if plan.passes and worth <= terms.gain * ratio - plan.price * terms.cap:
        return 0
    return num
