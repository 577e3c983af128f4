"""Acceptance of a draft, measured by replaying served tokens instead of serving the draft.

With greedy drafting (vLLM's default) a draft token is accepted exactly when it equals the token
that was served: the target accepts x with probability p(x), and after a rejection never emits x
itself. So one forward pass over prompt and output shows where a draft's argmax would have been
accepted, at any temperature. Walking the output in steps of k gives the counts that the engine
would have reported. Candidate and base replay the same requests, so they are compared in pairs.

Where the engines draw draft tokens from the draft's distribution q (vLLM's `draft_sample_method`
"probabilistic"), those of a request above temperature 0 are counted as `trainer/sampling/drafts.py`
expects them to be.

The same pass shows how often a token tree of width k would have held the served token: whether it
is among the draft's k likeliest (*success by k*; SpecInfer, arXiv 2305.09781, table 1).

Legend: R traces, G draft tokens per step, K likeliest tokens, N rows, T output tokens, V
vocabulary, I bootstrap resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit

from osd.config.schema import GateConfig
from osd.records import ClassReport, EvalReport, Trace, conditional_acceptance
from trainer.batch import (
    NUM_LIKELIEST,
    check_rows,
    collate_outputs,
    to_device,
    well_formed,
)
from trainer.classes import classes_of, last_fall
from trainer.draft import Draft
from trainer.sampling.drafts import expected_counts
from trainer.sampling.student import GREEDY

NUM_IF_SAMPLED = 16
"""Requests that show what sampled drafts would bring: each takes the draft another pass."""
SHARE_OF_CLASS = 8
"""A class of which there are at least two traces since, one in so many of all, is still served."""


class ReplayCounts(NamedTuple):
    """The counts that the engine would have reported for each trace; float64, and expected ones,
    where drafts are sampled."""

    tested_RG: np.ndarray
    """int64; drafts whose first g tokens were all accepted, and that had a token g + 1 to test."""
    accepted_RG: np.ndarray
    """int64; those of `tested_RG` whose token g + 1 was accepted."""
    held_RK: np.ndarray
    """int64; served tokens, from the second on, that are among the draft's k likeliest where it
    would propose first."""
    served_R: np.ndarray
    """int64; these served tokens."""

    @property
    def alpha(self) -> float | None:
        """Conditional acceptance over all traces; None when nothing was tested."""
        return conditional_acceptance(float(self.accepted_RG.sum()), float(self.tested_RG.sum()))

    @property
    def alpha_per_pos(self) -> tuple[float, ...]:
        """[G]; 0 where nothing was tested."""
        return tuple((self.accepted_RG.sum(0) / np.maximum(self.tested_RG.sum(0), 1)).tolist())

    @property
    def success(self) -> tuple[float, ...]:
        """[K]; success by k; 0 where nothing was served."""
        return tuple((self.held_RK.sum(0) / max(int(self.served_R.sum()), 1)).tolist())

    def of(self, is_chosen_R: np.ndarray) -> ReplayCounts:
        """The counts of some of the traces."""
        return ReplayCounts(*(counts[is_chosen_R] for counts in self))


def can_replay(trace: Trace) -> bool:
    """Whether the trace has a token that a draft could have proposed."""
    return len(trace.output_ids) > 1


def replay(
    model: Draft, traces: Sequence[Trace], k: int, *, max_length: int, **how: Any
) -> ReplayCounts:
    """Tested and accepted draft tokens per trace and position, for k tokens that `model` drafts in
    every step."""
    return replay_all([model], traces, k, max_length=max_length, **how)[0]


def replay_all(
    models: Sequence[Draft],
    traces: Sequence[Trace],
    k: int,
    *,
    max_length: int,
    batch_size: int = 8,
    is_sampled: bool = False,
) -> list[ReplayCounts]:
    """`replay` of several drafts of one kind. What they read of the target is computed once.

    `is_sampled`: draft tokens are drawn from the draft, where a request is above temperature 0. The
    rows of such requests must be well formed.
    """
    num = len(traces)
    found = [
        ReplayCounts(
            tested_RG=np.zeros((num, k), np.int64),
            accepted_RG=np.zeros((num, k), np.int64),
            held_RK=np.zeros((num, NUM_LIKELIEST), np.int64),
            served_R=np.zeros(num, np.int64),
        )
        for _ in models
    ]
    order = np.argsort([len(t.prompt_ids) + len(t.output_ids) for t in traces], kind="stable")
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        matches = _matches(models, [traces[r] for r in chosen], max_length)
        for counts, of_model in zip(found, matches, strict=True):
            for r, (is_match_GT, is_likely_KT) in zip(chosen, of_model, strict=True):
                counts.tested_RG[r], counts.accepted_RG[r] = count_steps(is_match_GT, k)
                counts.held_RK[r] = np.logical_or.accumulate(is_likely_KT).sum(1)
                counts.served_R[r] = is_likely_KT.shape[1]
    return _with_sampled(found, models, traces, max_length, batch_size) if is_sampled else found


def _with_sampled(
    found: Sequence[ReplayCounts],
    models: Sequence[Draft],
    traces: Sequence[Trace],
    max_length: int,
    batch_size: int,
) -> list[ReplayCounts]:
    """Expected counts in place of those of requests whose drafts are sampled."""
    drawn = [r for r, trace in enumerate(traces) if trace.temperature >= GREEDY]
    k = found[0].tested_RG.shape[1]
    with_expected = []
    expected = expected_counts(models, [traces[r] for r in drawn], k, max_length, batch_size)
    for counts, (tested_RG, accepted_RG) in zip(found, expected, strict=True):
        both = counts.tested_RG.astype(np.float64), counts.accepted_RG.astype(np.float64)
        both[0][drawn], both[1][drawn] = tested_RG, accepted_RG
        with_expected.append(counts._replace(tested_RG=both[0], accepted_RG=both[1]))
    return with_expected


def count_steps(is_match_GT: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Walk an output in verification steps: (tested [k], accepted [k]).

    `is_match_GT` says, from the second output token on, whether what the draft proposes at depth g
    of its step equals the served token. [1, T] or [T] where all depths propose alike. A step tests
    up to k tokens (fewer at the end) and accepts the leading matches. The next step begins after
    them and the one token that the target adds.
    """
    tested, accepted = np.zeros(k, np.int64), np.zeros(k, np.int64)
    run_T = leading_matches(np.atleast_2d(is_match_GT), k)
    at = 0
    while at < len(run_T):
        num_drafted, num_accepted = min(k, len(run_T) - at), int(run_T[at])
        accepted[:num_accepted] += 1
        tested[: min(num_accepted + 1, num_drafted)] += 1
        at += num_accepted + 1
    return tested, accepted


