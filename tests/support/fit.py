"""Whether tokens that were sampled with speculation follow the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import kstest, norm

from osd.records import Trace


def misfit_of(
    target: Any, traces: Sequence[Trace], temperature: float, *, is_sampled: bool = False
) -> float:
    """p-value that the served tokens at drafted positions were drawn from `target` at this
    temperature.

    Each token counts, whatever came before it. Two tests, the smaller p-value twice: draft tokens
    are accepted as often as their probabilities say (z-test), and a token's place in the cumulative
    distribution, draft token first, then by probability, is uniform (Kolmogorov-Smirnov).
    `is_sampled`: draft tokens were drawn by chance, which decides with them what is served: only
    the place counts then, by probability alone.

    Example: 300 drafted tokens show a temperature of 0.6 in place of 1.
    """
    random = np.random.default_rng(0)
    places: list[float] = []
    accepted, expected, variance = 0, 0.0, 0.0
    for trace in traces:
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids]).astype(np.int64)
        with torch.no_grad():
            logits = target(torch.from_numpy(tokens[None])).logits[0] / temperature
        probs_TV = logits.double().softmax(-1).numpy()
        for position, draft in zip(trace.position, trace.draft_ids, strict=True):
            if draft < 0:
                continue
            served, probs = tokens[position], probs_TV[position - 1]
            accepted += int(served == draft)
            expected += probs[draft]
            variance += probs[draft] * (1 - probs[draft])
            above = probs[probs > probs[served]].sum()
            before = above + (0.0 if probs[draft] > probs[served] else probs[draft])
            start = above if is_sampled else 0.0 if served == draft else before
            places.append(start + random.random() * probs[served])
    assert len(places) >= 300, f"only {len(places)} drafted tokens: too few to say anything"
    by_place = float(kstest(places, "uniform").pvalue)
    if is_sampled:
        return by_place
    by_count = 2 * norm.sf(abs(accepted - expected) / np.sqrt(variance))
    return float(min(1.0, 2 * min(by_count, by_place)))
