"""What a replica says: its windows of counters, its swaps, its heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from osd.records.acceptance import Counters, conditional_acceptance
from osd.records.speculation import SpeculationReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapReport:
    """What one replica did with a release.

    Example:
        SwapReport(at=1.7e9, replica="replica-0", version=4, previous=3, ok=True, stage_s=0.08,
                   pause_s=0.006)
    """

    at: float
    replica: str
    draft: str = "default"
    version: int
    previous: int
    ok: bool
    stage_s: float
    """Reading and validating, in a thread beside the engine."""
    pause_s: float
    """Time the worker's apply blocks the engine."""
    proved: bool = False
    """Whether the live draft was read back and found to be this one; False where an engine cannot
    be read back."""
    error: str = ""
    sent_at: float = 0.0
    """When it was sent, by the clock of `at`; 0 = not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecWindow:
    """`Counters` of one replica, draft version and domain over a short time.

    Example:
        SpecWindow(at=1.7e9, replica="replica-0", version=4, seconds=1.0, k=4, num_drafts=100,
                   num_draft_tokens=400, num_accepted_tokens=250,
                   num_accepted_tokens_per_pos=(90, 70, 50, 40),
                   num_tested_per_pos=(100, 90, 70, 50), num_output_tokens=408, num_finished=8,
                   decode_seconds=4.0, num_decode_tokens=320, num_memory_tokens=80,
                   num_accepted_memory_tokens=48)
    """

    at: float
    """End of the window."""
    replica: str
    draft: str = "default"
    version: int
    domain: str = ""
    k: int
    """Most draft tokens a step may propose."""
    seconds: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_tested_per_pos: tuple[int, ...]
    num_steps: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_captured: int = 0
    decode_seconds: float = 0.0
    num_decode_tokens: int = 0
    num_memory_tokens: int = 0
    num_accepted_memory_tokens: int = 0
    num_cut_draft_tokens: int = 0
    num_cut_memory_tokens: int = 0
    sent_at: float = 0.0
    """When it was sent, by the clock of `at`; 0 = not known."""

    @classmethod
    def of(cls, counters: Counters, **labels: Any) -> SpecWindow:
        """`labels`: the fields that are no counters."""
        counted = msgspec.structs.asdict(counters)
        for name in ("num_accepted_tokens_per_pos", "num_tested_per_pos"):
            counted[name] = tuple(counted[name])
        return cls(**counted, **labels)

    @property
    def counters(self) -> Counters:
        return msgspec.convert(
            [getattr(self, name) for name in Counters.__struct_fields__], Counters
        )

    @property
    def alpha(self) -> float | None:
        return conditional_acceptance(
            sum(self.num_accepted_tokens_per_pos), sum(self.num_tested_per_pos)
        )

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """A replica's heartbeat: who it is, which draft it serves, what its capture did so far.

    Example:
        ReplicaStatus(at=1.7e9, replica="replica-0", url="http://127.0.0.1:8000", version=4,
                      target_id="9f2c", k=4, pid=4242, started_at=1.7e9,
                      engine="vllm 0.32.0 (cpu)", capture_rows={"rejected": 120},
                      capture_skipped={"opted_out": 2}, buffer_dropped={"redis": 0}, num_running=3)
    """

    at: float
    replica: str
    draft: str = "default"
    url: str
    version: int
    """Version of the draft it serves now."""
    target_id: str
    k: int
    pid: int
    started_at: float
    engine: str
    capture_rows: dict[str, int] = field(default_factory=dict)
    """kind -> rows kept since it started"""
    capture_skipped: dict[str, int] = field(default_factory=dict)
    """reason -> requests, steps or traces left out since it started"""
    num_traces: int = 0
    """Requests handed to the buffer as traces since it started"""
    buffer_dropped: dict[str, int] = field(default_factory=dict)
    """reason -> traces the buffer could not take since it started"""
    num_running: int = 0
    """Requests in the engine."""
    num_open: int = 0
    """Requests that clients wait for here, those included that the engine has not begun."""
    open_seconds: float = 0.0
    """Seconds that clients have waited here since it started, all together."""
    unproved: str = ""
    """Why its swaps cannot be proved by reading the draft back; "" when they are."""
    off: dict[str, str] = field(default_factory=dict)
    """Part that does not work with its vLLM -> why, and what that means"""
    may_try: bool = False
    """Whether it serves a draft first when it is to (`Canary`). Replicas of versions that knew no
    trials do not."""
    steps: tuple[str, ...] | None = None
    """What is switched on in an attached engine; None = it is the service's own."""
    speculation: SpeculationReport | None = None
    """What the control of speculation last said of itself; None = k is fixed, or none came yet."""

    @property
    def is_swapped(self) -> bool:
        """Whether it is to serve the wanted draft."""
        return self.steps is None or "swap" in self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """What an engine's worker counted: windows since its last report, the rest since its start.

    Example:
        WorkerReport(rows={"rejected": 120}, skipped={"opted_out": 2}, num_traces=40, num_running=3)
    """

    windows: list[SpecWindow] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """kind -> rows kept"""
    skipped: dict[str, int] = field(default_factory=dict)
    """reason -> requests, steps or traces left out of capture"""
    num_traces: int = 0
    """Requests handed to the buffer as traces."""
    dropped: dict[str, int] = field(default_factory=dict)
    """reason -> traces the buffer could not take"""
    num_running: int = 0
    """Requests in the engine."""
    split: dict[str, float] = field(default_factory=dict)
    """Part of a step -> seconds."""
    off: dict[str, str] = field(default_factory=dict)
    """Part that is off in this worker -> why, and what that means"""
    awake: str = ""
    """Why its draft does not sleep at k = 0; "" when it does, or is not asked to."""
    error: str = ""
    """Why the counters could not be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingReport:
    """How one rank's newest staging of a release goes.

    Example:
        StagingReport(version=4, done=True, seconds=0.08)
    """

    version: int = 0
    done: bool = False
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank of an engine did in a phase of a swap.

    Example:
        RankReport(version=3, seconds=0.004, held={"every rank": 77, "rank 1": 512}, expected=990)
    """

    version: int = 0
    """Version of the last good weights."""
    seconds: float = 0.0
    """Time the rank was blocked."""
    held: dict[str, int] = field(default_factory=dict)
    """Holder -> digest of the weights that are live on this rank; empty when they were not read"""
    expected: int = 0
    """Digest of the whole draft."""
    error: str = ""
    refused: str = ""
    """Why the hooks are not installed on this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReport:
    """What became of the commit of a release on all ranks of an engine.

    Example:
        CommitReport(pause_s=0.006, previous=3, proved=True)
    """

    pause_s: float = 0.0
    """Time the engine was blocked."""
    previous: int = 0
    """Version that served before; 0 where nothing was put in."""
    proved: bool = False
    """Whether the live draft was read back and found to be this one."""
    error: str = ""
    """Why the old draft serves on; "" when the new one does."""
    is_lost: bool = False
    """Whether no version is live on all ranks any more."""