def leading_matches(is_match_GT: np.ndarray, k: int) -> np.ndarray:
    """int64 [T]: draft tokens, of at most k, accepted in a step that begins there. `is_match_GT`:
    bool [G, T], as of `is_match`."""
    num_depths, num_tokens = is_match_GT.shape
    is_run_T, run_T = np.ones(num_tokens, bool), np.zeros(num_tokens, np.int64)
    for depth in range(k):
        ahead_T = is_match_GT[min(depth, num_depths - 1), depth:]
        is_run_T &= np.pad(ahead_T, (0, num_tokens - len(ahead_T)))
        run_T += is_run_T
    return run_T


def compare(
    candidate: Draft,
    base: Draft,
    traces: Sequence[Trace],
    k: int,
    gate: GateConfig,
    *,
    max_length: int,
    batch_size: int = 8,
    seed: int = 0,
    is_sampled: bool = False,
    since: float = 0.0,
) -> EvalReport:
    """Replay both drafts on the same traces, the oldest first; α of each, and the difference with
    its interval. Where the traffic has changed, on those since. `since`: when it did, where that is
    known."""
    both = replay_all(
        [candidate, base],
        traces,
        k,
        max_length=max_length,
        batch_size=batch_size,
        is_sampled=is_sampled,
    )
    start = sum(trace.finished_at < since for trace in traces)
    if not since and gate.judge_since_change:
        start = change_of(both[1], gate.min_holdout_traces)
    classes = _class_reports(traces, both[1], both[0], gate, seed, start)
    traces, is_since_R = traces[start:], np.arange(len(traces)) >= start
    counts_candidate, counts_base = (counts.of(is_since_R) for counts in both)
    diff_I = bootstrap_diff(
        counts_candidate, counts_base, gate.num_bootstrap, np.random.default_rng(seed)
    )
    alpha_candidate, alpha_base = counts_candidate.alpha or 0.0, counts_base.alpha or 0.0
    return EvalReport(
        sampled=None if is_sampled else if_sampled(candidate, traces, k, max_length, batch_size),
        num_traces=len(traces),
        num_tokens=sum(len(trace.output_ids) for trace in traces),
        k=k,
        alpha_base=alpha_base,
        alpha_candidate=alpha_candidate,
        alpha_base_per_pos=counts_base.alpha_per_pos,
        alpha_candidate_per_pos=counts_candidate.alpha_per_pos,
        diff=alpha_candidate - alpha_base,
        diff_low=float(np.quantile(diff_I, 1 - gate.confidence)),
        diff_high=float(np.quantile(diff_I, gate.confidence)),
        success_base=counts_base.success,
        success_candidate=counts_candidate.success,
        classes=classes,
        num_before=start,
    )


def change_of(base: ReplayCounts, least: int) -> int:
    """Index of the first trace since the traffic changed, `least` from either end at least; 0
    where it did not (`last_fall`)."""
    return last_fall(base.accepted_RG.sum(1), base.tested_RG.sum(1), least)


