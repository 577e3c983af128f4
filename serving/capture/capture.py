"""Capture: verification steps in, one `Trace` per finished request out. Runs inside the vLLM
worker.

    engine step ──► Capture.on_verify ──► queue ──► capture thread ──► put(traces)
                    picks rows (`pick.py`)          waits for copies from a device, takes the top-k
                                                    on a CPU, joins rows to their requests
                                                    (`assemble.py`)

The engine waits for nothing here: a full queue, a spent budget or a failing buffer drops traces and
counts the reason (`skips.py`). A request's tokens are read from its prompt and the sampler's own
output, never from the engine's token buffers on the host, which lag behind under asynchronous
scheduling.

Legend: B requests in a step, G draft tokens per step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from osd.config.schema import CaptureConfig
from osd.errors import OSDError
from osd.records import BY_MEMORY, NO_VERSION, Trace
from serving.capture.assemble import Schedule, Step, TraceAssembler, Unverified
from serving.capture.pick import Lot, pick
from serving.capture.rows import RowPool
from serving.capture.skips import skip_reason
from serving.capture.windows import WindowCounter
from serving.vllm.hooks import NewRequest, Proposed, Verification

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20
"""Bytes of rows that may wait for the capture thread; beyond that the queue counts as full."""
SECONDS_TO_GATHER = 0.1
"""The capture thread handles together what comes within this time. Single steps would cost more,
and wake it each time."""
SECONDS_AT_ONCE, RESTS = 0.001, 3.0
"""After so many CPU seconds of taking steps in it rests, so many times as long, at most as long as
it gathers: while it computes, Python may keep the engine's thread waiting, and one step must not
bear what was gathered from many."""
HURRY_AT = 0.25
"""Share of a full queue at which the gathering ends early."""
MAX_STEPS_TO_JUDGE = 64
"""Steps after which a draft that nobody verified is judged at the latest."""


@dataclass(slots=True)
class _Live:
    """What the hot path knows about a running request."""

    captured: bool
    proposed_by: int
    """Version of the draft when its present draft tokens were proposed."""


class Capture:
    """Listens to one worker. `put` gets finished traces, in the capture thread."""

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
        self.assembler = TraceAssembler(
            config, draft=draft, target_id=target_id, put=put, windows=self.windows
        )
        self._config, self._is_on = config, True
        self._live: dict[str, _Live] = {}
        self._random = np.random.default_rng(seed)
        self._pick = partial(pick, pool=RowPool())
        self._num_bytes_in = 0
        """written by the engine's thread alone"""
        self._num_bytes_out = 0
        """written by the capture thread alone"""
        self._hurry = threading.Event()
        """Something queued is not to wait for more."""
        self._versions = [(-1, NO_VERSION)] * MAX_STEPS_TO_JUDGE
        """(step, version of the draft that proposed at its end) of the newest steps"""
        self._queue: queue.SimpleQueue[Step | Schedule | Unverified | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="osd-capture", daemon=True)
        self._thread.start()

    # -- hot path: called by the engine -----------------------------------------------------------

    def on_schedule(self, new: list[NewRequest], finished: set[str]) -> None:
        """Requests came and went."""
        for req_id in finished:
            self._live.pop(req_id, None)
        for request in new:
            captured = (
                self._is_on
                and self._config.enabled
                and not skip_reason(request, self._config.request_fraction)
            )
            self._live[request.req_id] = _Live(captured, self.draft_version)
        self._queue.put(
            Schedule(time.time(), new, finished, self._is_on, self._config.request_fraction)
        )

    def on_proposed(self, proposed: Proposed) -> None:
        """What is known of drafts that nobody verified counts for those who proposed them."""
        self._versions[proposed.step % MAX_STEPS_TO_JUDGE] = proposed.step, self.draft_version
        drafts = []
        for req_id, step, num_drafted, num_accepted in proposed.judged:
            known, version = self._versions[step % MAX_STEPS_TO_JUDGE]
            if known == step and version != NO_VERSION:
                drafts.append((req_id, version, num_drafted, num_accepted))
        if drafts:
            self._queue.put(Unverified(drafts))

    def on_verify(self, step: Verification) -> None:
        """Pick the rows of one step, and queue them."""
        taken = self._take(step)
        self._num_bytes_in += taken.picked.nbytes
        self._queue.put(taken)
        if self._is_full(HURRY_AT):
            self._hurry.set()

    def on_failure(self, error: Exception) -> None:
        """Capture is off until the engine restarts; serving goes on."""
        self.assembler.skipped["hook_error"] += 1
        details = None if isinstance(error, OSDError) else error
        text = "capture is off until the engine restarts; serving is not affected: %s"
        logger.error(text, error, exc_info=details)

    def _take(self, step: Verification) -> Step:
        lives = [self._live.get(req_id) for req_id in step.req_ids]
        version_B = np.array(
            [self.draft_version if live is None else live.proposed_by for live in lives]
        )
        captured_B = np.array([live is not None and live.captured for live in lives])
        for live in lives:
            if live is not None:
                live.proposed_by = self.draft_version
        if captured_B.any() and self._is_full():
            self.assembler.skipped["queue_full"] += 1
            captured_B[:] = False
        keep_prob = np.array([1.0, self._config.accepted_fraction, self._config.plain_fraction])
        lot = Lot(
            captured_B, self._random.random(step.sampled_BG.shape), keep_prob, self._config.top_k
        )
        if step.from_memory:
            version_B[[req_id in step.from_memory for req_id in step.req_ids]] = BY_MEMORY
        picked = self._pick(step, lot)
        return Step(
            time.monotonic(),
            step.req_ids,
            version_B,
            step.num_draft_tokens_B,
            picked,
        )

    def _is_full(self, part: float = 1.0) -> bool:
        num_queued_bytes = self._num_bytes_in - self._num_bytes_out
        is_full = self._queue.qsize() >= part * self._config.queue_size
        return is_full or num_queued_bytes > part * MAX_QUEUED_BYTES

    # -- capture thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(1)
        is_open = True
        while is_open:
            is_open = self._handle_what_came()

    def _handle_what_came(self) -> bool:
        """Wait for an item, gather more for a moment, and handle them all. False after the last."""
        items = deque([self._queue.get()])
        is_hurried = self._hurry.wait(SECONDS_TO_GATHER)
        self._hurry.clear()
        while not self._queue.empty():  # only this thread takes from it
            items.append(self._queue.get())
        is_hurried |= any(item is None or isinstance(item, threading.Event) for item in items)
        reached: list[threading.Event] = []
        is_open, began, left = True, time.thread_time(), SECONDS_TO_GATHER
        while items:
            item = items.popleft()
            if item is None:
                is_open = False
            elif isinstance(item, threading.Event):
                reached.append(item)
            else:
                self._handle(partial(self.assembler.add, item))
                self._num_bytes_out += item.picked.nbytes if isinstance(item, Step) else 0
                spent = time.thread_time() - began
                if spent > SECONDS_AT_ONCE and left > 0 and not is_hurried:
                    rest = min(RESTS * spent, left)
                    is_hurried = self._hurry.wait(rest)
                    began, left = time.thread_time(), left - rest
        self._handle(self.assembler.flush)
        for event in reached:
            event.set()
        return is_open

    def _handle(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self.assembler.skipped["assembly_error"] += (
                len(error.exceptions) if isinstance(error, ExceptionGroup) else 1
            )
            logger.exception("a step could not be captured")

    # -- switched while the engine runs; between its steps ----------------------------------------

    def set_enabled(self, is_enabled: bool, request_fraction: float | None = None) -> None:
        """Whether requests that come from now on are captured, and how many of them (None =
        unchanged). Those that run end as they began."""
        self._is_on = is_enabled
        if request_fraction is not None:
            update = {"request_fraction": request_fraction}
            self._config = self._config.model_copy(update=update)

    def let_go(self) -> None:
        """Nothing more is heard of the requests that run: for capture, they end here."""
        self.on_schedule([], set(self._live))

    def drain(self, timeout: float = 5.0) -> None:
        """Wait until everything queued so far has been handled."""
        reached = threading.Event()
        self._queue.put(reached)
        self._hurry.set()
        reached.wait(timeout)

    def close(self) -> None:
        self._queue.put(None)
        self._hurry.set()
        self._thread.join(timeout=5)
