"""What a step takes: of a batch of so many requests that are all alike.

    seconds = verify(draft tokens of a request) + tokens in the KV cache x per_context_s
            + overhead + what the proposer takes

Legend: W draft tokens verified per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

NOBODY = ""
"""The proposer of a step that verifies no draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCosts:
    """What a proposer adds to a step that verifies its draft, for the whole batch.

    Example:
        DraftCosts(per_pass_s=1.1e-3)
        A draft model: each token takes a pass.
    """

    per_step_s: float = 0.0
    """However long the draft is."""
    per_pass_s: float = 0.0
    """For each draft token of a request."""
    per_context_s: float = 0.0
    """For each token in the KV cache."""
    share_of_verify: float = 0.0
    """Of the time of verifying."""
    prefill_token_s: float = 0.0
    """For each token of the prompts, which a draft model reads too."""
    is_charged_empty: bool = False
    """Whether it is paid for where it proposes nothing. An oracle then takes nobody instead."""

    def __post_init__(self) -> None:
        for name in DRAFT_NUMBERS:
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is no time; give 0 or more")


DRAFT_NUMBERS = (
    "per_step_s",
    "per_pass_s",
    "per_context_s",
    "share_of_verify",
    "prefill_token_s",
)
FREE = DraftCosts()


class Line(NamedTuple):
    """Seconds of a step as its context grows: `base_W[w] + slope_W[w] * tokens in the KV cache`."""

    base_W: np.ndarray
    slope_W: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Seconds of a step of `batch` requests that are all alike, as the public simulator of
    "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580) has them.

    Example:
        StepCosts(batch=4, widths=(0, 4, 24), verify_s=(0.034, 0.04, 0.07),
                  drafts={"draft": DraftCosts(per_step_s=0.004), "memory": DraftCosts()})
    """

    batch: int
    widths: tuple[int, ...]
    """Draft tokens of each request that were verified when the time was taken, from 0 upwards.
    Between them the time grows linearly; beyond the last as between the last two."""
    verify_s: tuple[float, ...]
    """By `widths`, with nothing in the KV cache."""
    per_context_s: float = 0.0
    """For each token in the KV cache, those of all requests."""
    overhead_s: float = 0.0
    """Around each step, whatever it does."""
    prefill_s: float = 0.0
    """Of the prefill of the batch, however long its prompts are."""
    prefill_token_s: float = 0.0
    """For each token of the prompts."""
    drafts: Mapping[str, DraftCosts] = field(default_factory=dict)
    """By proposer."""

    def __post_init__(self) -> None:
        """An oracle that may verify less must not pay more for it: times never fall."""
        if len(self.widths) != len(self.verify_s) or len(self.widths) < 2:
            raise ValueError("widths and verify_s must be equally many, two at least")
        if self.widths[0] != 0 or (np.diff(self.widths) <= 0).any():
            raise ValueError(f"widths: {self.widths} must begin with 0 and grow")
        if self.verify_s[0] <= 0 or (np.diff(self.verify_s) < 0).any():
            raise ValueError(f"verify_s: {self.verify_s} must be above 0 and never fall")
        if self.batch < 1 or min(self.per_context_s, self.overhead_s) < 0:
            raise ValueError("batch must be at least 1, per_context_s and overhead_s at least 0")

    def line(self, proposer: str, most: int) -> Line:
        """Of steps that verify 0 to `most` draft tokens per request of a proposer. Raises
        `KeyError` where it has no price."""
        draft = FREE if proposer == NOBODY else self.drafts[proposer]
        width_W = np.arange(most + 1)
        beyond_W = np.maximum(width_W - self.widths[-1], 0)
        last = (self.verify_s[-1] - self.verify_s[-2]) / (self.widths[-1] - self.widths[-2])
        verify_W = np.interp(width_W, self.widths, self.verify_s) + last * beyond_W
        is_paid_W = (width_W > 0) | draft.is_charged_empty
        proposing_W = (
            draft.share_of_verify * verify_W + draft.per_step_s + draft.per_pass_s * width_W
        )
        slope = draft.share_of_verify * self.per_context_s + draft.per_context_s
        return Line(
            base_W=verify_W + self.overhead_s + is_paid_W * proposing_W,
            slope_W=self.per_context_s + is_paid_W * slope,
        )

    def context(self, num_prompt: int, num_output: int) -> np.ndarray:
        """float [T - 1]: tokens in the KV cache of the batch, by position."""
        return self.batch * (num_prompt + np.arange(1.0, max(num_output, 1)))

    def prefill(self, num_prompt: int, proposer: str = NOBODY) -> float:
        """Seconds of the prefill of the batch; of a proposer, what it adds to the target's."""
        if proposer != NOBODY:
            return self.drafts[proposer].prefill_token_s * self.batch * num_prompt
        return self.prefill_s + self.prefill_token_s * self.batch * num_prompt
