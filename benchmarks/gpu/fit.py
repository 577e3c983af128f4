"""Whether captured rows and sampled tokens are the target's own.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

from osd.records import ACCEPTED, PLAIN, REJECTED, Trace

LogprobsOf = Callable[[Sequence[int]], np.ndarray]
"""tokens -> the target's log-probabilities [length, V]: row i is for token i + 1"""
MIN_LOGPROB = -12.0
"""Rows hold float16, which is too coarse below."""
MIN_SAMPLES = 100
MIN_EXPECTED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Captured rows against the target's."""

    num: int = 0
    num_missing: int = 0
    """output tokens without a row, or with two"""
    num_wrong_kinds: int = 0
    """rows whose kind does not fit their draft token and the served one"""
    differences: tuple[float, ...] = ()
    """per row the largest difference of a log-probability"""
    shifted: tuple[float, ...] = ()
    """the same against the target's row one position off: what an error would look like"""


def compare(traces: Sequence[Trace], logprobs_of: LogprobsOf) -> Rows:
    """Each row of the traces against the target. All rows of each trace must have been kept."""
    found = [_compare_one(trace, logprobs_of) for trace in traces]
    return Rows(
        num=sum(f.num for f in found),
        num_missing=sum(f.num_missing for f in found),
        num_wrong_kinds=sum(f.num_wrong_kinds for f in found),
        differences=tuple(d for f in found for d in f.differences),
        shifted=tuple(d for f in found for d in f.shifted),
    )


def _compare_one(trace: Trace, logprobs_of: LogprobsOf) -> Rows:
    tokens = np.concatenate([trace.prompt_ids, trace.output_ids])
    logprobs = logprobs_of(tokens.tolist())
    first, position_N = len(trace.prompt_ids), np.asarray(trace.position)
    times = np.bincount(position_N, minlength=len(tokens))[first:]
    wrong = [not _fits(trace, i, tokens) for i in range(trace.num_rows)]
    return Rows(
        num=trace.num_rows,
        num_missing=int((times != 1).sum()),
        num_wrong_kinds=sum(wrong),
        differences=_differences(trace, logprobs[position_N - 1]),
        shifted=_differences(trace, logprobs[position_N - 2]),
    )


def _fits(trace: Trace, row: int, tokens: np.ndarray) -> bool:
    served, drafted = tokens[trace.position[row]], trace.draft_ids[row]
    by_kind = {REJECTED: drafted not in (-1, served), ACCEPTED: drafted == served}
    by_kind[PLAIN] = drafted == -1
    return bool(by_kind[int(trace.kind[row])])


def _differences(trace: Trace, expected_NV: np.ndarray) -> tuple[float, ...]:
    captured_NK = trace.target_logprobs.astype(np.float64)
    expected_NK = np.take_along_axis(expected_NV, np.asarray(trace.target_ids, np.int64), axis=1)
    off_NK = np.where(captured_NK > MIN_LOGPROB, np.abs(captured_NK - expected_NK), 0.0)
    return tuple(off_NK.max(axis=1).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A pooled chi-square test."""

    p_value: float
    freedom: int
    num_tokens: int


def fit(
    prompts: Sequence[list[int]], samples: Sequence[Sequence[list[int]]], logprobs_of: LogprobsOf
) -> Fit:
    """Whether tokens at the drafted positions follow the target at temperature 1.

    `samples[i]`: continuations of `prompts[i]`. Their first token is never drafted, the others are.
    For each context with enough samples, counts of the next token are held against the target's
    probabilities; cells expected fewer than `MIN_EXPECTED` times are put together.
    """
    statistic, freedom, num_tokens = 0.0, 0, 0
    for context, following in _contexts(prompts, samples).items():
        if len(following) < MIN_SAMPLES:
            continue
        expected = np.exp(logprobs_of(context)[-1].astype(np.float64)) * len(following)
        observed = np.bincount(following, minlength=len(expected)).astype(float)
        some, others = _cells(observed, expected)
        statistic += float(((some - others) ** 2 / others).sum())
        freedom += len(some) - 1
        num_tokens += len(following)
    return Fit(p_value=float(chi2.sf(statistic, freedom)), freedom=freedom, num_tokens=num_tokens)


def _contexts(
    prompts: Sequence[list[int]], samples: Sequence[Sequence[list[int]]]
) -> dict[tuple[int, ...], list[int]]:
    """context -> tokens sampled next, all at drafted positions"""
    found: dict[tuple[int, ...], list[int]] = {}
    for prompt, continuations in zip(prompts, samples, strict=True):
        for tokens in continuations:
            for length in range(1, len(tokens)):
                found.setdefault((*prompt, *tokens[:length]), []).append(tokens[length])
    return found


def _cells(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    common = expected >= MIN_EXPECTED
    rest = expected[~common].sum()
    if rest < MIN_EXPECTED:
        return observed[common], expected[common]
    return (
        np.append(observed[common], observed[~common].sum()),
        np.append(expected[common], rest),
    )


def logprobs_by_transformers(directory: str, device: str, dtype: str) -> LogprobsOf:
    """The target's own log-probabilities, computed by transformers on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    )
    model.to(device).eval()

    @torch.no_grad()
    def logprobs_of(tokens: Sequence[int]) -> np.ndarray:
        logits = model(input_ids=torch.tensor([list(tokens)], device=device)).logits[0]
        found: np.ndarray = logits.float().log_softmax(-1).cpu().numpy()
        return found

    return logprobs_of
