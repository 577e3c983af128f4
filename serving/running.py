"""A running request as the capture thread knows it, and the `Trace` it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from osd.config import CaptureConfig
from osd.records import Trace
from serving.vllm_compat import NewRequest


@dataclass(slots=True, frozen=True)
class Row:
    """One captured row: the target's distribution at a position."""

    kind: int
    draft_id: int
    target_ids: np.ndarray
    target_logprobs: np.ndarray
    tail_logprob: float
    keep_prob: float
    draft_version: int


@dataclass(slots=True)
class RunningRequest:
    """Tokens and rows so far."""

    request: NewRequest
    domain: str
    captured: bool
    output_ids: list[int] = field(default_factory=list)
    has_gap: bool = False
    first_at: float = 0.0
    last_at: float = 0.0
    is_ended: bool = False
    rows: dict[int, Row] = field(default_factory=dict)
    """absolute position -> row"""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def append(self, position: int, emitted: list[int]) -> int:
        """Add emitted tokens at an absolute position; returns how many were served (not cut off by the end).

        vLLM drops tokens after an end-of-sequence or stop token and beyond `max_tokens`; so do we. A position seen
        before is one the engine computes again, having thrown away what it had: then so do we, rows included, since
        they may follow other tokens than those that come now.
        """
        start = position - len(self.request.prompt_ids)
        output = self.output_ids
        if start < len(output):
            del output[max(start, 0) :]
            self.rows = {at: row for at, row in self.rows.items() if at < position}
            self.is_ended = False
        if self.is_ended:
            return 0
        if start != len(output):
            self.has_gap = True
            return 0
        for served, token in enumerate(emitted, start=1):
            output.append(token)
            if self._ends_with(token):
                self.is_ended = True
                return served
        return len(emitted)

    def _ends_with(self, token: int) -> bool:
        params, length = self.request, len(self.output_ids)
        if params.max_tokens is not None and length >= params.max_tokens:
            return True
        return token in params.stop_ids and length >= params.min_tokens

    def count_draft(self, num_drafts: int, num_accepted: int) -> None:
        """One verification of `num_drafts` draft tokens."""
        if num_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted

    def to_trace(self, config: CaptureConfig, *, draft: str, target_id: str, at: float, num_repeated: int) -> Trace:
        """The trace of a finished request, its output cut to `max_output` tokens and its prompt to `max_context`; of
        its first `num_repeated` tokens, which earlier traces hold, only `max_repeated_context` stay."""
        params = self.request
        cut = max(0, len(params.prompt_ids) - config.max_context, num_repeated - config.max_repeated_context)
        prompt_ids = params.prompt_ids[cut:]
        output_ids = self.output_ids[: config.max_output]
        length = len(prompt_ids) + len(output_ids)
        rows = {p - cut: row for p, row in sorted(self.rows.items()) if 1 <= p - cut < length}
        kept = list(rows.values())
        num_columns = len(kept[0].target_ids) if kept else 0
        return Trace(
            trace_id=params.req_id,
            draft=draft,
            target_id=target_id,
            domain=self.domain,
            finished_at=at,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            output_ids=np.asarray(output_ids, np.int32),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            position=np.fromiter(rows.keys(), np.int32, len(rows)),
            kind=np.array([row.kind for row in kept], np.int8),
            draft_ids=np.array([row.draft_id for row in kept], np.int32),
            target_ids=np.array([row.target_ids for row in kept], np.int32).reshape(len(kept), num_columns),
            target_logprobs=np.array([row.target_logprobs for row in kept], np.float16).reshape(len(kept), num_columns),
            tail_logprob=np.array([row.tail_logprob for row in kept], np.float32),
            keep_prob=np.array([row.keep_prob for row in kept], np.float32),
            draft_version=np.array([row.draft_version for row in kept], np.int32),
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )
