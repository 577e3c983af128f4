"""The work of the capture thread: join rows to their requests, and make a `Trace` of each finished
request.

    steps ──► tokens, counters                      at once, step by step
         └──► waiting rows ──settle──► top-k of all together ──► their requests
                                                                     └──flush──► traces

The engine shares Python's lock with this thread, so rows of many steps are handled together.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows kept.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from osd.config.schema import CaptureConfig
from osd.records import ACCEPTED, BY_MEMORY, NO_VERSION, PLAIN, REJECTED, Trace, clean_domain
from serving.capture.budget import ByteBudget
from serving.capture.pick import Landed, Picked
from serving.capture.prefixes import StoredPrefixes
from serving.capture.rows import Logits, TopK, top_of
from serving.capture.running import RowsOfRequest, RunningRequest
from serving.capture.skips import skip_reason
from serving.capture.windows import WindowCounter
from serving.vllm.hooks import NewRequest

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 32 << 20
"""Bytes of rows that may wait for their top-k."""

STORED_OVERHEAD = 1024
"""Most bytes that a stored trace takes beyond its arrays and its id. The budget counts them."""


@dataclass(slots=True)
class Step:
    """One verification step on its way to the capture thread."""

    at: float
    """`time.monotonic`"""
    req_ids: list[str]
    version_B: np.ndarray
    """version of the draft that proposed, per request; or `BY_MEMORY`, or `NO_VERSION`"""
    num_drafts_B: np.ndarray
    picked: Picked


@dataclass(slots=True)
class Schedule:
    """Requests that came and went before a step."""

    at: float
    """Unix time"""
    new: list[NewRequest]
    finished: set[str]
    is_on: bool = True
    """Whether the new ones may be captured."""
    request_fraction: float = 1.0
    """Share of them that is."""


@dataclass(slots=True, frozen=True)
class Unverified:
    """Drafts in whose place the memory proposed, judged by what was served: (request, version,
    drafted, accepted)."""

    drafts: list[tuple[str, int, int, int]]


@dataclass(slots=True, frozen=True)
class _Waiting:
    """Rows of one step, which belong to the requests `owners[owner_R]`."""

    owners: list[RunningRequest | None]
    owner_R: np.ndarray
    position_R: np.ndarray
    kind_R: np.ndarray
    draft_id_R: np.ndarray
    keep_prob_R: np.ndarray
    version_R: np.ndarray
    scores: Logits | TopK


class TraceAssembler:
    """Joins rows to their requests and puts out a `Trace` when a request ends. Single-threaded."""

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
        self._waiting: list[_Waiting] = []
        self._num_waiting_bytes = 0
        self._ended: deque[tuple[RunningRequest, float]] = deque()
        """Finished requests without a trace yet, and the time of their end."""

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def add(self, item: Step | Schedule | Unverified) -> None:
        """Take in an item, in the order things happened. `flush` puts out the traces."""
        if isinstance(item, Schedule):
            for req_id in item.finished:
                self._finish(req_id, item.at)
            for request in item.new:
                self._begin(request, item)
        elif isinstance(item, Unverified):
            self._count_unverified(item)
        else:
            landed = item.picked.land()
            owners = [self._requests.get(req_id) for req_id in item.req_ids]
            served_B = self._add_tokens(item, landed, owners)
            if landed.rows is not None:
                self._add_rows(item, landed, owners, served_B)

    def flush(self) -> None:
        """Put out the traces of all finished requests. Where some fail, the others are still put
        out; then an `ExceptionGroup` is raised."""
        self._settle()
        failures: list[Exception] = []
        while self._ended:
            request, at = self._ended.popleft()
            if request.has_gap:
                self.skipped["gap"] += 1
                continue
            try:
                self._hand_out(request, at)
            except Exception as error:  # noqa: BLE001  one request must not cost the others
                failures.append(error)
        if failures:
            raise ExceptionGroup(f"{len(failures)} requests could not be handed out", failures)

    def _settle(self) -> None:
        """Give waiting rows to their requests. Where that fails, these requests have a gap."""
        waiting, self._waiting = self._waiting, []
        self._num_waiting_bytes = 0
        if not waiting:
            return
        try:
            self._distribute(waiting)
        except Exception:
            self.skipped["assembly_error"] += 1
            logger.exception("the rows of %d steps could not be captured", len(waiting))
            for request in (owner for one in waiting for owner in one.owners if owner is not None):
                request.has_gap = True

    def _begin(self, request: NewRequest, item: Schedule) -> None:
        known = self._requests.get(request.req_id)
        if known is not None and len(known.request.prompt_ids) == len(request.prompt_ids):
            return  # announced again after preemption, as vLLM does to its V2 model runner
        if known is not None and known.captured:
            # Its prompt has grown by what its client sent meanwhile; the earlier part is left out.
            self.skipped["gap"] += 1
        # The same choice as the hot path's, whatever was switched since.
        reason = skip_reason(request, item.request_fraction)
        captured = item.is_on and self._config.enabled and not reason
        if reason and known is None:
            self.skipped[reason] += 1
        # Drafts are judged by replaying held-out traces: what leaves no trace must not count, where
        # others do.
        is_judged = captured or not (item.is_on and self._config.enabled)
        self._requests[request.req_id] = RunningRequest(
            request, domain_of(request), captured, is_judged
        )

    def _count_unverified(self, item: Unverified) -> None:
        for req_id, version, num_drafted, num_accepted in item.drafts:
            request = self._requests.get(req_id)
            if request is not None and request.is_judged:
                self._windows.add_unverified(version, request.domain, num_drafted, num_accepted)

    def _add_tokens(
        self, step: Step, landed: Landed, owners: Sequence[RunningRequest | None]
    ) -> np.ndarray:
        """Append the emitted tokens. Returns, per request, how many of them were served (0 after
        its end)."""
        served_B = np.zeros(len(step.req_ids), np.int64)
        sampled_BG = landed.sampled_BG.tolist()
        num_emitted_B = (landed.sampled_BG >= 0).sum(1).tolist()
        position_B, num_drafts_B = landed.position_B.tolist(), step.num_drafts_B.tolist()
        version_B = step.version_B.tolist()
        for b, request in enumerate(owners):
            num_emitted = num_emitted_B[b]
            if request is None or not num_emitted:
                continue
            if self._waiting and request.computes_again(position_B[b]):
                self._settle()  # `append` discards rows, which the request must have by then
            was_ended = request.is_ended
            served = request.append(position_B[b], sampled_BG[b][:num_emitted])
            if was_ended and not served:
                continue  # the engine had gone on before it saw the end
            served_B[b] = served
            request.first_at = request.first_at or step.at
            request.last_at = step.at
            version, num_accepted = version_B[b], num_emitted - 1
            num_drafts = num_drafts_B[b] if version != NO_VERSION else 0
            if version > NO_VERSION:
                request.count_draft(num_drafts, num_accepted)
            self._windows.add_step(
                version if version > NO_VERSION else self._windows.last_version,
                request.domain,
                num_drafts,
                num_accepted,
                served,
                is_judged=request.is_judged,
                is_memory=version == BY_MEMORY,
            )
        return served_B

    def _add_rows(
        self, step: Step, landed: Landed, owners: list[RunningRequest | None], served_B: np.ndarray
    ) -> None:
        rows, max_output = landed.rows, self._config.max_output
        assert rows is not None
        for b, request in enumerate(owners):
            if request is not None and len(request.output_ids) > max_output:
                num_beyond = len(request.output_ids) - max_output  # these are not stored
                served_B[b] = max(0, served_B[b] - num_beyond)
        wanted = np.flatnonzero(rows.offset_R < served_B[rows.request_R])
        scores = rows.scores
        if len(wanted) < len(rows.request_R):
            scores = scores.of(wanted)
            rows.scores.give_back()
        if not len(wanted):
            return
        owner_R = rows.request_R[wanted]
        self._waiting.append(
            _Waiting(
                owners=owners,
                owner_R=owner_R,
                position_R=landed.position_B[owner_R] + rows.offset_R[wanted],
                kind_R=rows.kind_R[wanted],
                draft_id_R=rows.draft_id_R[wanted],
                keep_prob_R=rows.keep_prob_R[wanted],
                version_R=step.version_B[owner_R],
                scores=scores,
            )
        )
        self._num_waiting_bytes += scores.nbytes
        if self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._settle()

    def _distribute(self, waiting: Sequence[_Waiting]) -> None:
        """Give the rows of several steps to the requests they belong to."""
        owners: dict[int, RunningRequest] = {}
        numbers = []
        for one in waiting:
            number_B = np.zeros(len(one.owners), np.int64)
            for b in set(one.owner_R.tolist()):
                request = one.owners[b]
                assert request is not None, "only what was served is wanted"
                number_B[b] = id(request)
                owners[id(request)] = request
            numbers.append(number_B[one.owner_R])
        owner_R = np.concatenate(numbers)
        rows = RowsOfRequest(
            np.concatenate([one.position_R for one in waiting]),
            np.concatenate([one.kind_R for one in waiting]),
            np.concatenate([one.draft_id_R for one in waiting]),
            np.concatenate([one.keep_prob_R for one in waiting]),
            np.concatenate([one.version_R for one in waiting]),
            top_of([one.scores for one in waiting], self._config.top_k),
        )
        order = np.argsort(owner_R, kind="stable")
        bounds = np.flatnonzero(np.diff(owner_R[order])) + 1
        for mine in np.split(order, bounds):
            owners[int(owner_R[mine[0]])].rows.append(rows.of(mine))

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
        if request.captured and request.output_ids:
            self._ended.append((request, at))

    def _hand_out(self, request: RunningRequest, at: float) -> None:
        prompt_ids = np.asarray(request.request.prompt_ids, np.int32)
        num_repeated = self._prefixes.repeated(prompt_ids)
        trace = request.to_trace(
            self._config,
            draft=self._draft,
            target_id=self._target_id,
            at=at,
            num_repeated=num_repeated,
        )
        num_id_bytes = len(trace.trace_id.encode())  # which a client may have chosen
        if not self._budget.spend(trace.num_bytes + num_id_bytes + STORED_OVERHEAD):
            self.skipped["budget"] += 1
            return
        self.num_traces += 1
        num_left_out = len(prompt_ids) - len(trace.prompt_ids)
        # If more was left out than is stored elsewhere, the prompt's beginning is stored nowhere.
        if self._put([trace]) and num_left_out <= num_repeated:
            self._prefixes.remember(np.concatenate([prompt_ids, trace.output_ids]))
        for kind, name in ((REJECTED, "rejected"), (ACCEPTED, "accepted"), (PLAIN, "plain")):
            self.rows[name] += int((trace.kind == kind).sum())


def domain_of(request: NewRequest) -> str:
    """The traffic class the client named, in the form it is stored; "" when it named none or opted
    out."""
    if skip_reason(request) == "opted_out":
        return ""
    return clean_domain(str(request.extra_args.get("osd_domain", "")))
