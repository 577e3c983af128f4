"""Counters of speculation in one worker, per draft version and domain, reported as windows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from msgspec.structs import replace

from osd.records import Counters, SpecWindow

LONGEST_GAP = 2.0
"""Seconds without a step beyond which idle time is not part of a window."""

MAX_DOMAINS = 64
"""Labels counted apart. Further ones count as unlabelled, so that clients cannot grow the counters
without bound."""
DOMAIN_SECONDS = 3600.0
"""Seconds after which a label that did not come again makes room for another."""


class _Tally:
    """Counters of an open window, and the lengths of its drafts."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.counters = Counters()
        self.num_accepted = [0] * (num_speculative_tokens + 1)
        """[G + 1]: drafts by their number of accepted tokens"""
        self.num_tested = [0] * (num_speculative_tokens + 1)
        """[G + 1]: drafts by their number of tested tokens"""

    def close(self, seconds: float) -> Counters:
        """The counters of the window, which lasted `seconds`."""
        return replace(
            self.counters,
            seconds=seconds,
            num_accepted_tokens_per_pos=_per_position(self.num_accepted),
            num_tested_per_pos=_per_position(self.num_tested),
        )


@dataclass(slots=True)
class WindowCounter:
    """Thread-safe. Draft tokens and accepted tokens of draft model and memory together equal vLLM's
    own counters. The counts per position leave out tokens beyond a request's end, which were not
    served."""

    num_speculative_tokens: int
    clock: Callable[[], float] = time.monotonic
    last_version: int = 0
    _tallies: dict[tuple[int, str], _Tally] = field(default_factory=dict)
    _domains: dict[str, float] = field(default_factory=dict)
    """label -> when it came last; the longest ago first"""
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
        is_memory: bool = False,
    ) -> None:
        """Count one request in one verification step. `num_drafts`, `num_accepted`: tokens that
        were verified, and that were accepted, of the memory where `is_memory`. `num_served`:
        emitted tokens that were served. Where `is_judged` is False, the counts per position, on
        which decisions rest, stay as they are."""
        with self._lock:
            self.last_version = version
            now = self.clock()
            if not self._tallies and now - self._since > LONGEST_GAP:
                self._since = now  # nothing ran since the last report: the window begins here
            tally = self._of(version, domain)
            counters = tally.counters
            counters.num_output_tokens += num_served
            counters.num_steps += 1
            num_cut = max(0, num_accepted - num_served)
            if is_memory:
                counters.num_memory_tokens += num_drafts
                counters.num_accepted_memory_tokens += num_accepted
                counters.num_cut_memory_tokens += num_cut
            elif num_drafts:
                counters.num_drafts += 1
                counters.num_draft_tokens += num_drafts
                counters.num_accepted_tokens += num_accepted
                counters.num_cut_draft_tokens += num_cut
            if num_drafts and is_judged and not is_memory:
                tally.num_tested[min(num_served, num_drafts)] += 1
                tally.num_accepted[min(num_served, num_accepted)] += 1

    def add_unverified(self, version: int, domain: str, num_drafts: int, num_accepted: int) -> None:
        """A draft that nobody verified, by what was served: it counts per position alone, on which
        decisions rest. Drafts are verified where they are best, so those alone would flatter."""
        with self._lock:
            tally = self._of(version, domain)
            tally.num_tested[min(num_accepted + 1, num_drafts)] += 1
            tally.num_accepted[num_accepted] += 1

    def add_finished(
        self, domain: str, decode_seconds: float, num_decode_tokens: int, is_captured: bool = True
    ) -> None:
        """A request ended: seconds from its first to its last token, and tokens after the first."""
        with self._lock:
            counters = self._of(self.last_version, domain).counters
            counters.num_finished += 1
            counters.num_captured += is_captured
            counters.decode_seconds += decode_seconds
            counters.num_decode_tokens += num_decode_tokens

    def take(self, replica: str, draft: str) -> list[SpecWindow]:
        """The windows since the last call; none where nothing happened. Counters start again at
        0."""
        with self._lock:
            now = self.clock()
            seconds, self._since = now - self._since, now
            tallies, self._tallies = self._tallies, {}
        at, k = time.time(), self.num_speculative_tokens
        return [
            SpecWindow.of(
                tally.close(seconds),
                at=at,
                replica=replica,
                draft=draft,
                version=version,
                domain=domain,
                k=k,
            )
            for (version, domain), tally in tallies.items()
        ]

    def _of(self, version: int, domain: str) -> _Tally:
        domain = self._admitted(domain)
        found = self._tallies.get((version, domain))
        if found is None:
            found = self._tallies[version, domain] = _Tally(self.num_speculative_tokens)
        return found

    def _admitted(self, domain: str) -> str:
        """The label under which this counts."""
        if not domain:
            return ""
        now = self.clock()
        is_known = self._domains.pop(domain, None) is not None
        if not is_known and len(self._domains) >= MAX_DOMAINS:
            oldest, came_at = next(iter(self._domains.items()))
            if now - came_at < DOMAIN_SECONDS:
                return ""
            del self._domains[oldest]
        self._domains[domain] = now
        return domain


def _per_position(num_of_length: Sequence[int]) -> list[int]:
    """[G]: drafts that reach each position, from the drafts of each length 0 to G."""
    return list(accumulate(reversed(num_of_length[1:])))[::-1]
