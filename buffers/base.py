"""What a replay buffer promises, and the rules every implementation shares.

serving ─ put ─► [training stream per domain]  ─ read (new, by cursor), sample (old, per domain) ─► trainer ─┐
                 [held-out stream per domain]  ─ holdout ─► gate                                              │
                 [anchors, by slot]  ◄─ set_anchors, anchors ─────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from osd.records import HOLDOUT_ONE_IN, BufferStats, Trace

Cursor = dict[str, int]
"""Domain -> id of the last trace read from it; {} = from the start. Plain JSON: part of the trainer's checkpoint."""

MIN_HOLDOUT_CAPACITY = 64


class TraceBuffer(Protocol):
    """A bounded store of the newest traces of one draft and one target. Thread-safe; every call is synchronous.

    Traces are kept per domain, at most `max_traces` training ones each; the oldest leave first. Held-out traces
    (`Trace.is_holdout`) live apart, and only `holdout` returns them. A trace is stored under its cleaned domain
    (`osd.records.clean_domain`), or under "" once `max_domains` other labels are taken.

    All but `put` and `dropped` raise `ReplayBufferError` when the server cannot be reached. Stored entries that
    cannot be decoded are skipped and counted ("schema": another version, "corrupt": anything else).
    """

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> traces this client could not store or read. Never asks the server.

        "redis" unreachable or too slow, "memory" server out of memory, "mismatch" of another draft or target,
        "invalid" not encodable, "schema" and "corrupt" unreadable.
        """

    def put(self, traces: Sequence[Trace]) -> int:
        """Store traces, in order; return how many were stored. Never raises for trouble with server or trace."""

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Trace], Cursor]:
        """At most `limit` training traces newer than the cursor over all domains, oldest first, and the new cursor.

        Within a domain the order is that of arrival; domains are merged by `finished_at`.
        """

    def skip_to_newest(self, cursor: Cursor, keep: int) -> Cursor:
        """The cursor moved on so that at most `keep` traces, the newest, are still unread."""

    def num_unread(self, cursor: Cursor) -> int:
        """Training traces newer than the cursor."""

    def sample(self, n: int, rng: np.random.Generator, cursor: Cursor, *, since: Cursor | None = None) -> list[Trace]:
        """`n` different training traces at or before the cursor, and after `since` where that is given; fewer when
        there are fewer. Every domain gives as many as the others while it has them; within one, all are equally likely.

        The same `rng` state and content give the same traces.
        """

    def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
        """Keep each trace in its numbered slot, apart from the streams: until it is replaced, or all are purged. None
        empties a slot."""

    def anchors(self, slots: Sequence[int]) -> list[Trace]:
        """What stands in these slots; empty or unreadable ones are left out."""

    def holdout(self, n: int) -> list[Trace]:
        """The newest `n` held-out traces of all domains by `finished_at`, newest last."""

    def stats(self) -> BufferStats:
        """What is stored, over all domains, and what this client dropped."""

    def purge(self, *, domain: str | None = None, before: float | None = None, all_targets: bool = False) -> int:
        """Delete every trace; return how many. Cursors made before stay valid: ids are never given twice.

        `domain`: only that one's ("" = unlabelled). `before`: only those finished before that time, and what arrived
        before the last of them. `all_targets`: also what this deployment has of other targets. Anchors go by the same
        rule, and are not counted.
        """

    def close(self) -> None:
        """Release connections. What is stored stays."""


def in_domain(trace: Trace, domain: str) -> Trace:
    """The trace under the domain it is stored in."""
    return trace if trace.domain == domain else replace(trace, domain=domain)


def holdout_capacity(max_traces: int) -> int:
    """Held-out traces kept per domain beside `max_traces` training ones."""
    return max(max_traces // HOLDOUT_ONE_IN, MIN_HOLDOUT_CAPACITY)
