"""Speculation counters of one worker: added up per draft version and domain, handed out as windows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from osd.records import SpecWindow

LONGEST_GAP = 2.0
"""Seconds without a step after which idle time no longer counts as part of a window."""

MAX_DOMAINS = 64
"""Labels counted apart; further ones count as unlabelled, so that clients cannot grow the counters without bound."""


@dataclass(slots=True)
class _Counts:
    num_accepted: list[int]
    """[G + 1]: drafts of which so many tokens were accepted"""
    num_tested: list[int]
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_captured: int = 0
    decode_seconds: float = 0.0
    num_decode_tokens: int = 0


@dataclass(slots=True)
class WindowCounter:
    """Thread-safe. `num_drafts`, `num_draft_tokens` and `num_accepted_tokens` equal vLLM's own counters; the counts per
    position leave out what was verified beyond a request's end, since nobody was served it."""

    num_speculative_tokens: int
    clock: Callable[[], float] = time.monotonic
    last_version: int = 0
    _counts: dict[tuple[int, str], _Counts] = field(default_factory=dict)
    _domains: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def add_step(
        self,
        version: int,
        domain: str,
        num_drafts: int,
        num_accepted: int,
        num_served: int,
        is_judged: bool = True,
    ) -> None:
        """One request in one verification step: tokens drafted, accepted, and emitted tokens that were served.
        What is not judged does not enter the counts per position, on which decisions rest."""
        with self._lock:
            self.last_version = version
            now = self.clock()
            if not self._counts and now - self._since > LONGEST_GAP:
                self._since = now  # nothing ran since the last report: the window begins here
            counts = self._of(version, domain)
            counts.num_output_tokens += num_served
            counts.num_steps += 1
            if num_drafts:
                counts.num_drafts += 1
                counts.num_draft_tokens += num_drafts
                counts.num_accepted_tokens += num_accepted
            if num_drafts and is_judged:
                counts.num_tested[min(num_served, num_drafts)] += 1
                counts.num_accepted[min(num_served, num_accepted)] += 1

    def add_finished(
        self, domain: str, decode_seconds: float, num_decode_tokens: int, is_captured: bool = True
    ) -> None:
        """A request ended: seconds from its first to its last token, and tokens after the first."""
        with self._lock:
            counts = self._of(self.last_version, domain)
            counts.num_finished += 1
            counts.num_captured += is_captured
            counts.decode_seconds += decode_seconds
            counts.num_decode_tokens += num_decode_tokens

    def take(self, replica: str, draft: str) -> list[SpecWindow]:
        """Windows since the last call; the counters start again at zero. Nothing happened = no windows."""
        with self._lock:
            now = self.clock()
            seconds, self._since = now - self._since, now
            counts, self._counts = self._counts, {}
        at = time.time()
        return [
            SpecWindow(
                at=at,
                replica=replica,
                draft=draft,
                version=version,
                domain=domain,
                seconds=seconds,
                k=self.num_speculative_tokens,
                num_steps=c.num_steps,
                num_drafts=c.num_drafts,
                num_draft_tokens=c.num_draft_tokens,
                num_accepted_tokens=c.num_accepted_tokens,
                num_accepted_tokens_per_pos=_per_place(c.num_accepted),
                num_tested_per_pos=_per_place(c.num_tested),
                num_output_tokens=c.num_output_tokens,
                num_finished=c.num_finished,
                num_captured=c.num_captured,
                decode_seconds=c.decode_seconds,
                num_decode_tokens=c.num_decode_tokens,
            )
            for (version, domain), c in counts.items()
        ]

    def _of(self, version: int, domain: str) -> _Counts:
        if domain not in self._domains:
            if len(self._domains) >= MAX_DOMAINS:
                domain = ""
            self._domains.add(domain)
        found = self._counts.get((version, domain))
        if found is None:
            zeros = [0] * (self.num_speculative_tokens + 1)
            found = self._counts[version, domain] = _Counts(zeros, zeros.copy())
        return found


def _per_place(num_of_length: Sequence[int]) -> tuple[int, ...]:
    """[G]: how many reach each place, from how many are of each length 0 to G."""
    return tuple(accumulate(reversed(num_of_length[1:])))[::-1]
