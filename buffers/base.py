"""The interface of a replay buffer, and the rules that all implementations share.

serving ─ put ─┬─► training stream per domain ─ read (new), sample (old) ─► trainer
               └─► held-out stream per domain ─ holdout ──────────────────► evaluator
                   anchors, by slot ◄──── set_anchors, anchors ───────────► trainer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from osd.records import HOLDOUT_ONE_IN, BufferStats, Trace

Cursor = dict[str, int]
"""Domain -> id of the last trace read from it; {} = from the start. Plain JSON, because it is part
of the trainer's checkpoint."""

MIN_HOLDOUT_CAPACITY = 64


class TraceBuffer(Protocol):
    """A bounded store of the newest traces of one draft and one target. Thread-safe; every call is
    synchronous.

    Each domain keeps at most `max_traces` training traces and drops the oldest first. Held-out
    traces (`Trace.is_holdout`) are stored apart, and only `holdout` returns them. A trace is stored
    under its cleaned domain (`osd.records.clean_domain`), or under "" once `max_domains` other
    labels exist.

    Where the clock of who puts a trace is wrong, `finished_at` is by the server's.

    All methods except `put` and `dropped` raise `ReplayBufferError` when the server cannot be
    reached. Stored entries that cannot be decoded are skipped and counted.
    """

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> traces that this client could not store or read. Never asks the server.

        "redis": server unreachable or too slow; "memory": server out of memory; "mismatch": trace
        of another draft or target; "invalid": trace cannot be encoded; "schema": stored entry of
        another schema version; "corrupt": stored entry that cannot be decoded otherwise.
        """

    def put(self, traces: Sequence[Trace]) -> int:
        """Store traces in order; return how many were stored. Counts what it cannot store as
        dropped, and never raises for it."""

    def read(self, cursor: Cursor, limit: int) -> tuple[list[Trace], Cursor]:
        """At most `limit` training traces after the cursor, over all domains, oldest first; and the
        new cursor.

        Traces of a domain come in order of arrival; domains are merged by `finished_at`.
        """

    def skip_to_newest(self, cursor: Cursor, keep: int) -> Cursor:
        """The cursor moved forward so that only the newest `keep` traces are unread, or fewer."""

    def num_unread(self, cursor: Cursor) -> int:
        """Number of training traces after the cursor."""

    def sample(
        self, n: int, rng: np.random.Generator, cursor: Cursor, *, since: Cursor | None = None
    ) -> list[Trace]:
        """`n` different training traces at or before the cursor, and after `since` if given; fewer
        when there are fewer. All domains give equally many as long as they have them; within a
        domain all traces are equally likely.

        The same state of `rng` and the same content give the same traces.
        """

    def set_anchors(self, anchors: Mapping[int, Trace | None]) -> None:
        """Keep each trace in its numbered slot, apart from the streams, until it is replaced or
        purged. None empties a slot."""

    def anchors(self, slots: Sequence[int]) -> list[Trace]:
        """The traces in these slots, without empty and unreadable slots."""

    def holdout(self, n: int) -> list[Trace]:
        """The newest `n` held-out traces of all domains by `finished_at`, newest last."""

    def stats(self) -> BufferStats:
        """What is stored over all domains, and what this client dropped."""

    def purge(
        self, *, domain: str | None = None, before: float | None = None, all_targets: bool = False
    ) -> int:
        """Delete all traces and anchors, or those that the arguments choose; return the number of
        traces. Earlier cursors stay valid, because ids are never reused.

        `domain`: only traces of this domain ("" = unlabelled). `before`: only traces that finished
        before this time, and those that arrived before the last of them. `all_targets`: also the
        traces of this deployment's other targets.
        """

    def close(self) -> None:
        """Release connections. Stored traces stay."""


def in_domain(trace: Trace, domain: str) -> Trace:
    """The trace, labelled with the domain that it is stored under."""
    return trace if trace.domain == domain else replace(trace, domain=domain)


def holdout_capacity(max_traces: int) -> int:
    """Held-out traces that a domain keeps beside `max_traces` training traces."""
    return max(max_traces // HOLDOUT_ONE_IN, MIN_HOLDOUT_CAPACITY)
