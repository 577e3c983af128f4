"""How the draft fares where the memory finds much, and where it finds little.

Text that was seen before is easy for both. Whoever compared what the memory finds now with what the
draft is accepted in the mean would choose the memory where the draft is even better. So it is
counted how many tokens of the draft are accepted, of those that were expected of it, by what the
memory found beside it. Drafts that nobody verified count too (`unverified.py`), or the counts
would hold only what was chosen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

EDGES = np.array([0.25, 0.75, 1.5, 2.5, 4.0, 6.0])
"""Tokens the memory expects to be accepted, which part the kinds of look-ups."""
PRIOR_WEIGHT = 8.0
"""Tokens expected of the draft, that a ratio of 1 counts as."""
KEEP = 0.995
"""Weight that the evidence of a kind keeps after one more draft."""

NUM_RECENT, NUM_USUAL = 48, 512
"""Look-ups that are now, and those that they are held against."""
CHANGE, MIN_VARIANCE = 3.0, 0.1
"""Standard errors that make a change, and the least variance that these are of."""


def kind_of(found: np.ndarray) -> np.ndarray:
    """The kind of look-ups that found so many tokens."""
    return np.asarray(np.searchsorted(EDGES, found, "right"))


class Hybrid:
    """One per engine."""

    def __init__(self) -> None:
        num = len(EDGES) + 1
        self._expected, self._accepted = np.zeros(num), np.zeros(num)

    def add(self, found: float, expected: float, accepted: float) -> None:
        """Beside a look-up that found so many tokens, so many of the draft were accepted."""
        kind = _kind(found)
        for counts, value in ((self._expected, expected), (self._accepted, accepted)):
            counts[kind] = counts[kind] * KEEP + value

    def ratio(self, found: np.ndarray) -> np.ndarray:
        """How many tokens of the draft are accepted beside such look-ups, over how many are
        expected of it."""
        return np.asarray(self._ratios()[kind_of(found)])

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of each kind of look-up."""
        return tuple(self._ratios().tolist())

    def _ratios(self) -> np.ndarray:
        return (self._accepted + PRIOR_WEIGHT) / (self._expected + PRIOR_WEIGHT)

    def ratio_beside(self, found: float) -> float:
        """`ratio` of one look-up."""
        kind = _kind(found)
        accepted, expected = float(self._accepted[kind]), float(self._expected[kind])
        return (accepted + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT)

    def restart(self) -> None:
        """Another draft serves."""
        self._expected[:] = self._accepted[:] = 0.0


def _kind(found: float) -> int:
    return int(EDGES.searchsorted(found, "right"))


class CalibrationSlope:
    """How much more is accepted of a request's draft for each token that is estimated more of it
    than of the usual one. Of few tests, estimates differ by chance, too, and whoever chose by them
    as they are would choose the draft where it is overestimated. One for each draft."""

    def __init__(self) -> None:
        self._num, self._usual_G, self._usual = 0, np.zeros(1), list[float]()
        """estimates so far, their mean survival, and the tokens that a draft of each length gets"""
        self._expected = self._accepted = 0.0
        """least squares: what is accepted more, by what is expected more"""

    def believed(self, survival_BG: np.ndarray) -> np.ndarray:
        """float [B, G]: the estimated survival of drafts, as near to the usual one as it turned out
        to be."""
        if not len(survival_BG):
            return survival_BG
        self._num += 1
        share = max(1 / self._num, 1 - KEEP)
        self._usual_G = self._usual_G + share * (survival_BG.mean(0) - self._usual_G)
        self._usual = np.cumsum(self._usual_G).tolist()
        return np.asarray(self._usual_G + self.slope * (survival_BG - self._usual_G))

    @property
    def slope(self) -> float:
        """0: all requests are alike. 1, as before anything is known: they differ as estimated."""
        return min((max(self._accepted, 0.0) + PRIOR_WEIGHT) / (self._expected + PRIOR_WEIGHT), 1.0)

    def add(
        self, expected: Sequence[float], num_drafted: int, accepted: float, ratio: float
    ) -> None:
        """So many tokens of a draft were accepted. `expected`: tokens estimated of a draft of each
        length; `ratio`: that of the look-up beside it (`Hybrid`)."""
        usual = self._usual[num_drafted - 1]
        more = ratio * (expected[num_drafted - 1] - usual)
        self._expected = KEEP * self._expected + more * more
        self._accepted = KEEP * self._accepted + more * (accepted - ratio * usual)


class Level:
    """Notices when look-ups find more or less than they used to: the traffic has changed, and a
    draft that is not used may be good for it."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque([0.0] * NUM_RECENT)
        self._sum = 0.0
        self._num, self._mean, self._variance = 0, 0.0, 0.0

    def add(self, found: float) -> bool:
        """A look-up found so many tokens. Whether that is a change; it is told of once."""
        self._recent.append(found)
        self._sum += found - self._recent.popleft()
        self._num += 1
        share = max(1 / self._num, 1 / NUM_USUAL)
        off = found - self._mean
        self._mean += share * off
        self._variance = (1 - share) * (self._variance + share * off * off)
        if self._num < 2 * NUM_RECENT:
            return False
        now = self._sum / NUM_RECENT
        usual = math.sqrt(max(self._variance, MIN_VARIANCE) / NUM_RECENT)
        if abs(now - self._mean) < CHANGE * usual:
            return False
        self._num, self._mean = NUM_RECENT, now
        return True
