"""Releases, replicas and rounds as the control port shows them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import msgspec

from osd.records import (
    DraftRelease,
    DraftView,
    Event,
    PlanTotals,
    ReplicaPlanChange,
    ReplicaStatus,
    ReplicaView,
    RoundOutcome,
    SpeculationFigures,
    SpeculationReport,
    SwapReport,
)
from osd.releases.store import ReleaseStore

STEP_PARTS = ("draft", "verify", "sample", "other")
"""Of a step's time in the worker (`serving/speculation/step_split.py`)."""


def speculation_figures(report: SpeculationReport | None) -> SpeculationFigures | None:
    """None where k is fixed."""
    if report is None:
        return None
    num_steps = sum(totals.steps for totals in report.plans.values())
    num_off = report.plans["off"].steps if "off" in report.plans else 0
    tested, accepted = report.tested_per_position, report.accepted_per_position
    return SpeculationFigures(
        mode=report.mode,
        plan=report.plan,
        k=report.k,
        batch=report.batch,
        predicted_tokens_per_second=report.predicted_tokens_per_second or None,
        measured_tokens_per_second=_speed(report.plans.get(report.plan)),
        off_share=num_off / num_steps if num_steps else None,
        net_ratio=report.net.ratio,
        net_low=report.net.low,
        net_high=report.net.high,
        num_net_windows=report.net.windows,
        plans=report.plans,
        seconds_per_part=seconds_per_part(report),
        num_probes=report.num_probes,
        positions=list(zip(tested, accepted, strict=False)),
        contexts=report.by_context,
        outputs=report.by_output,
        spread=report.spread,
        undrafted=report.undrafted,
        sources=report.sources,
        problem=report.problem,
    )


def seconds_per_part(report: SpeculationReport) -> dict[str, float]:
    """Part of a step (`STEP_PARTS`) -> seconds since the engine started."""
    return {part: report.split[part] for part in STEP_PARTS if part in report.split}


def plan_changes(status: ReplicaStatus) -> list[ReplicaPlanChange]:
    """The changes of plan in a heartbeat, oldest first."""
    changes = status.speculation.changes if status.speculation else ()
    return [
        ReplicaPlanChange(**msgspec.structs.asdict(change), replica=status.replica)
        for change in changes
    ]


def describe_replica(status: ReplicaStatus, wanted: int, is_lagging: bool) -> ReplicaView:
    """A heartbeat with the version the replica should serve."""
    return ReplicaView(
        **{name: getattr(status, name) for name in ReplicaStatus.__dataclass_fields__},
        wanted=wanted,
        lagging=is_lagging,
        speculation_figures=speculation_figures(status.speculation),
    )


def describe_drafts(store: ReleaseStore, target_id: str) -> list[DraftView]:
    """Every release in the store, oldest first: how it was judged, and what was decided since. What
    it served is not known here."""
    current, pinned = store.current(target_id), store.pinned()
    bad, kept = store.bad(), store.kept()
    return [
        replace(
            _as_released(release),
            serving=current is not None and release.version == current.version,
            pinned=release.version == pinned,
            kept=release.version in kept,
            bad=release.version in bad,
            bad_reason=bad.get(release.version, ""),
        )
        for release in store.list()
    ]


def presentable(outcome: RoundOutcome) -> RoundOutcome:
    """The outcome without values that JSON lacks: a loss that is not finite becomes 0, a report
    with such a value None."""
    first, last = (x if math.isfinite(x) else 0.0 for x in (outcome.loss_first, outcome.loss_last))
    outcome = replace(outcome, loss_first=first, loss_last=last)
    report = outcome.eval
    is_finite = report is None or math.isfinite(
        sum(value for value in asdict(report).values() if isinstance(value, float))
    )
    return outcome if is_finite else replace(outcome, eval=None)


def _as_released(release: DraftRelease) -> DraftView:
    view = DraftView(
        version=release.version,
        parent=release.parent,
        target_id=release.target_id,
        created_at=release.created_at,
        sha256=release.sha256,
        path=release.path,
        kind=release.kind,
    )
    if (outcome := release.outcome) is None:
        return view
    return replace(
        view,
        eval=outcome.eval,
        num_steps=outcome.num_steps,
        num_tokens=outcome.num_tokens,
        num_new_rows=outcome.num_new_rows,
        loss_first=outcome.loss_first,
        loss_last=outcome.loss_last,
        seconds=outcome.seconds,
        predicted_alpha=release.predicted_alpha,
    )


def _speed(totals: PlanTotals | None) -> float | None:
    return totals.tokens / totals.seconds if totals and totals.seconds > 0 else None


def swap_event(report: SwapReport) -> Event:
    """A swap as it is listed among the events."""
    if report.ok:
        text = (
            f"{report.replica}: v{report.previous} -> v{report.version}, engine paused "
            f"{1000 * report.pause_s:.1f} ms"
            + (", weights read back and equal" if report.proved else "")
        )
        return Event(at=report.at, kind="swapped", text=text, version=report.version)
    text = (
        f"{report.replica} keeps v{report.previous}, v{report.version} was refused: {report.error}"
    )
    return Event(at=report.at, kind="swap_failed", text=text, version=report.version)
