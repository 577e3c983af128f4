"""How releases, replicas and rounds are shown on the control port."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from osd.records import DraftRelease, ReplicaStatus, RoundOutcome
from osd.releases import ReleaseStore


def describe_replica(status: ReplicaStatus, wanted: int, is_lagging: bool) -> dict[str, Any]:
    """A heartbeat, the version it should serve, and whether it has not come to that for long."""
    return asdict(status) | {"wanted": wanted, "lagging": is_lagging}


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
        "eval": asdict(outcome.eval) if outcome and outcome.eval else None,
        "num_steps": outcome.num_steps if outcome else 0,
        "num_tokens": outcome.num_tokens if outcome else 0,
        "seconds": outcome.seconds if outcome else 0.0,
    }
