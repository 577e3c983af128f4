"""What the capture thread does: rows are joined to their requests, and each finished request becomes a `Trace`.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from osd.config import CaptureConfig
from osd.records import ACCEPTED, PLAIN, REJECTED, Trace
from serving.vllm_compat import NewRequest
from serving.windows import WindowCounter

MAX_DOMAIN_LENGTH = 64


@dataclass(slots=True)
class Rows:
    """Target rows kept from one step, before they are joined to their requests."""

    request_R: np.ndarray
    """index into the step's requests"""
    offset_R: np.ndarray
    """draft tokens accepted before this row"""
    kind_R: np.ndarray
    draft_id_R: np.ndarray
    keep_prob_R: np.ndarray
    logits_RV: torch.Tensor


@dataclass(slots=True)
class Step:
    """One verification step on its way to the capture thread."""

    at: float
    req_ids: list[str]
    version_B: np.ndarray
    """version of the draft that proposed, per request"""
    position_B: np.ndarray
    sampled_BG: np.ndarray
    num_drafts_B: np.ndarray
    rows: Rows | None


@dataclass(slots=True)
class Schedule:
    """Requests that came and went before a step."""

    at: float
    new: list[NewRequest]
    finished: set[str]


@dataclass(slots=True)
class _Request:
    """A running request as the capture thread knows it."""

    request: NewRequest
    domain: str
    captured: bool
    output_ids: list[int] = field(default_factory=list)
    has_gap: bool = False
    first_at: float = 0.0
    last_at: float = 0.0
    is_ended: bool = False
    rows: dict[int, _Row] = field(default_factory=dict)
    """absolute position -> row; a position seen again (after preemption) overwrites"""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, frozen=True)
class _Row:
    kind: int
    draft_id: int
    target_ids: np.ndarray
    target_logprobs: np.ndarray
    tail_logprob: float
    keep_prob: float
    draft_version: int


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
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self._config = config
        self._draft = draft
        self._target_id = target_id
        self._put = put
        self._windows = windows
        self._requests: dict[str, _Request] = {}
        self._budget = ByteBudget(config.max_bytes_per_second)

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
            first_new = self._add_tokens(item)
            if item.rows is not None:
                self._add_rows(item, item.rows, first_new)

    def _begin(self, request: NewRequest) -> None:
        reason = skip_reason(request)
        captured = self._config.enabled and not reason
        if reason:
            self.skipped[reason] += 1
        self._requests[request.req_id] = _Request(request, domain_of(request), captured)

    def _add_tokens(self, step: Step) -> np.ndarray:
        """Append what was emitted; returns, per request, how many of its emitted tokens count (0 after its end)."""
        served_B = np.zeros(len(step.req_ids), np.int64)
        for b, req_id in enumerate(step.req_ids):
            request = self._requests.get(req_id)
            emitted = [int(t) for t in step.sampled_BG[b] if t >= 0]
            if request is None or not emitted or request.is_ended:
                continue
            served = request_tokens(request, int(step.position_B[b]), emitted)
            served_B[b] = served
            request.first_at = request.first_at or step.at
            request.last_at = step.at
            num_drafts = int(step.num_drafts_B[b])
            if num_drafts:
                request.num_drafts += 1
                request.num_draft_tokens += num_drafts
                request.num_accepted_tokens += len(emitted) - 1
            # Drafts are judged by replaying held-out traces: what leaves no trace must not be held against them.
            is_judged = request.captured or not self._config.enabled
            version = int(step.version_B[b])
            self._windows.add_step(version, request.domain, num_drafts, len(emitted) - 1, served, is_judged)
        return served_B

    def _add_rows(self, step: Step, rows: Rows, served_B: np.ndarray) -> None:
        wanted = rows.offset_R < served_B[rows.request_R]
        if not wanted.any():
            return
        ids_RK, logprobs_RK, tail_R = summarise(rows.logits_RV[torch.from_numpy(wanted)], self._config.top_k)
        for i, r in enumerate(np.nonzero(wanted)[0]):
            b = int(rows.request_R[r])
            request = self._requests[step.req_ids[b]]
            if len(request.output_ids) > self._config.max_output:
                continue
            request.rows[int(step.position_B[b] + rows.offset_R[r])] = _Row(
                kind=int(rows.kind_R[r]),
                draft_id=int(rows.draft_id_R[r]),
                target_ids=ids_RK[i],
                target_logprobs=logprobs_RK[i],
                tail_logprob=float(tail_R[i]),
                keep_prob=float(rows.keep_prob_R[r]),
                draft_version=int(step.version_B[b]),
            )

    def _finish(self, req_id: str, at: float) -> None:
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        if request.output_ids:
            self._windows.add_finished(
                request.domain, request.last_at - request.first_at, max(len(request.output_ids) - 1, 0)
            )
        if not request.captured or not request.output_ids:
            return
        if request.has_gap:
            self.skipped["gap"] += 1
            return
        trace = build_trace(request, self._config, draft=self._draft, target_id=self._target_id, at=at)
        if not self._budget.spend(trace.num_bytes):
            self.skipped["budget"] += 1
            return
        self._put([trace])
        for kind, name in ((REJECTED, "rejected"), (ACCEPTED, "accepted"), (PLAIN, "plain")):
            self.rows[name] += int((trace.kind == kind).sum())


