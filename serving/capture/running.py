"""A running request as the capture thread knows it, and the `Trace` it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from osd.config.schema import CaptureConfig
from osd.records import Trace
from serving.capture.rows import TopK
from serving.vllm.hooks import NewRequest


@dataclass(slots=True, frozen=True)
class RowsOfRequest:
    """Captured rows of one request, by position. R rows."""

    position_R: np.ndarray
    """absolute"""
    kind_R: np.ndarray
    draft_id_R: np.ndarray
    keep_prob_R: np.ndarray
    version_R: np.ndarray
    """of the draft that proposed"""
    top: TopK

    def of(self, index_R: np.ndarray) -> RowsOfRequest:
        """Some of the rows, copied."""
        return RowsOfRequest(
            self.position_R[index_R],
            self.kind_R[index_R],
            self.draft_id_R[index_R],
            self.keep_prob_R[index_R],
            self.version_R[index_R],
            self.top.of(index_R),
        )


@dataclass(slots=True)
class RunningRequest:
    """A request's tokens and rows so far."""

    request: NewRequest
    domain: str
    captured: bool
    is_judged: bool = True
    """Whether its draft tokens count for the draft."""
    output_ids: list[int] = field(default_factory=list)
    has_gap: bool = False
    first_at: float = 0.0
    last_at: float = 0.0
    is_ended: bool = False
    rows: list[RowsOfRequest] = field(default_factory=list)
    """by position, ascending"""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def append(self, position: int, emitted: list[int]) -> int:
        """Add emitted tokens at an absolute position. Returns how many were served, not cut off by
        the end of the request.

        Tokens after an end-of-sequence or stop token and beyond `max_tokens` are dropped, as vLLM
        does. At a position seen before, the engine computes again: the tokens and rows from there
        on are discarded, since the new ones may differ.
        """
        start = position - len(self.request.prompt_ids)
        output = self.output_ids
        if self.computes_again(position):
            del output[start:]
            self.rows = [part.of(np.flatnonzero(part.position_R < position)) for part in self.rows]
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

    def computes_again(self, position: int) -> bool:
        """Whether a token at this absolute position replaces an earlier one."""
        return position - len(self.request.prompt_ids) < len(self.output_ids)

    def _ends_with(self, token: int) -> bool:
        params, length = self.request, len(self.output_ids)
        if params.max_tokens is not None and length >= params.max_tokens:
            return True
        # Also before `min_tokens`: vLLM masks stop tokens until then, and ends at any that comes.
        return token in params.stop_ids

    def count_draft(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verification of `num_drafts` draft tokens."""
        if num_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted

    def to_trace(
        self, config: CaptureConfig, *, draft: str, target_id: str, at: float, num_repeated: int
    ) -> Trace:
        """The trace of the finished request. Its output is cut to `max_output` tokens and its
        prompt to the last `max_context`. Of the first `num_repeated` tokens, which earlier traces
        hold, only the last `max_repeated_context` are kept."""
        params = self.request
        cut = max(
            0,
            len(params.prompt_ids) - config.max_context,
            num_repeated - config.max_repeated_context,
        )
        prompt_ids = params.prompt_ids[cut:]
        output_ids = self.output_ids[: config.max_output]
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
            position=_joined([part.position_R - cut for part in self.rows]),
            kind=_joined([part.kind_R for part in self.rows]),
            draft_ids=_joined([part.draft_id_R for part in self.rows]),
            target_ids=_joined([part.top.ids_RK for part in self.rows]),
            target_logprobs=_joined([part.top.logprobs_RK for part in self.rows]),
            tail_logprob=_joined([part.top.tail_R for part in self.rows]),
            keep_prob=_joined([part.keep_prob_R for part in self.rows]),
            draft_version=_joined([part.version_R for part in self.rows]),
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            is_shared=params.is_shared,
        )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All parts as one array. `Trace` sets its dtype, and its dimensions when it is empty."""
    return np.concatenate(parts) if parts else np.zeros(0)
