"""Capture: verification steps in, one `Trace` per finished request out. Runs inside the vLLM worker.

    engine step ──► Capture.on_verify ──► queue ──► capture thread ──► TraceAssembler ──► put(traces)
                    picks rows, copies             top-k, log-sum-exp,                    (replay buffer)
                    them, nothing else             joins rows to their request

The engine waits for nothing here: a full queue, a spent budget or a failing buffer drop traces and count why.
Rows of rejected draft tokens are always kept; accepted ones and those without a proposal with a probability that the
row carries along, so that the loss can weight them.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows kept.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from osd.config import CaptureConfig
from osd.records import ACCEPTED, PLAIN, REJECTED, Trace
from serving.vllm_compat import NewRequest, Verification
from serving.windows import WindowCounter

logger = logging.getLogger(__name__)

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
class _Live:
    """What the hot path must know about a running request."""

    captured: bool
    proposed_by: int
    """Version of the draft when its present draft tokens were proposed."""


class Capture:
    """Listens to one worker. `put` receives finished traces in the capture thread."""

    def __init__(
        self,
        config: CaptureConfig,
        *,
        draft: str,
        target_id: str,
        num_speculative_tokens: int,
        put: Callable[[Sequence[Trace]], int],
        draft_version: int,
        seed: int | None = None,
    ) -> None:
        self.draft_version = draft_version
        self.windows = WindowCounter(num_speculative_tokens)
        self.assembler = TraceAssembler(config, draft=draft, target_id=target_id, put=put, windows=self.windows)
        self._config = config
        self._live: dict[str, _Live] = {}
        self._random = np.random.default_rng(seed)
        self._queue: queue.SimpleQueue[Step | Schedule | threading.Event | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="osd-capture", daemon=True)
        self._thread.start()

    # -- hot path: called by the engine -------------------------------------------------------------------------------

    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None:
        """Note which requests came and went. Never raises."""
        for req_id in finished:
            self._live.pop(req_id, None)
        for request in new:
            captured = self._config.enabled and not _skip_reason(request)
            self._live[request.req_id] = _Live(captured, self.draft_version)
        self._queue.put(Schedule(time.time(), new, finished))

    def on_verify(self, step: Verification) -> None:
        """Pick and copy the rows of one step. Never raises: a failure here is counted, and capture goes off."""
        if self._failed:
            return
        try:
            self._queue.put(self._take(step))
        except Exception:
            self._failed = True
            self.assembler.skipped["hook_error"] += 1
            logger.exception("capture failed and is off until the engine restarts; serving is not affected")

    def _take(self, step: Verification) -> Step:
        sampled_BG = step.sampled_BG.cpu().numpy().copy()
        sampled_BG[step.is_partial_B] = -1
        lives = [self._live.get(req_id) for req_id in step.req_ids]
        version_B = np.array([self.draft_version if live is None else live.proposed_by for live in lives])
        captured_B = np.array([live is not None and live.captured for live in lives])
        for live in lives:
            if live is not None:
                live.proposed_by = self.draft_version
        if self._queue.qsize() >= self._config.queue_size:
            self.assembler.skipped["queue_full"] += 1
            captured_B[:] = False
        return Step(
            at=time.time(),
            req_ids=step.req_ids,
            version_B=version_B,
            position_B=step.first_position_B.cpu().numpy().copy(),
            sampled_BG=sampled_BG,
            num_drafts_B=step.num_draft_tokens_B,
            rows=self._pick_rows(step, sampled_BG, captured_B),
        )

    def _pick_rows(self, step: Verification, sampled_BG: np.ndarray, captured_B: np.ndarray) -> Rows | None:
        num_emitted_B = (sampled_BG >= 0).sum(1)
        wanted_B = np.nonzero(captured_B & (num_emitted_B > 0))[0]
        if not len(wanted_B):
            return None
        counts = num_emitted_B[wanted_B]
        request_R = np.repeat(wanted_B, counts)
        offset_R = np.concatenate([np.arange(n) for n in counts])
        num_drafts_R = step.num_draft_tokens_B[request_R]
        last_R = offset_R == num_emitted_B[request_R] - 1
        kind_R = np.where(~last_R, ACCEPTED, np.where(offset_R < num_drafts_R, REJECTED, PLAIN)).astype(np.int8)
        keep_prob_R = np.array([1.0, self._config.accepted_fraction, self._config.plain_fraction])[kind_R]
        kept = self._random.random(len(kind_R)) < keep_prob_R
        request_R, offset_R, kind_R = request_R[kept], offset_R[kept], kind_R[kept]
        num_drafts_B = step.num_draft_tokens_B
        first_row_B = np.cumsum(num_drafts_B + 1) - (num_drafts_B + 1)
        first_draft_B = np.cumsum(num_drafts_B) - num_drafts_B
        draft_id_R = np.full(len(kind_R), -1, np.int64)
        proposed = kind_R != PLAIN
        drafts = step.draft_ids.cpu().numpy()
        draft_id_R[proposed] = drafts[(first_draft_B[request_R] + offset_R)[proposed]]
        rows = torch.from_numpy(first_row_B[request_R] + offset_R).to(step.logits.device)
        return Rows(request_R, offset_R, kind_R, draft_id_R, keep_prob_R[kept], step.logits[rows])

    # -- capture thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self.assembler.add(item)
            except Exception:
                self.assembler.skipped["assembly_error"] += 1
                logger.exception("a step could not be captured")

    def drain(self, timeout: float = 5.0) -> None:
        """Wait until everything queued so far has been handled."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait(timeout)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)


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
        reason = _skip_reason(request)
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
            self._windows.add_step(int(step.version_B[b]), request.domain, num_drafts, len(emitted) - 1, served)
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
    """The traffic class the client named, cut to a bounded length; "" when it named none."""
    return str(request.extra_args.get("osd_domain", ""))[:MAX_DOMAIN_LENGTH]


def _skip_reason(request: NewRequest) -> str:
    if str(request.extra_args.get("osd_capture", "")).lower() in ("off", "0", "false", "no"):
        return "opted_out"
    return request.skip_reason
