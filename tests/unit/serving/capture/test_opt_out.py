"""A request that opts out of capture leaves counts in a worker, and nothing of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from osd.config.schema import CaptureConfig
from osd.records import SpecWindow, Trace
from serving.capture.capture import Capture
from serving.vllm.hooks import NewRequest, Verification

VOCABULARY = 16
PROMPT = [3, 4, 5]
OUTPUT = [6, 7, 8]
"""Emitted by the one verification step there is: two draft tokens accepted, the third rejected and
replaced."""


class Worker:
    """A worker's capture with everything that leaves it."""

    def __init__(self, **options: Any) -> None:
        self.traces: list[Trace] = []
        self.capture = Capture(
            CaptureConfig(**({"accepted_fraction": 1.0} | options)),
            draft="default",
            target_id="target",
            num_speculative_tokens=4,
            put=self._put,
            draft_version=5,
        )

    def _put(self, traces: Sequence[Trace]) -> int:
        self.traces += traces
        return len(traces)

    def serve(self, req_id: str, extra_args: dict[str, Any], skip_reason: str = "") -> None:
        """One whole request."""
        new = NewRequest(
            req_id=req_id,
            prompt_ids=PROMPT,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            max_tokens=len(OUTPUT),
            stop_ids=frozenset(),
            extra_args=extra_args,
            skip_reason=skip_reason,
        )
        self.capture.on_schedule([new], set())
        self.capture.on_verify(verification(req_id))
        self.capture.on_schedule([], {req_id})
        self.capture.drain()

    @property
    def skipped(self) -> dict[str, int]:
        return dict(self.capture.assembler.skipped)

    def window(self) -> SpecWindow:
        (window,) = self.capture.windows.take("replica-0", "default")
        return window


def verification(req_id: str) -> Verification:
    return Verification(
        req_ids=[req_id],
        num_draft_tokens_B=np.array([4]),
        is_partial_B=np.array([False]),
        draft_ids=torch.tensor([6, 7, 9, 10]),
        first_position_B=torch.tensor([len(PROMPT)]),
        sampled_BG=torch.tensor([[*OUTPUT, -1, -1]]),
        logits=torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)),
    )


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.capture.close()


def test_a_request_leaves_a_trace_with_its_domain(worker: Worker) -> None:
    """So that the tests below know what they look for."""
    worker.serve("r", {"osd_domain": "legal"})
    (trace,) = worker.traces
    assert (trace.trace_id, trace.domain) == ("r", "legal")
    assert (trace.prompt_ids.tolist(), trace.output_ids.tolist()) == (PROMPT, OUTPUT)
    assert trace.position.tolist() == [3, 4, 5]
    assert worker.skipped == {}
    window = worker.window()
    assert (window.domain, window.num_tested_per_pos) == ("legal", (1, 1, 1, 0))


@pytest.mark.parametrize("wish", ["off", "OFF", "0", "false", "No", False, 0, "", "disabled", "of"])
def test_a_request_that_opted_out_leaves_counts_alone(worker: Worker, wish: object) -> None:
    worker.serve("secret", {"osd_capture": wish, "osd_domain": "legal"})
    assert worker.traces == []
    assert worker.skipped == {"opted_out": 1}
    assert sum(worker.capture.assembler.rows.values()) == 0
    assert worker.capture.assembler.num_running == 0
    window = worker.window()
    assert window.domain == "", "its label is kept out too"
    assert (window.num_drafts, window.num_draft_tokens, window.num_accepted_tokens) == (1, 4, 2)
    assert (window.num_output_tokens, window.num_finished) == (3, 1)
    assert sum(window.num_tested_per_pos) == 0, "no draft is judged on what leaves no trace"


@pytest.mark.parametrize("extra_args", [{}, {"osd_capture": "on"}, {"osd_capture": True}])
def test_only_a_wish_to_opt_out_opts_out(worker: Worker, extra_args: dict[str, Any]) -> None:
    worker.serve("r", extra_args)
    assert len(worker.traces) == 1
    assert worker.skipped == {}


def test_another_reason_to_leave_a_request_out_keeps_its_label(worker: Worker) -> None:
    worker.serve(
        "secret", {"osd_capture": "off", "osd_domain": "legal"}, skip_reason="structured_output"
    )
    worker.serve("json", {"osd_domain": "legal"}, skip_reason="structured_output")
    assert worker.traces == []
    assert worker.skipped == {"opted_out": 1, "structured_output": 1}
    assert sorted(
        window.domain for window in worker.capture.windows.take("replica-0", "default")
    ) == ["", "legal"]


def test_where_capture_is_off_requests_are_judged_and_none_leaves_a_trace() -> None:
    worker = Worker(enabled=False)
    worker.serve("r", {"osd_domain": "legal"})
    assert worker.traces == []
    assert worker.window().num_tested_per_pos == (1, 1, 1, 0)
    worker.capture.close()
