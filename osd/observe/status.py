"""How releases, replicas, rounds and the control of speculation are shown on the control port."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from osd.records import DraftRelease, ReplicaStatus, RoundOutcome
from osd.releases.store import ReleaseStore

STEP_PARTS = ("draft", "verify", "sample", "other")
"""Of a step's time in the worker (`serving/speculation/step_split.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationFigures:
    """What a replica's control of speculation reports (`ReplicaStatus.speculation`), made fit to be shown and counted.

    Example:
        SpeculationFigures(mode="auto", plan="draft 3", k=3, batch=8, predicted_tokens_per_second=812.0,
                           measured_tokens_per_second=790.0, off_share=0.12, net_ratio=1.31, net_low=1.22,
                           net_high=1.41, num_net_windows=6, plans={"draft 3": {"steps": 88, "seconds": 2.0,
                           "tokens": 1580}, "off": {"steps": 12, "seconds": 0.2, "tokens": 96}},
                           seconds_per_part={"draft": 0.4, "verify": 1.2}, num_probes=2,
                           places=[(88, 70), (70, 49), (49, 30)], contexts={"<64": (207, 149)}, spread={"0.5": 0.72})
    """

    mode: str = ""
    """auto, fixed or off."""
    plan: str = ""
    """What the next step proposes: `draft 3`, `ngram 5`, `off`."""
    k: float | None = None
    batch: float | None = None
    """Requests the plan was made for."""
    predicted_tokens_per_second: float | None = None
    """Of the plan with its batch, estimated; None while nothing is estimated."""
    measured_tokens_per_second: float | None = None
    """Of the plan since the engine started, over all batches it was used with."""
    off_share: float | None = None
    """Part of all steps that were without speculation."""
    net_ratio: float | None = None
    net_low: float | None = None
    net_high: float | None = None
    """Measured speed with speculation over without, and its 95 % interval."""
    num_net_windows: float = 0
    plans: dict[str, dict[str, float]] = field(default_factory=dict)
    """plan -> steps, seconds and tokens since the engine started"""
    seconds_per_part: dict[str, float] = field(default_factory=dict)
    """part of a step (`STEP_PARTS`) -> seconds since the engine started"""
    num_probes: float | None = None
    places: list[tuple[float, float]] = field(default_factory=list)
    """(tested, accepted) draft tokens by place in the draft"""
    contexts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """length of the context -> (tested, accepted) draft tokens"""
    spread: dict[str, float] = field(default_factory=dict)
    """quantile -> conditional acceptance of the requests that ended lately"""
    problem: str = ""
    """Why the control has ended; "" while it works."""


def speculation_figures(report: Mapping[str, Any]) -> SpeculationFigures | None:
    """None for an empty report. What another version does not report, or reports in another form, is left out."""
    if not report:
        return None
    plan, plans, net = _text(report.get("plan")), _plans(report), _mapping(report.get("net"))
    num_steps = sum(totals["steps"] for totals in plans.values())
    seconds = _numbers(report.get("split"))
    return SpeculationFigures(
        mode=_text(report.get("mode")),
        plan=plan,
        k=_number(report.get("k")),
        batch=_number(report.get("batch")),
        predicted_tokens_per_second=_number(report.get("predicted_tokens_per_second")) or None,
        measured_tokens_per_second=_speed(plans.get(plan)),
        off_share=plans.get("off", {"steps": 0})["steps"] / num_steps if num_steps else None,
        net_ratio=_number(net.get("ratio")),
        net_low=_number(net.get("low")),
        net_high=_number(net.get("high")),
        num_net_windows=_number(net.get("windows")) or 0,
        plans=plans,
        seconds_per_part={part: seconds[part] for part in STEP_PARTS if part in seconds},
        num_probes=_number(report.get("num_probes")),
        places=_places(report),
        contexts={name: pair for name, value in _mapping(report.get("by_context")).items() if (pair := _pair(value))},
        spread=_numbers(report.get("spread")),
        problem=_text(report.get("problem")),
    )