def if_sampled(
    model: Draft, traces: Sequence[Trace], k: int, max_length: int, batch_size: int
) -> tuple[float, float] | None:
    """(α, α if its tokens were drawn from the draft) of the newest traces above temperature 0 that
    have rows, which are the last; None where there are too few."""
    warm = [trace for trace in traces if trace.temperature >= GREEDY and trace.num_rows]
    newest = well_formed(warm, check_rows, model.vocab_size)[-NUM_IF_SAMPLED:]
    if len(newest) < NUM_IF_SAMPLED:
        return None
    now = replay_all([model], newest, k, max_length=max_length, batch_size=batch_size)
    (drawn,) = _with_sampled(now, [model], newest, max_length, batch_size)
    return now[0].alpha or 0.0, drawn.alpha or 0.0


def bootstrap_diff(
    candidate: ReplayCounts, base: ReplayCounts, num_bootstrap: int, rng: np.random.Generator
) -> np.ndarray:
    """float64 [I]; α candidate − α base over resampled requests, which are the same for both
    (paired percentile bootstrap).

    Whole requests are drawn with replacement, because the tokens of one request are not
    independent. The gate uses one side of the interval at a time: its `confidence` quantile is a
    one-sided bound (Efron and Tibshirani 1993, ch. 13).
    """
    num_traces = len(candidate.tested_RG)
    times_IR = rng.multinomial(num_traces, np.full(num_traces, 1 / num_traces), size=num_bootstrap)

    def alpha_I(counts: ReplayCounts) -> np.ndarray:
        return (times_IR @ counts.accepted_RG.sum(1)) / np.maximum(
            times_IR @ counts.tested_RG.sum(1), 1
        )

    return alpha_I(candidate) - alpha_I(base)


def least_diff(better: ReplayCounts, base: ReplayCounts, chance: float) -> float:
    """Lower bound of α better − α base, too high by `chance`: Student's t of the difference of two
    ratios, paired by request (Cochran 1977, ch. 6), which also holds for few; -inf of one."""
    if (num := len(base.tested_RG)) < 2:
        return -math.inf
    excess_R = np.zeros(num)
    for sign, counts in ((1, better), (-1, base)):
        accepted_R, tested_R = counts.accepted_RG.sum(1), counts.tested_RG.sum(1)
        excess_R += (
            sign * (accepted_R - (counts.alpha or 0.0) * tested_R) / (tested_R.mean() or 1.0)
        )
    error = math.sqrt(float(excess_R @ excess_R) / (num - 1) / num)
    diff = (better.alpha or 0.0) - (base.alpha or 0.0)
    return diff - float(stdtrit(num - 1, 1 - chance)) * error


def _class_reports(
    traces: Sequence[Trace],
    base: ReplayCounts,
    candidate: ReplayCounts,
    gate: GateConfig,
    seed: int,
    start: int,
) -> dict[str, ClassReport]:
    """Of those that are still served since `start`, on all of their traces: few of them may have
    come since."""
    classes = np.array(classes_of(traces, seed))
    num_since = Counter(classes[start:].tolist())
    least = max(2.0, (len(traces) - start) / SHARE_OF_CLASS) if start else 1
    found: dict[str, ClassReport] = {}
    for name in sorted(name for name, num in num_since.items() if num >= least):
        here = classes == name
        base_here, candidate_here = base.of(here), candidate.of(here)
        diff_I = bootstrap_diff(
            candidate_here, base_here, gate.num_bootstrap, np.random.default_rng(seed)
        )
        found[name] = ClassReport(
            num_traces=int(here.sum()),
            alpha_base=base_here.alpha or 0.0,
            alpha_candidate=candidate_here.alpha or 0.0,
            diff_high=float(np.quantile(diff_I, gate.confidence)),
            success_candidate=candidate_here.success,
        )
    return found


def is_match(model: Draft, trace: Trace, max_length: int) -> np.ndarray:
    """bool [G, T − 1]; whether what the draft proposes at depth g of a step is the served token,
    from the second output token on. A model proposes alike at all depths: G = 1."""
    return _matches([model], [trace], max_length)[0][0][0]


@torch.no_grad()
def _matches(
    models: Sequence[Draft], traces: list[Trace], max_length: int
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Per draft and trace, from the second output token on: whether what it proposes at depth g is
    the served token, bool [G, T − 1]; and whether its k-th likeliest is, bool [K, T − 1]."""
    first = models[0]
    max_length = min([max_length, *(model.max_length for model in models)])
    batch = collate_outputs(traces, max_length, first.vocab_size, packed=first.can_pack)
    batch = to_device(first.prepared(batch), next(first.parameters()).device)
    bounds = np.searchsorted(batch.trace_N.cpu().numpy(), np.arange(1, len(traces)))
    found = []
    for model in models:
        both = (ids == batch.label_ids_N for ids in model.proposals(batch))
        parts = (np.split(is_served.cpu().numpy(), bounds, axis=1) for is_served in both)
        found.append(list(zip(*parts, strict=True)))
    return found
