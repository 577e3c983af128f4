"""What the controller says: what is stored, which parts work, what happened, how it all is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from osd.records.acceptance import SOURCES, shares_of
from osd.records.replica import ReplicaStatus
from osd.records.speculation import SpeculationFigures
from osd.records.training import DraftRelease, RoundOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferStats:
    """What a replay buffer holds.

    Example:
        BufferStats(num_traces=812, num_holdout=115, num_bytes=9_300_000, num_put=1600,
                    oldest_at=1.7e9, dropped={"full": 0, "redis": 3})
    """

    num_traces: int
    """Training traces stored; held-out ones not counted."""
    num_holdout: int
    num_bytes: int
    num_put: int
    """Training traces ever stored (the highest id)."""
    oldest_at: float
    """`finished_at` of the oldest stored trace; 0 when empty."""
    dropped: dict[str, int] = field(default_factory=dict)
    """reason -> traces this client could not store, and those that nobody of the deployment could
    read"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Payback:
    """What a training round takes from the engines, and what it is expected to save them, in
    seconds of their time.

    Example:
        Payback(taken_s=2.1, saved_s=38.0, within_s=600.0, slowdown=1.18)
    """

    taken_s: float
    saved_s: float
    """Of the traffic expected within `within_s`, if it is like that of late."""
    within_s: float
    slowdown: float
    """Time of a step while the trainer works, over that at rest, of the engine that suffers
    most."""
    is_resting: bool = False
    """Whether training rests, since a round would not pay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Which parts of a service work, as its controller finds them.

    Example:
        Health(is_redis_up=True, is_trainer_up=True, is_alarmed=False, lagging=("replica-1",))
    """

    is_redis_up: bool
    is_trainer_up: bool
    """Also where no training is wanted."""
    is_alarmed: bool
    """An engine seems to run something else than the serving draft."""
    lagging: tuple[str, ...] = ()
    """Replicas that have served another version than the wanted one for long."""
    num_wanted: int | None = None
    """Replicas that are to serve; None where others start them."""
    payback: Payback | None = None
    """None while it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricPoint:
    """One value at one time.

    Example:
        MetricPoint(at=1.7e9, name="alpha", value=0.71, labels={"draft": "default", "version": "4"})
    """

    at: float
    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a part of the service runs, and logs.

    Example:
        Place(part="trainer", host="gpu-2", node="5f3c...", log="/data/osd/logs/trainer.log")
    """

    part: str
    host: str
    node: str
    """The machine in Ray's words."""
    log: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A replica of the service's own, as the service that started it sees it.

    Example:
        Member(replica="replica-1", state="starting", since=1.7e9,
               why="no machine of the Ray cluster has the resource 'gpu'")
    """

    replica: str
    state: str
    """starting, serving or draining."""
    since: float
    """Unix time."""
    why: str = ""
    """What it waits for; "" where that is not known."""
    is_lost: bool = False
    """Whether it served before it had to start again."""

    @property
    def is_wanted(self) -> bool:
        """Whether it is to get requests."""
        return self.state != "draining"


STEPS = ("observe", "capture", "swap", "control")
"""What can be switched on in an attached engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTerms:
    """What a deployment tells engines that somebody else started.

    Example:
        EngineTerms(target_id="9f2c", steps=("observe", "capture"), capture={"top_k": 64},
                    buffer={"max_traces": 20000, "max_domains": 64},
                    drafts_url="http://10.0.0.1:8001", drafts_token="...")
    """

    target_id: str
    """Of the target that the deployment's drafts are for."""
    steps: tuple[str, ...]
    """What is switched on, of `STEPS`."""
    capture: dict[str, Any] = field(default_factory=dict)
    """The section `capture`."""
    buffer: dict[str, int] = field(default_factory=dict)
    """Limits of the replay buffer."""
    first: DraftRelease | None = None
    """The first release, which the engine's own draft may be."""
    drafts_url: str = ""
    """Where releases are fetched; "" = they are seen where the store keeps them."""
    drafts_token: str = ""
    draft_sample_method: str = "greedy"
    """How engines must pick draft tokens, since the gate judges drafts so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to the service: a release, a refusal, a rollback, a failed swap.

    Example:
        Event(at=1.7e9, kind="published", version=4,
              text="v4: held-out alpha 0.41 -> 0.72 on 40 requests")
    """

    at: float
    kind: str
    text: str
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView(ReplicaStatus):
    """A heartbeat, beside what the controller wants of the replica.

    Example:
        ReplicaView(at=1.7e9, replica="replica-0", url="http://127.0.0.1:8000", version=4,
                    target_id="9f2c", k=4, pid=4242, started_at=1.7e9,
                    engine="vllm 0.32.0 (cpu)", wanted=5)
    """

    wanted: int = 0
    """Version it should serve."""
    lagging: bool = False
    """Whether it has served another one for long."""
    speculation_figures: SpeculationFigures | None = None
    """None where k is fixed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Acceptance and speed over the last `seconds`; all None without traffic.

    Example:
        Figures(seconds=60.0, alpha=0.71, acceptance_rate=0.6, acceptance_length=3.4,
                tokens_per_second=812.0, tpot_ms=9.1, k=3.8, requests=42, tokens_target=410.0,
                tokens_draft=330.0, tokens_memory=260.0)
    """

    seconds: float = 0.0
    alpha: float | None = None
    acceptance_rate: float | None = None
    acceptance_length: float | None = None
    tokens_per_second: float | None = None
    tpot_ms: float | None = None
    k: float | None = None
    requests: float | None = None
    tokens_target: float | None = None
    """Output tokens of the target itself, of the draft model and of the memory."""
    tokens_draft: float | None = None
    tokens_memory: float | None = None

    def shares(self) -> dict[str, float]:
        """Who brought which share of the output tokens (`SOURCES`); {} without any."""
        return shares_of({name: getattr(self, f"tokens_{name}") or 0.0 for name in SOURCES})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """A running service at one moment: `/osd/status`.

    Example:
        ServiceStatus(deployment="default", target="llama-8b", draft="llama-160m",
                      target_id="9f2c", version=4, k=4, phase="training",
                      phase_detail="from v3, 8 stored batches for each new one")
    """

    deployment: str
    target: str
    draft: str
    """As configured: what the first release was made of."""
    served_model_name: str = ""
    engines: str = "own"
    """"attached" = others start them."""
    url: str = ""
    """Service port of several replicas; "" where a replica has it."""
    target_id: str = ""
    version: int
    """The draft release that should serve; 0 = none yet."""
    predicted_alpha: float | None = None
    """α of that release as its gate measured it."""
    served_alpha: float | None = None
    """α it served with so far."""
    pinned: int | None = None
    paused: bool = False
    training: bool = True
    """Whether training is wanted."""
    phase: str = ""
    """waiting, comparing (with earlier drafts) or training."""
    phase_detail: str = ""
    k: int
    """Most draft tokens a step may propose."""
    mode: str = "auto"
    proposers: tuple[str, ...] = ()
    replicas: tuple[ReplicaView, ...] = ()
    members: tuple[Member, ...] = ()
    """The service's own replicas, those without a heartbeat, too."""
    buffer: BufferStats | None = None
    """None before it was read."""
    alarm: str = ""
    """Why an engine seems to run something else than the serving draft."""
    redis: str = "ok"
    """ok or away."""
    trainer: str = "ok"
    """ok or away."""
    trainer_trouble: str = ""
    """Why it is away, as far as that is known."""
    payback: Payback | None = None
    """None while it is not known what a round takes, or brings."""
    last_round: RoundOutcome | None = None
    num_rounds: int = 0
    num_swaps: int = 0
    num_rollbacks: int = 0
    started_at: float = 0.0
    uptime_s: float = 0.0
    now: float = 0.0
    figures: Figures = Figures()
    """Of the last minute."""
    recent: Figures = Figures()
    """Of the last minutes with traffic."""
    problems: tuple[str, ...] = ()
    """Worst first, each with its remedy."""