def plan_changes(status: ReplicaStatus) -> list[dict[str, Any]]:
    """The changes of plan in a heartbeat, oldest first: {"at", "replica", "from", "to", "batch", "reason"}."""
    return [
        {
            "at": at,
            "replica": status.replica,
            "from": _text(change.get("from")),
            "to": _text(change.get("to")),
            "batch": _number(change.get("batch")),
            "reason": _text(change.get("reason")),
        }
        for change in map(_mapping, _list(status.speculation.get("changes")))
        if (at := _number(change.get("at"))) is not None
    ]


def describe_replica(status: ReplicaStatus, wanted: int, is_lagging: bool) -> dict[str, Any]:
    """A heartbeat with the figures of its speculation, the version it should serve, and whether it has not come to that
    for long."""
    figures = speculation_figures(status.speculation)
    return asdict(status) | {
        "wanted": wanted,
        "lagging": is_lagging,
        "speculation_figures": asdict(figures) if figures else None,
    }


def describe_drafts(store: ReleaseStore, target_id: str) -> list[dict[str, Any]]:
    """Every release in the store, oldest first: how it was judged, and what was decided since."""
    current, pinned = store.current(target_id), store.pinned()
    bad, kept = store.bad(), store.kept()
    return [
        _describe_draft(release)
        | {
            "serving": current is not None and release.version == current.version,
            "pinned": release.version == pinned,
            "kept": release.version in kept,
            "bad": release.version in bad,
            "bad_reason": bad.get(release.version, ""),
        }
        for release in store.list()
    ]


def presentable(outcome: RoundOutcome) -> RoundOutcome:
    """The outcome with 0 for losses that are not finite (JSON has no NaN), and no report that is not."""
    first, last = (x if math.isfinite(x) else 0.0 for x in (outcome.loss_first, outcome.loss_last))
    outcome = replace(outcome, loss_first=first, loss_last=last)
    report = outcome.eval
    is_finite = report is None or math.isfinite(
        sum(value for value in asdict(report).values() if isinstance(value, float))
    )
    return outcome if is_finite else replace(outcome, eval=None)


def _describe_draft(release: DraftRelease) -> dict[str, Any]:
    outcome = release.outcome
    return {
        "version": release.version,
        "parent": release.parent,
        "target_id": release.target_id,
        "created_at": release.created_at,
        "sha256": release.sha256,
        "path": release.path,
        "kind": release.kind,
        "eval": asdict(outcome.eval) if outcome and outcome.eval else None,
        "num_steps": outcome.num_steps if outcome else 0,
        "num_tokens": outcome.num_tokens if outcome else 0,
        "num_new_rows": outcome.num_new_rows if outcome else 0,
        "loss_first": outcome.loss_first if outcome else None,
        "loss_last": outcome.loss_last if outcome else None,
        "seconds": outcome.seconds if outcome else 0.0,
    }


def _plans(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    names = ("steps", "seconds", "tokens")
    found = {plan: _numbers(totals) for plan, totals in _mapping(report.get("plans")).items()}
    return {plan: {name: totals[name] for name in names} for plan, totals in found.items() if {*names} <= {*totals}}


def _places(report: Mapping[str, Any]) -> list[tuple[float, float]]:
    tested, accepted = _list(report.get("tested_per_place")), _list(report.get("accepted_per_place"))
    pairs = [_pair(pair) for pair in zip(tested, accepted, strict=False)]
    return [pair for pair in pairs if pair] if all(pairs) else []


def _speed(totals: Mapping[str, float] | None) -> float | None:
    return totals["tokens"] / totals["seconds"] if totals and totals["seconds"] > 0 else None


def _pair(value: Any) -> tuple[float, float] | None:
    match [_number(part) for part in _list(value)]:
        case [float() | int() as first, float() | int() as second]:
            return first, second
    return None


def _number(value: Any) -> float | None:
    """A finite number that is not below nothing; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _numbers(value: Any) -> dict[str, float]:
    return {str(k): number for k, v in _mapping(value).items() if (number := _number(v)) is not None}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
