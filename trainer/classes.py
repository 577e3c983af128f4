"""Classes of traffic: the label a client gave, or a cluster of unlabelled prompts; and where the
traffic has changed.

A draft that is better overall may be worse on one kind of request, so the gate looks at each class.
Unlabelled prompts are clustered by the rare tokens they share: tf-idf over bags of tokens, then
k-means (scipy).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.cluster.vq import kmeans2

from osd.records import Trace

MAX_CLUSTERS = 4
MIN_PER_CLUSTER = 12
"""Unlabelled prompts per cluster on average. Fewer are too few to measure a class."""
NUM_BUCKETS = 1024
"""Tokens are hashed into this many buckets."""
SURE, LEAST_FALL, LEAST_SIDE = 4.5, 0.05, 8
"""Standard errors, and α, by which a draft must be worse on the newest traces for the traffic to
have changed, and traces of before and since that it takes. It is asked of every place between two
of them: of mixtures that stay, 64 traces each, at most 2 % seem to have changed (simulated), and 8
traces on which α is 0.2 in place of 0.8 are found."""


def classes_of(traces: Sequence[Trace], seed: int = 0) -> list[str]:
    """The class of each trace: its label, or "unlabelled 1", "unlabelled 2", ... with the largest
    cluster first.

    Example:
        classes_of([labelled_sql, chat, chat])  -> ["sql", "unlabelled 1", "unlabelled 1"]
    """
    unlabelled = [index for index, trace in enumerate(traces) if not trace.domain]
    found = [trace.domain for trace in traces]
    for index, cluster in zip(
        unlabelled, _clusters([traces[i] for i in unlabelled], seed), strict=True
    ):
        found[index] = f"unlabelled {cluster + 1}"
    return found


def _clusters(traces: Sequence[Trace], seed: int) -> list[int]:
    num_clusters = min(MAX_CLUSTERS, len(traces) // MIN_PER_CLUSTER)
    if num_clusters < 2:
        return [0] * len(traces)
    vectors = _vectors(traces)
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cluster stays empty when all prompts are alike
        _, labels = kmeans2(vectors, num_clusters, minit="++", rng=rng)
    sizes = np.bincount(labels, minlength=num_clusters)
    rank = np.empty(num_clusters, np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(num_clusters)
    return rank[labels].tolist()


def _vectors(traces: Sequence[Trace]) -> np.ndarray:
    """float64 [R, NUM_BUCKETS], each of length 1; a prompt has length 0 when all prompts share all
    of its tokens."""
    counts = np.stack(
        [np.bincount(t.prompt_ids % NUM_BUCKETS, minlength=NUM_BUCKETS) for t in traces]
    )
    rarity = np.log(len(traces) / np.maximum((counts > 0).sum(0), 1))
    vectors = np.sqrt(counts) * rarity
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def last_fall(accepted_R: np.ndarray, tested_R: np.ndarray, least: int) -> int:
    """Index of the first trace after the traffic changed: there a draft is worse than on the traces
    before, `least` of each at least, and beyond doubt; 0 where it is nowhere. Of several such
    places it is the clearest. [R]: draft tokens that were accepted and tested, the oldest trace
    first."""
    index_N = np.flatnonzero(tested_R > 0)  # what tested nothing says nothing
    accepted_N, tested_N = accepted_R[index_N], tested_R[index_N]
    found, surest, least = 0, SURE, max(least, LEAST_SIDE)
    for start in range(least, len(index_N) - least + 1):
        before = _mean(accepted_N[:start], tested_N[:start])
        since = _mean(accepted_N[start:], tested_N[start:])
        # Of few the variance may be small by chance.
        variance = max(before.variance, since.variance)
        error = float(np.sqrt(variance * (before.weight + since.weight)))
        fall = before.alpha - since.alpha
        if fall > max(LEAST_FALL, surest * error):
            found, surest = int(index_N[start]), fall / max(error, 1e-9)
    return found


class _Mean(NamedTuple):
    """α of some traces, by whole requests (ratio estimator; Cochran 1977, ch. 6)."""

    alpha: float
    variance: float
    """Of the tokens that a trace accepts beyond its share."""
    weight: float
    """Variance of `alpha`, for a `variance` of 1."""


def _mean(accepted_N: np.ndarray, tested_N: np.ndarray) -> _Mean:
    tested = float(tested_N.sum())
    alpha = float(accepted_N.sum()) / tested
    left_N = accepted_N - alpha * tested_N
    return _Mean(alpha, float(left_N @ left_N) / (len(left_N) - 1), len(left_N) / tested**2)