def request_tokens(request: _Request, position: int, emitted: list[int]) -> int:
    """Append emitted tokens at an absolute position; returns how many were served (not cut off by the request's end).

    vLLM drops tokens after an end-of-sequence or stop token and beyond `max_tokens`; so do we.
    """
    start = position - len(request.request.prompt_ids)
    output = request.output_ids
    if start > len(output):
        request.has_gap = True
        return 0
    del output[start:]  # a position seen again is a replay after preemption
    for served, token in enumerate(emitted, start=1):
        output.append(token)
        params = request.request
        is_last = params.max_tokens is not None and len(output) >= params.max_tokens
        if is_last or (token in params.stop_ids and len(output) >= params.min_tokens):
            request.is_ended = True
            return served
    return len(emitted)


def build_trace(request: _Request, config: CaptureConfig, *, draft: str, target_id: str, at: float) -> Trace:
    """The trace of a finished request, its prompt cut to `max_context` tokens and its output to `max_output`."""
    params = request.request
    prompt_ids = params.prompt_ids[-config.max_context :]
    output_ids = request.output_ids[: config.max_output]
    cut = len(params.prompt_ids) - len(prompt_ids)
    length = len(prompt_ids) + len(output_ids)
    rows = {p - cut: row for p, row in sorted(request.rows.items()) if 1 <= p - cut < length}
    kept = list(rows.values())
    num_columns = len(kept[0].target_ids) if kept else 0
    return Trace(
        trace_id=params.req_id,
        draft=draft,
        target_id=target_id,
        domain=request.domain,
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
        num_drafts=request.num_drafts,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )


def summarise(logits_RV: torch.Tensor, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Top-k of the raw log-softmax, most likely first, and the log of all other mass: [R, K], [R, K], [R]."""
    logits_RV = logits_RV.float()
    top_k = min(top_k, logits_RV.shape[-1])
    norm_R = logits_RV.logsumexp(-1)
    values_RK, ids_RK = logits_RV.topk(top_k, dim=-1)
    rest_RV = logits_RV.scatter(-1, ids_RK, -torch.inf)
    tail_R = rest_RV.logsumexp(-1) - norm_R
    logprobs_RK = values_RK - norm_R[:, None]
    return (
        ids_RK.cpu().numpy().astype(np.int32),
        logprobs_RK.cpu().numpy().astype(np.float16),
        tail_R.cpu().numpy().astype(np.float32),
    )


class ByteBudget:
    """A token bucket: `spend` is False once more than a second's worth has gone out in the last second."""

    def __init__(self, bytes_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._left = float(bytes_per_second)
        self._at = clock()

    def spend(self, num_bytes: int) -> bool:
        now = self._clock()
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


def domain_of(request: NewRequest) -> str:
    """The traffic class the client named, cut to a bounded length; "" when it named none, or wants nothing kept."""
    if skip_reason(request) == "opted_out":
        return ""
    return str(request.extra_args.get("osd_domain", ""))[:MAX_DOMAIN_LENGTH]


def skip_reason(request: NewRequest) -> str:
    """Why nothing of a request may be captured: its own wish first; "" when it may."""
    if str(request.extra_args.get("osd_capture", "")).lower() in ("off", "0", "false", "no"):
        return "opted_out"
    return request.skip_reason
