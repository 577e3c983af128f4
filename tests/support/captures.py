"""Verification steps made by hand, an assembler, and a capture thread that can be held."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osd.config.schema import CaptureConfig
from osd.records import Trace
from serving.capture.assemble import Schedule, Step, TraceAssembler
from serving.capture.budget import ByteBudget
from serving.capture.capture import Capture
from serving.capture.pick import Landed, Lot, pick_on_host
from serving.capture.windows import WindowCounter
from serving.vllm.hooks import NewRequest, Verification

VOCAB = 100


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(
    req_id: str = "r", prompt_ids: Sequence[int] = (1, 2, 3), **fields: Any
) -> NewRequest:
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": None,
        "stop_ids": frozenset(),
        "extra_args": {},
        "skip_reason": "",
    }
    return NewRequest(req_id=req_id, prompt_ids=list(prompt_ids), **(values | fields))


def verification(
    position: int, emitted: Sequence[int], num_drafts: int, req_id: str = "r"
) -> Verification:
    """One request's step. Token t + 1 is the most likely one wherever t was emitted."""
    sampled = torch.full((1, num_drafts + 1), -1)
    sampled[0, : len(emitted)] = torch.tensor(emitted)
    logits = torch.zeros(num_drafts + 1, VOCAB)
    logits[torch.arange(len(emitted)), torch.tensor(emitted) + 1] = 9.0
    return Verification(
        req_ids=[req_id],
        num_draft_tokens_B=np.array([num_drafts]),
        is_partial_B=np.array([False]),
        draft_ids=torch.arange(num_drafts) + 50,
        first_position_B=torch.tensor([position]),
        sampled_BG=sampled,
        logits=logits,
    )


def step(
    position: int,
    emitted: Sequence[int],
    num_drafts: int = 0,
    req_id: str = "r",
    chance: float = 0.0,
) -> Step:
    """A step with all its rows, or with those of rejected draft tokens only (a `chance` of 0.9)."""
    shown = verification(position, emitted, num_drafts, req_id)
    lot = Lot(
        np.array([True]), np.full((1, num_drafts + 1), chance), np.array([1.0, 0.5, 0.5]), top_k=8
    )
    return Step(1.0, [req_id], np.array([1]), shown.num_draft_tokens_B, pick_on_host(shown, lot))


@dataclass
class Landing:
    """Picked rows that have landed already."""

    landed: Landed
    nbytes: int = 0

    def land(self) -> Landed:
        return self.landed


class Bench:
    """An assembler, and the traces that it handed out."""

    def __init__(self, budget: ByteBudget | None = None, **config: Any) -> None:
        self.traces: list[Trace] = []
        self.windows = WindowCounter(4)
        self._config = CaptureConfig(**{"top_k": 8, **config})
        self.assembler = TraceAssembler(
            self._config,
            draft="default",
            target_id="target",
            put=self._put,
            windows=self.windows,
            budget=budget,
        )

    def _put(self, traces: Sequence[Trace]) -> int:
        self.traces += traces
        return len(traces)

    def begin(self, *requests: NewRequest) -> None:
        fraction = self._config.request_fraction
        self.assembler.add(Schedule(0.0, list(requests), set(), request_fraction=fraction))

    def add(self, *steps: Step) -> None:
        for one in steps:
            self.assembler.add(one)

    def finish(self, *req_ids: str) -> None:
        self.assembler.add(Schedule(2.0, [], set(req_ids)))
        self.assembler.flush()

    def only_trace(self) -> Trace:
        (trace,) = self.traces
        return trace


class Stuck:
    """A sink that holds the capture thread until it is released."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.traces: list[Trace] = []

    def __call__(self, traces: Sequence[Trace]) -> int:
        self.entered.set()
        self.let_go.wait(10)
        self.traces += traces
        return len(traces)


def make_capture(put: Any, **config: Any) -> Capture:
    return Capture(
        CaptureConfig(**({"top_k": 8, "accepted_fraction": 1, "plain_fraction": 1} | config)),
        draft="default",
        target_id="target",
        num_speculative_tokens=4,
        put=put,
        draft_version=1,
        seed=0,
    )


def together(*shown: Verification) -> Verification:
    """One step of several requests, made from steps of one request each."""
    width = max(one.sampled_BG.shape[1] for one in shown)
    sampled = [
        torch.nn.functional.pad(one.sampled_BG, (0, width - one.sampled_BG.shape[1]), value=-1)
        for one in shown
    ]
    return Verification(
        req_ids=[req_id for one in shown for req_id in one.req_ids],
        num_draft_tokens_B=np.concatenate([one.num_draft_tokens_B for one in shown]),
        is_partial_B=np.concatenate([one.is_partial_B for one in shown]),
        draft_ids=torch.cat([one.draft_ids for one in shown]),
        first_position_B=torch.cat([one.first_position_B for one in shown]),
        sampled_BG=torch.cat(sampled),
        logits=torch.cat([one.logits for one in shown]),
        from_memory={req_id for one in shown for req_id in one.from_memory},
    )
