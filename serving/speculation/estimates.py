"""How likely each request's next draft tokens are to be accepted, estimated from tested tokens.

The token at position j of a draft is tested when the j tokens before it were accepted; tokens
behind a rejection show nothing. An estimate with few tests is shrunk towards a wider one:

    request ──► domain ──► everything ──► position j - 1 ──► ... ──► what the release predicted

Each finished request counts once for its class. Counted by steps, the class would resemble the
requests that stay longest, which are those with the lowest acceptance.

Legend: B requests of a step, G positions in a draft, S slots (running requests), D domains.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

MEMORY = 0.98
"""Weight that a request's evidence keeps after one more test."""
FADING = 0.997
"""Weight that it keeps after a step without a test: evidence on an unused draft grows old."""
MIN_WEIGHT, MAX_WEIGHT = 4.0, 60.0
"""Tests after which a request's own evidence weighs half: few where requests differ, many where
they are alike."""
MAX_FINISHED = 64
"""Newest finished requests that show how much requests differ."""
DOMAIN_WEIGHT = 20.0
GLOBAL_WEIGHT = 2.0
MAX_SHARE = 20.0
"""Tests that one finished request may add to its class."""
CLASS_MEMORY = 400.0
"""Tests a class remembers."""
UNKNOWN = 0.7
"""Conditional acceptance assumed of an unknown draft: high enough to try it."""
MAX_DOMAINS = 64
KEPT_OF_WATCH = 0.96
"""Weight that watched tests keep after one more."""
MIN_WATCHED, MIN_VARIANCE, SURPRISING = 12.0, 1.0, 4.0
"""Tests, variance and standard deviations that make a surprise."""


