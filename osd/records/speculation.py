"""What the control of speculation of one engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class PlanTotals(msgspec.Struct):
    """Steps of nothing but decoding under one plan, since the engine started. It counts on.

    Example:
        PlanTotals(steps=88, seconds=2.0, tokens=1580, predicted_seconds=1.9)
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Tokens these steps brought."""
    predicted_seconds: float = 0.0


class PlanChange(msgspec.Struct, frozen=True, kw_only=True, rename={"old": "from", "new": "to"}):
    """The control went over to another plan.

    Example:
        PlanChange(at=1.7e9, old="off", new="draft 3", batch=8, reason="goodput")
    """

    at: float
    old: str
    new: str
    batch: int
    """Requests the new plan was made for."""
    reason: str


class ReplicaPlanChange(PlanChange, frozen=True, kw_only=True):
    """A `PlanChange`, and where.

    Example:
        ReplicaPlanChange(at=1.7e9, old="off", new="draft 3", batch=8, reason="goodput",
                          replica="replica-0")
    """

    replica: str


class NetGain(msgspec.Struct, frozen=True, kw_only=True):
    """Speed with speculation over speed without, as measured in turns.

    Example:
        NetGain(ratio=1.31, low=1.22, high=1.41, windows=6, discarded=1)
    """

    ratio: float | None = None
    """Geometric mean."""
    low: float | None = None
    high: float | None = None
    """Ends of its 95 % interval; None while too few windows have been."""
    windows: int = 0
    discarded: int = 0
    """Windows that could not be compared with their neighbours."""


FEWER_ERRORS, FAR_FEWER_ERRORS = 0.25, 0.75
"""By these shares fewer of its tokens would be rejected of the better drafts that are asked
after."""


class DraftWorth(msgspec.Struct, frozen=True, kw_only=True):
    """How much faster the engine is for a draft, by the goodput of the best plans.

    Example:
        DraftWorth(of_draft=1.42, of_better=1.08, of_far_better=1.41)
    """

    of_draft: float
    """Speed with the draft over speed without it, where whatever else proposes goes on."""
    of_better: float
    """Speed with a draft that errs less often by the share `FEWER_ERRORS`, over speed with this
    one."""
    of_far_better: float
    """The same of the share `FAR_FEWER_ERRORS`: a draft that is not worth its passes yet gains
    nothing by a few errors less."""


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The present plan, and counters since the engine started. Of the draft model's tokens alone.

    Example:
        SpeculationReport(mode="auto", plan="draft 3", proposer="draft", k=3, batch=8,
                          plans={"draft 3": PlanTotals(steps=88, seconds=2.0, tokens=1580)},
                          tested_per_position=(88, 70, 49), accepted_per_position=(70, 49, 30),
                          by_context={"<64": (207, 149)}, spread={"0.5": 0.72})
    """

    mode: str = ""
    """auto, fixed or off."""
    plan: str = ""
    """What the next step proposes: `draft 3`, `memory 8`, `off`."""
    proposer: str = ""
    k: int | None = None
    batch: int | None = None
    """Requests the plan was made for."""
    predicted_tokens_per_second: float | None = None
    """Of the plan with its batch; 0 while nothing is estimated."""
    num_probes: int | None = None
    """Times an unused draft was tried."""
    net: NetGain = NetGain()
    num_cells: int = 0
    """Kinds of step whose time is known."""
    pace: float | None = None
    """Time of a step now, over that of a step of the same kind as it is remembered; None while no
    kind is well known."""
    worth: DraftWorth | None = None
    """None while nothing is known of it."""
    plans: dict[str, PlanTotals] = {}
    changes: tuple[PlanChange, ...] = ()
    """The newest changes of plan, oldest first."""
    decision_us: float = 0.0
    """Mean time of a decision."""
    sources: dict[str, tuple[int, int]] = {}
    """Who proposed (draft, memory) -> (verified, accepted) tokens."""
    tested_per_position: tuple[int, ...] = ()
    """[G]: draft tokens tested, by position in the draft."""
    accepted_per_position: tuple[int, ...] = ()
    """[G]"""
    by_context: dict[str, tuple[int, int]] = {}
    """Length of the context -> (tested, accepted) draft tokens."""
    by_output: dict[str, tuple[int, int]] = {}
    """Position in the output -> (tested, accepted) draft tokens."""
    spread: dict[str, float] = {}
    """Quantile -> conditional acceptance of the requests that ended lately."""
    split: dict[str, float] = {}
    """Part of a step (draft, verify, sample, other) -> seconds on the worker's host."""
    undrafted: dict[str, int] = {}
    """Parameter because of which a request is not drafted for -> such requests."""
    is_async: bool = False
    left_out: dict[str, str] = {}
    """What this engine cannot do (memory, sleep, net) -> why."""
    problem: str = ""
    """Why the control has ended; "" while it works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationFigures:
    """A replica's `SpeculationReport`, with the figures that are shown and counted.

    Example:
        SpeculationFigures(mode="auto", plan="draft 3", k=3, batch=8, off_share=0.12,
                           predicted_tokens_per_second=812.0, measured_tokens_per_second=790.0,
                           net_ratio=1.31, net_low=1.22, net_high=1.41, num_net_windows=6,
                           plans={"draft 3": PlanTotals(steps=88, seconds=2.0, tokens=1580)},
                           seconds_per_part={"draft": 0.4, "verify": 1.2}, num_probes=2,
                           positions=[(88, 70), (70, 49), (49, 30)],
                           contexts={"<64": (207, 149)}, outputs={"<16": (207, 149)},
                           spread={"0.5": 0.72})
    """

    mode: str = ""
    plan: str = ""
    k: int | None = None
    batch: int | None = None
    predicted_tokens_per_second: float | None = None
    """Of the plan with its batch, estimated; None while nothing is estimated."""
    measured_tokens_per_second: float | None = None
    """Of the plan since the engine started, over all batches it was used with."""
    off_share: float | None = None
    """Part of all steps that were without speculation."""
    net_ratio: float | None = None
    net_low: float | None = None
    net_high: float | None = None
    num_net_windows: int = 0
    plans: dict[str, PlanTotals] = field(default_factory=dict)
    seconds_per_part: dict[str, float] = field(default_factory=dict)
    num_probes: int | None = None
    positions: list[tuple[int, int]] = field(default_factory=list)
    """(tested, accepted) draft tokens by position in the draft."""
    contexts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Length of the context -> (tested, accepted) draft tokens."""
    outputs: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Position in the output -> the same."""
    spread: dict[str, float] = field(default_factory=dict)
    undrafted: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Who proposed (draft, memory) -> (verified, accepted) tokens."""
    problem: str = ""
