"""Acceptance as clients see it, as replicas report it, and as a replay of a release measures it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from osd.client.load import Answer
from osd.records import DraftRelease, SpecWindow, Trace
from osd.service.launch import Service
from tests.support.services import records_of
from tests.support.traffic import ids_of


def counts(answers: Sequence[Answer]) -> np.ndarray:
    """int[R, 2]: accepted and tested draft tokens per request, from vLLM's own histograms."""
    return np.array(
        [
            (
                sum(j * n for j, n in enumerate(a.histogram)),
                sum(min(j + 1, len(a.histogram) - 1) * n for j, n in enumerate(a.histogram)),
            )
            for a in answers
        ]
    )


def alpha(counts_R2: np.ndarray) -> float:
    """The share of tested draft tokens that were accepted."""
    accepted, tested = counts_R2.sum(0)
    return float(accepted / tested)


def resampled_alphas(counts_R2: np.ndarray, num_requests: int, num: int = 2000) -> np.ndarray:
    """α of `num` samples of `num_requests` requests each, drawn with replacement."""
    rows = np.random.default_rng(0).integers(0, len(counts_R2), (num, num_requests))
    accepted, tested = counts_R2[rows].sum(1).T
    return np.asarray(accepted / tested)


def measured_alpha(release: DraftRelease) -> float:
    """α that the gate's replay measured before the release was published."""
    assert release.outcome is not None and release.outcome.eval is not None
    return release.outcome.eval.alpha_candidate


def served_counts(service: Service, version: int) -> np.ndarray:
    """int[2]: accepted and tested draft tokens that the replica reported for this version.

    Waits until the replica reports nothing more."""

    def look() -> np.ndarray:
        found = [w for w in records_of(service, SpecWindow) if w.version == version]
        sums = [(sum(w.num_accepted_tokens_per_pos), sum(w.num_tested_per_pos)) for w in found]
        return np.array(sums or [(0, 0)]).sum(0)

    counts = look()
    while True:
        time.sleep(1.5)  # a replica reports once a second
        if ((newer := look()) == counts).all():
            return counts
        counts = newer


def replayed_counts(
    release: DraftRelease, prompts: Sequence[str], answers: Sequence[Answer]
) -> np.ndarray:
    """int[R, 2]: accepted and tested draft tokens per answer, had this release drafted."""
    from trainer.draft import load_draft
    from trainer.evaluate import replay

    traces = [trace_of(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    counts = replay(load_draft(release.path), traces, 4, max_length=256)
    return np.stack([counts.accepted_RG.sum(1), counts.tested_RG.sum(1)], 1)


def trace_of(prompt: str, answer: Answer) -> Trace:
    """What a client saw, as a trace without captured rows."""
    names = ("position", "kind", "draft_ids", "tail_logprob", "keep_prob", "draft_version")
    empty: dict[str, Any] = {name: np.zeros(0) for name in names}
    empty |= {name: np.zeros((0, 1)) for name in ("target_ids", "target_logprobs")}
    empty |= {"prompt_ids": ids_of(prompt), "output_ids": answer.token_ids}
    return Trace(trace_id=str(answer.index), target_id="t", finished_at=0.0, **empty)
