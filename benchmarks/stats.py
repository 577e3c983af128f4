"""Statistics of paired measurements: medians with bootstrap intervals. Needs only numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and its 95 % bootstrap interval from `n` observations.

    Example:
        Estimate(value=0.99, low=0.98, high=1.01, n=40)
    """

    value: float
    low: float
    high: float
    n: int


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Median of `numerators[i] / denominators[i]`, resampled by pair. Raises `ValueError` without
    pairs."""
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if above.shape != below.shape or not above.size:
        raise ValueError(f"{above.size} numerators and {below.size} denominators are no pairs")
    return estimate(above / below)


def estimate(
    values: Sequence[float] | np.ndarray, statistic: Callable[..., np.ndarray] = np.median
) -> Estimate:
    """`statistic(values)` and the percentile interval of resamples; the same values give the same
    interval.

    `statistic` takes an array and `axis`. Raises `ValueError` without values.
    """
    observed = np.asarray(values, float)
    if not observed.size:
        raise ValueError("no values to estimate from")
    rng = np.random.default_rng(0)
    # A chunk at a time: thousands of gaps times thousands of resamples would not fit in memory.
    per_chunk = max(1, 2_000_000 // observed.size)
    found: list[np.ndarray] = []
    for start in range(0, NUM_RESAMPLES, per_chunk):
        chosen = rng.integers(
            0, observed.size, (min(per_chunk, NUM_RESAMPLES - start), observed.size)
        )
        found.append(statistic(observed[chosen], axis=1))
    low, high = np.quantile(np.concatenate(found), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(
        value=float(statistic(observed, axis=0)), low=float(low), high=float(high), n=observed.size
    )


def estimate_mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean, with its interval."""
    return estimate(values, np.mean)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of the values does not exceed: of 12 values, p99
    is the largest."""
    return float(np.quantile(np.asarray(values, float), q, method="inverted_cdf"))


def hierarchical(
    values: Sequence[Sequence[float]], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Ends of the bootstrap interval of a mean over models and, within each, over traffic:
    `values[model][traffic]`. Models are drawn first, then traffic of each (Davison & Hinkley,
    1997, section 3.8). Raises `ValueError` without two of both."""
    if len(values) < 2 or min(map(len, values)) < 2:
        raise ValueError(f"{[len(one) for one in values]} values per model say nothing of chance")
    found_R = _weights(tuple(map(len, values))) @ np.concatenate(values)
    low, high = np.quantile(found_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@lru_cache(maxsize=8)
def _weights(lengths: tuple[int, ...]) -> np.ndarray:
    """[resamples, values]: what each value counts in the mean of each resample, of so many values
    per model. A table asks for the same ones again and again."""
    rng, starts = np.random.default_rng(0), np.cumsum((0, *lengths))
    weights_RV = np.zeros((NUM_RESAMPLES, starts[-1]))
    for weights_V in weights_RV:
        for model in rng.integers(0, len(lengths), len(lengths)):
            drawn = starts[model] + rng.integers(0, lengths[model], lengths[model])
            np.add.at(weights_V, drawn, 1 / (len(lengths) * lengths[model]))
    return weights_RV