class Acceptance:
    """Conditional acceptance α at each position, per request. `open` gives each request a
    slot."""

    def __init__(self, num_positions: int, predicted: float = UNKNOWN) -> None:
        self._G = num_positions
        self._position_G = np.arange(num_positions)
        self._free: list[int] = []
        nothing = np.zeros((0, num_positions))
        self._tested_SG, self._accepted_SG = nothing, nothing
        """recent evidence of each request"""
        self._all_tested_SG, self._all_accepted_SG = nothing, nothing
        """all its evidence"""
        self._domain_S = np.zeros(0, np.int64)
        self._grow(16)
        self._domains: dict[str, int] = {"": 0}
        self._tested_DG = np.zeros((MAX_DOMAINS, num_positions))
        self._accepted_DG = np.zeros((MAX_DOMAINS, num_positions))
        self._tested_G = np.zeros(num_positions)
        self._accepted_G = np.zeros(num_positions)
        self._predicted = predicted
        self._weight = MIN_WEIGHT
        self._finished: deque[tuple[float, float]] = deque(maxlen=MAX_FINISHED)
        """acceptance and tests of finished requests"""
        self._prior_DG = np.empty((MAX_DOMAINS, num_positions))
        self._update_priors()

    # -- requests come and go ---------------------------------------------------------------------

    def open(self, domain: str) -> int:
        """A slot for a request."""
        if not self._free:
            self._grow(2 * len(self._tested_SG))
        slot = self._free.pop()
        self._domain_S[slot] = self._domain(domain)
        for counts in (
            self._tested_SG,
            self._accepted_SG,
            self._all_tested_SG,
            self._all_accepted_SG,
        ):
            counts[slot] = 0
        return slot

    def close(self, slot: int) -> float:
        """The request has ended, and its class learns from it. Returns its acceptance, NaN if it
        was never tested."""
        tested_G, accepted_G = self._all_tested_SG[slot], self._all_accepted_SG[slot]
        self._free.append(slot)
        if not tested_G[0]:
            return float("nan")
        num_counted = min(tested_G[0], MAX_SHARE)
        share, keep = num_counted / tested_G[0], 1 - num_counted / CLASS_MEMORY
        d = self._domain_S[slot]
        for tested, accepted in (
            (self._tested_DG[d], self._accepted_DG[d]),
            (self._tested_G, self._accepted_G),
        ):
            tested[:] = tested * keep + tested_G * share
            accepted[:] = accepted * keep + accepted_G * share
        self._update_priors()
        acceptance, num_tests = float(accepted_G.sum() / tested_G.sum()), float(tested_G.sum())
        self._finished.append((acceptance, num_tests))
        self._update_weight()
        return acceptance

    # -- evidence ---------------------------------------------------------------------------------

    def add(self, slot_B: np.ndarray, drafted_B: np.ndarray, accepted_B: np.ndarray) -> None:
        """Add one verification step. The evidence of requests without drafts only fades."""
        if not drafted_B.any():
            return self.fade(slot_B)
        tested_BG = self._position_G < np.minimum(drafted_B, accepted_B + 1)[:, None]
        accepted_BG = self._position_G < accepted_B[:, None]
        fade_BG = np.where(tested_BG, MEMORY, FADING)
        self._tested_SG[slot_B] = self._tested_SG[slot_B] * fade_BG + tested_BG
        self._accepted_SG[slot_B] = self._accepted_SG[slot_B] * fade_BG + accepted_BG
        self._all_tested_SG[slot_B] += tested_BG
        self._all_accepted_SG[slot_B] += accepted_BG

    def fade(self, slot_B: np.ndarray) -> None:
        """Add a step in which nothing of these requests was drafted."""
        self._tested_SG[slot_B] *= FADING
        self._accepted_SG[slot_B] *= FADING

    def restart(self, slots: Sequence[int], predicted: float | None) -> None:
        """Forget all evidence: another draft serves, or the draft has changed. `predicted`: its
        conditional acceptance as measured elsewhere; None = unknown."""
        self._predicted = UNKNOWN if predicted is None else predicted
        for counts in (self._tested_DG, self._accepted_DG, self._tested_G, self._accepted_G):
            counts[:] = 0
        for counts_SG in (
            self._tested_SG,
            self._accepted_SG,
            self._all_tested_SG,
            self._all_accepted_SG,
        ):
            counts_SG[list(slots)] = 0
        self._finished.clear()
        self._weight = MIN_WEIGHT
        self._update_priors()

    # -- estimates --------------------------------------------------------------------------------

    def survival(self, slot_B: np.ndarray) -> np.ndarray:
        """float [B, G]: probability that a request's draft is accepted up to and including each
        position."""
        prior_BG = self._prior_DG[self._domain_S[slot_B]]
        tested_BG, accepted_BG = self._tested_SG[slot_B], self._accepted_SG[slot_B]
        # A request that beat its class where it was tested is assumed to beat it elsewhere too.
        expected_B = (tested_BG * prior_BG).sum(1) + self._weight * prior_BG[:, 0]
        better_B = (accepted_BG.sum(1) + self._weight * prior_BG[:, 0]) / np.maximum(
            expected_B, 1e-9
        )
        prior_BG = np.minimum(
            prior_BG * better_B[:, None], 1 - (1 - prior_BG) / np.maximum(better_B, 1.0)[:, None]
        )
        alpha_BG = (accepted_BG + self._weight * prior_BG) / (tested_BG + self._weight)
        return np.cumprod(alpha_BG, 1)

    # -- inside -----------------------------------------------------------------------------------

    def _domain(self, name: str) -> int:
        if name not in self._domains and len(self._domains) < MAX_DOMAINS:
            self._domains[name] = len(self._domains)
        return self._domains.get(name, 0)

    def _update_priors(self) -> None:
        shrunk = self._predicted
        for j in range(self._G):
            shrunk = (self._accepted_G[j] + GLOBAL_WEIGHT * shrunk) / (
                self._tested_G[j] + GLOBAL_WEIGHT
            )
            self._prior_DG[:, j] = (self._accepted_DG[:, j] + DOMAIN_WEIGHT * shrunk) / (
                self._tested_DG[:, j] + DOMAIN_WEIGHT
            )

    def _update_weight(self) -> None:
        """Empirical Bayes: the chance variance of one test over the variance among requests beyond
        chance."""
        if len(self._finished) < 4:
            return
        acceptance, tests = np.array(self._finished).T
        mean = float((acceptance * tests).sum() / tests.sum())
        chance = mean * (1 - mean)
        beyond = float(((acceptance - mean) ** 2).mean()) - chance * float((1 / tests).mean())
        self._weight = float(np.clip(chance / max(beyond, 1e-6), MIN_WEIGHT, MAX_WEIGHT))

    def _grow(self, size: int) -> None:
        old = len(self._domain_S)
        more_SG = np.zeros((size - old, self._G))
        for name in ("_tested_SG", "_accepted_SG", "_all_tested_SG", "_all_accepted_SG"):
            setattr(self, name, np.concatenate([getattr(self, name), more_SG]))
        self._domain_S = np.concatenate([self._domain_S, np.zeros(size - old, np.int64)])
        self._free += range(old, size)


class Watch:
    """Notices when first tokens of the draft are accepted far more or less often than expected of
    their requests: the traffic has changed, and what was learnt of other traffic delays what is to
    be learnt."""

    def __init__(self) -> None:
        self._off = self._variance = self._tested = self._accepted = 0.0

    def add(self, expected: float, is_accepted: bool) -> float | None:
        """The acceptance found lately, where it is a surprise; nothing is remembered then."""
        self._off = KEPT_OF_WATCH * self._off + is_accepted - expected
        self._variance = KEPT_OF_WATCH**2 * self._variance + expected * (1 - expected)
        self._tested = KEPT_OF_WATCH * self._tested + 1
        self._accepted = KEPT_OF_WATCH * self._accepted + is_accepted
        deviation = math.sqrt(max(self._variance, MIN_VARIANCE))
        if self._tested < MIN_WATCHED or abs(self._off) < SURPRISING * deviation:
            return None
        found = (self._accepted + 1) / (self._tested + 2)
        self._off = self._variance = self._tested = self._accepted = 0.0
        return found
