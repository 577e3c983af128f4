"""What the controller asks of its parts. They never hold the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from osd.exchange.registry import FeedRecord
from osd.records import (
    BufferStats,
    Canary,
    DraftRelease,
    EarlierReport,
    EngineTerms,
    Member,
    ReplicaStatus,
    RoundOutcome,
    RoundSize,
)

Tell = Callable[..., Awaitable[None]]
"""Appends records to the feed; never fails."""


class Trainer(Protocol):
    """The trainer's methods, awaited. Any exception means "try again"; `AwayError`, that its
    process or machine is gone."""

    async def machine(self) -> str:
        """Name of the machine it runs on."""
        ...

    async def why_silent(self) -> str:
        """What is known of why it does not answer; "" where nothing is. It is not asked itself."""
        ...

    async def num_new_traces(self) -> int: ...
    async def run_round(self, base: DraftRelease, line: int, size: RoundSize) -> RoundOutcome: ...
    async def candidate(self, outcome: RoundOutcome) -> str:
        """The directory of a round's candidate, on this machine."""
        ...

    async def evaluate_releases(
        self, versions: list[DraftRelease], num_traces: int
    ) -> dict[int, float]: ...
    async def compare_earlier(
        self, base: DraftRelease, earlier: list[DraftRelease], num_traces: int
    ) -> list[EarlierReport]: ...


class Wishes(Protocol):
    """The wanted release, in `osd.exchange.registry.Registry`."""

    def wanted(self, draft: str = "default") -> DraftRelease | None: ...
    def set_wanted(self, release: DraftRelease) -> None: ...
    def canary(self, draft: str = "default") -> Canary | None: ...
    def set_canary(self, canary: Canary | None, draft: str = "default") -> None: ...


class Terms(Protocol):
    """What attached engines are told, in `osd.exchange.registry.Registry`."""

    def terms(self) -> EngineTerms | None: ...
    def set_terms(self, terms: EngineTerms) -> None: ...


class Feed(Wishes, Terms, Protocol):
    """All that is used of `osd.exchange.registry.Registry`."""

    def read(self, after: str = "0", count: int = 1000) -> list[tuple[str, FeedRecord]]: ...
    def newest(self) -> str: ...
    def publish(self, *records: FeedRecord) -> None: ...
    def replicas(self) -> list[ReplicaStatus]: ...
    def members(self) -> list[Member]: ...
    def note_purge(self) -> None: ...


class Buffer(Protocol):
    """All that is used of `buffers.base.TraceBuffer`."""

    def stats(self) -> BufferStats: ...
    def make_room(self) -> int: ...
    def purge(
        self, *, domain: str | None = None, before: float | None = None, all_targets: bool = False
    ) -> int: ...
