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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from osd.config import CaptureConfig
from osd.records import ACCEPTED, PLAIN, REJECTED, Trace
from serving.assemble import Rows, Schedule, Step, TraceAssembler, skip_reason
from serving.vllm_compat import NewRequest, Verification
from serving.windows import WindowCounter

logger = logging.getLogger(__name__)


MAX_QUEUED_BYTES = 256 << 20
"""Logits waiting for the capture thread; beyond that, rows are dropped as if the queue were full."""


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
        self._num_queued_bytes = 0
        self._queue: queue.SimpleQueue[Step | Schedule | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="osd-capture", daemon=True)
        self._thread.start()

    # -- hot path: called by the engine -------------------------------------------------------------------------------

    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None:
        """Note which requests came and went."""
        for req_id in finished:
            self._live.pop(req_id, None)
        for request in new:
            captured = self._config.enabled and not skip_reason(request)
            self._live[request.req_id] = _Live(captured, self.draft_version)
        self._queue.put(Schedule(time.time(), new, finished))

    def on_verify(self, step: Verification) -> None:
        """Pick and copy the rows of one step."""
        taken = self._take(step)
        self._num_queued_bytes += _num_bytes(taken)
        self._queue.put(taken)

    def on_failure(self, error: Exception) -> None:
        """Capture is off until the engine restarts; serving goes on."""
        self.assembler.skipped["hook_error"] += 1
        logger.error("capture failed and is off until the engine restarts; serving is not affected", exc_info=error)

    def _take(self, step: Verification) -> Step:
        sampled_BG = step.sampled_BG.cpu().numpy().copy()
        sampled_BG[step.is_partial_B] = -1
        lives = [self._live.get(req_id) for req_id in step.req_ids]
        version_B = np.array([self.draft_version if live is None else live.proposed_by for live in lives])
        captured_B = np.array([live is not None and live.captured for live in lives])
        for live in lives:
            if live is not None:
                live.proposed_by = self.draft_version
        if self._queue.qsize() >= self._config.queue_size or self._num_queued_bytes > MAX_QUEUED_BYTES:
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
                    self._num_queued_bytes -= _num_bytes(item)
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


def _num_bytes(item: Step | Schedule) -> int:
    return item.rows.logits_RV.nbytes if isinstance(item, Step) and item.rows is not None else 0
