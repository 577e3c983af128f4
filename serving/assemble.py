"""What the capture thread does: rows are joined to their requests, and each finished request becomes a `Trace`.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from osd.config import CaptureConfig
from osd.records import ACCEPTED, PLAIN, REJECTED, Trace
from serving.budget import ByteBudget
from serving.pick import Landed, Picked
from serving.prefixes import StoredPrefixes
from serving.rows import Rows
from serving.running import Row, RunningRequest
from serving.skips import skip_reason
from serving.vllm_compat import NewRequest
from serving.windows import WindowCounter

MAX_DOMAIN_LENGTH = 64

STORED_OVERHEAD = 1024
"""Bytes a stored trace takes beyond its arrays, at most: the budget counts them."""


@dataclass(slots=True)
class Step:
    """One verification step on its way to the capture thread."""

    at: float
    """By `time.monotonic`."""
    req_ids: list[str]
    version_B: np.ndarray
    """version of the draft that proposed, per request; 0 where none did"""
    num_drafts_B: np.ndarray
    picked: Picked
    is_model_draft: bool = True
    """Whether the draft model proposed; else n-grams did, and the draft is not to be credited with them."""


@dataclass(slots=True)
class Schedule:
    """Requests that came and went before a step."""

    at: float
    """By the clock on the wall, as traces carry it."""
    new: list[NewRequest]
    finished: set[str]


class TraceAssembler:
    """Joins rows to their requests and hands out a `Trace` when a request ends. Single-threaded."""

    def __init__(
        self,
        config: CaptureConfig,
        *,
        draft: str,
        target_id: str,
        put: Callable[[Sequence[Trace]], int],
        windows: WindowCounter,
        budget: ByteBudget | None = None,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.num_traces = 0
        self._config = config
        self._draft = draft
        self._target_id = target_id
        self._put = put
        self._windows = windows
        self._requests: dict[str, RunningRequest] = {}
        self._prefixes = StoredPrefixes()
        self._budget = budget or ByteBudget(config.max_bytes_per_second)

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def add(self, item: Step | Schedule) -> None:
        if isinstance(item, Schedule):
            for req_id in item.finished:
                self._finish(req_id, item.at)
            for request in item.new:
                self._begin(request)
        else:
            landed = item.picked.land()
            served_B = self._add_tokens(item, landed)
            if landed.rows is not None:
                self._add_rows(item, landed, landed.rows, served_B)

    def _begin(self, request: NewRequest) -> None:
        known = self._requests.get(request.req_id)
        if known is not None and len(known.request.prompt_ids) == len(request.prompt_ids):
            return  # announced again after preemption, as vLLM does to its V2 model runner
        if known is not None and known.captured:
            self.skipped["gap"] += 1  # its prompt has grown by what its client sent meanwhile: what was, is left out
        reason = skip_reason(request, self._config.request_fraction)
        captured = self._config.enabled and not reason
        if reason and known is None:
            self.skipped[reason] += 1
        self._requests[request.req_id] = RunningRequest(request, domain_of(request), captured)

    def _add_tokens(self, step: Step, landed: Landed) -> np.ndarray:
        """Append what was emitted; returns, per request, how many of its emitted tokens count (0 after its end)."""
        served_B = np.zeros(len(step.req_ids), np.int64)
        for b, req_id in enumerate(step.req_ids):
            request = self._requests.get(req_id)
            emitted = [int(t) for t in landed.sampled_BG[b] if t >= 0]
            if request is None or not emitted:
                continue
            was_ended = request.is_ended
            served = request.append(int(landed.position_B[b]), emitted)
            if was_ended and not served:
                continue  # the engine had gone on before it saw the end
            served_B[b] = served
            request.first_at = request.first_at or step.at
            request.last_at = step.at
            num_drafts = int(step.num_drafts_B[b]) if step.is_model_draft else 0
            request.count_draft(num_drafts, len(emitted) - 1)
            # Drafts are judged by replaying held-out traces: what leaves no trace must not be held against them.
            is_judged = request.captured or not self._config.enabled
            version = int(step.version_B[b]) or self._windows.last_version
            self._windows.add_step(version, request.domain, num_drafts, len(emitted) - 1, served, is_judged)
        return served_B

    def _add_rows(self, step: Step, landed: Landed, rows: Rows, served_B: np.ndarray) -> None:
        wanted = np.nonzero(rows.offset_R < served_B[rows.request_R])[0]
        if not len(wanted):
            return
        top = rows.scores.top(wanted, self._config.top_k)
        for i, r in enumerate(wanted):
            b = int(rows.request_R[r])
            request = self._requests[step.req_ids[b]]
            if len(request.output_ids) > self._config.max_output:
                continue
            request.rows[int(landed.position_B[b] + rows.offset_R[r])] = Row(
                kind=int(rows.kind_R[r]),
                draft_id=int(rows.draft_id_R[r]),
                target_ids=top.ids_RK[i],
                target_logprobs=top.logprobs_RK[i],
                tail_logprob=float(top.tail_R[i]),
                keep_prob=float(rows.keep_prob_R[r]),
                draft_version=int(step.version_B[b]),
            )

    def _finish(self, req_id: str, at: float) -> None:
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        if request.output_ids:
            self._windows.add_finished(
                request.domain,
                request.last_at - request.first_at,
                max(len(request.output_ids) - 1, 0),
                request.captured and not request.has_gap,
            )
        if not request.captured or not request.output_ids:
            return
        if request.has_gap:
            self.skipped["gap"] += 1
            return
        self._hand_out(request, at)

    def _hand_out(self, request: RunningRequest, at: float) -> None:
        prompt_ids = np.asarray(request.request.prompt_ids, np.int32)
        num_repeated = self._prefixes.repeated(prompt_ids)
        trace = request.to_trace(
            self._config, draft=self._draft, target_id=self._target_id, at=at, num_repeated=num_repeated
        )
        if not self._budget.spend(trace.num_bytes + STORED_OVERHEAD):
            self.skipped["budget"] += 1
            return
        self.num_traces += 1
        num_left_out = len(prompt_ids) - len(trace.prompt_ids)
        if self._put([trace]) and num_left_out <= num_repeated:  # else the prompt's beginning is stored nowhere
            self._prefixes.remember(np.concatenate([prompt_ids, trace.output_ids]))
        for kind, name in ((REJECTED, "rejected"), (ACCEPTED, "accepted"), (PLAIN, "plain")):
            self.rows[name] += int((trace.kind == kind).sum())


def domain_of(request: NewRequest) -> str:
    """The traffic class the client named, cut to a bounded length; "" when it named none, or wants nothing kept."""
    if skip_reason(request) == "opted_out":
        return ""
    return str(request.extra_args.get("osd_domain", ""))[:MAX_DOMAIN_LENGTH]
