"""Classes of traffic: the label a client gave, or a cluster of unlabelled prompts.

A draft that is better overall may be worse on one kind of request, so the gate looks at each class.
Unlabelled prompts are clustered by the rare tokens they share: tf-idf over bags of tokens, then
k-means (scipy).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.cluster.vq import kmeans2

from osd.records import Trace

MAX_CLUSTERS = 4
MIN_PER_CLUSTER = 12
"""Unlabelled prompts per cluster on average. Fewer are too few to measure a class."""
NUM_BUCKETS = 1024
"""Tokens are hashed into this many buckets."""


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
