"""What `osd train` and `osd distil` report of a new draft: lines for a person, and a file beside
its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from osd.common.files import explain, open_to_others, replace_file
from osd.config.schema import GateConfig
from osd.control.policy import Decision
from osd.errors import OSDError
from osd.offline.recorded import Recorded
from osd.records import RoundOutcome

REPORT = "distillation.json"


def write_report(
    outcome: RoundOutcome, verdict: Decision, recorded: Recorded, *, draft: str, epochs: int
) -> None:
    """Put `REPORT` into the candidate's directory."""
    report = {
        "schema_version": 1,
        "is_better": verdict.ok,
        "reason": verdict.reason,
        "draft": draft,
        "target_id": recorded.target_id,
        "epochs": epochs,
        "num_training_traces": len(recorded.training),
        "num_holdout_traces": len(recorded.holdout),
        "num_damaged": recorded.num_skipped,
        **{
            name: getattr(outcome, name)
            for name in (
                *("num_steps", "num_tokens", "loss_first", "loss_last", "seconds"),
                *("num_student_traces", "sampling_cpu_s", "scoring_cpu_s"),
            )
        },
        "eval": asdict(outcome.eval) if outcome.eval else None,
    }
    path = Path(outcome.path) / REPORT
    try:
        replace_file(path, json.dumps(report, indent=2).encode() + b"\n")
        open_to_others(path)
    except OSError as error:
        raise OSDError(explain(error, path)) from None


def describe(recorded: Recorded) -> str:
    """The numbers of traces, in one line."""
    left_out = {"damaged": recorded.num_skipped, "repeated": recorded.num_repeated}
    return (
        f"traces: {len(recorded.training)} to learn from, {len(recorded.holdout)} held out"
        + "".join(f", {num} {what} left out" for what, num in left_out.items() if num)
        + f"; target {recorded.target_id}"
    )


def judgement(outcome: RoundOutcome, gate: GateConfig) -> str:
    """α before and after, in one line."""
    report = outcome.eval
    if report is None:
        return "α: not judged, too few held-out requests"
    # Each bound is one-sided at `gate.confidence`.
    percent = round(100 * (2 * gate.confidence - 1))
    return (
        f"α on {report.num_traces} held-out requests: {report.alpha_base:.3f} before, "
        f"{report.alpha_candidate:.3f} after; gain {report.diff:+.3f} "
        f"({percent} % interval {report.diff_low:+.3f} to {report.diff_high:+.3f})"
    )
