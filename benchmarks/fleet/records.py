"""What a busy replica writes, in the sizes that the product writes it."""

from __future__ import annotations

import time
from typing import Any

from osd.records import (
    ClassReport,
    EvalReport,
    NetGain,
    PlanChange,
    PlanTotals,
    RoundOutcome,
    SpeculationReport,
    SpecWindow,
)

TARGET_ID = "9f2c5b1d7a3e4c60"
K = 5
ALPHA_PER_POSITION = (0.82, 0.79, 0.77, 0.76, 0.75)
NUM_CHANGES = 50
"""As many as a heartbeat carries after some hours (`MAX_CHANGES` of the control's accounts)."""


def window(replica: str, version: int, at: float, *, num_drafts: int = 400) -> SpecWindow:
    """A second in which so many drafts of `K` tokens were verified."""
    tested, accepted, left = [], [], num_drafts
    for alpha in ALPHA_PER_POSITION:
        tested.append(left)
        left = round(alpha * left)
        accepted.append(left)
    num_tokens = num_drafts + sum(accepted)
    return SpecWindow(
        at=at,
        replica=replica,
        version=version,
        k=K,
        seconds=1.0,
        num_steps=num_drafts,
        num_drafts=num_drafts,
        num_draft_tokens=K * num_drafts,
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=tuple(accepted),
        num_tested_per_pos=tuple(tested),
        num_output_tokens=num_tokens,
        num_finished=num_tokens // 160,
        num_captured=num_tokens // 160,
        decode_seconds=4.2173519134521484,
        num_decode_tokens=num_tokens,
    )


def worker_report(replica: str, version: int, num_reports: int) -> dict[str, Any]:
    """A `WorkerReport` with one window."""
    return {
        "windows": [window(replica, version, time.time(), num_drafts=380 + num_reports % 40)],
        "rows": {"rejected": 41_712 + num_reports, "accepted": 58_133, "plain": 9_120},
        "skipped": {"opted_out": 12, "gap": 1},
        "num_traces": 1_203 + num_reports,
        "num_running": 16,
        "split": {"draft": 102.125, "verify": 803.875, "sample": 51.5, "other": 12.25},
    }


def speculation(num_reports: int) -> SpeculationReport:
    """What the control of an engine that has run for hours says of itself."""
    now, plans = time.time(), ("off", *(f"draft {k}" for k in range(1, K + 1)), "memory 8")
    tested = [400_000 + num_reports, 320_000, 250_000, 190_000, 140_000]
    return SpeculationReport(
        mode="auto",
        plan="draft 5",
        proposer="draft",
        k=K,
        batch=16,
        predicted_tokens_per_second=1_312.7551020408164,
        num_probes=31,
        net=NetGain(ratio=1.3127, low=1.2219, high=1.4103, windows=40, discarded=3),
        num_cells=48,
        plans={
            plan: PlanTotals(10_000 + num_reports, 210.51234, 160_000, 207.98761) for plan in plans
        },
        changes=tuple(
            PlanChange(
                at=now - 60.0 * (NUM_CHANGES - i),
                old=plans[i % len(plans)],
                new=plans[(i + 1) % len(plans)],
                batch=16,
                reason="goodput",
            )
            for i in range(NUM_CHANGES)
        ),
        decision_us=212.53125,
        tested_per_position=tuple(tested),
        accepted_per_position=tuple(
            round(alpha * num) for alpha, num in zip(ALPHA_PER_POSITION, tested, strict=True)
        ),
        by_context=dict.fromkeys(("<64", "<256", "<1024", "<4096"), (207112, 149003)),
        by_output=dict.fromkeys(("<16", "<64", "<256", "<1024"), (207112, 149003)),
        spread=dict.fromkeys(("0.05", "0.25", "0.5", "0.75", "0.95"), 0.7212345),
        split={"draft": 102.125, "verify": 803.875, "sample": 51.5, "other": 12.25},
        is_async=True,
    )


def outcome(base_version: int) -> RoundOutcome:
    """Of a round whose candidate serves as it was measured."""
    tested = window("", 0, 0.0)
    alpha = sum(tested.num_accepted_tokens_per_pos) / sum(tested.num_tested_per_pos)
    found = ClassReport(num_traces=16, alpha_base=0.7, alpha_candidate=alpha, diff_high=0.1)
    report = EvalReport(
        num_traces=64,
        num_tokens=10_240,
        k=K,
        alpha_base=0.7,
        alpha_candidate=alpha,
        alpha_base_per_pos=(0.7,) * K,
        alpha_candidate_per_pos=ALPHA_PER_POSITION,
        diff=alpha - 0.7,
        diff_low=0.05,
        diff_high=0.12,
        classes={f"cluster {i}": found for i in range(4)},
    )
    return RoundOutcome(
        base_version=base_version,
        target_id=TARGET_ID,
        path="candidate",
        num_steps=96,
        num_tokens=12_400,
        loss_first=0.91,
        loss_last=0.72,
        seconds=31.5,
        trace_age_mean_s=12.5,
        trace_age_max_s=40.25,
        eval=report,
    )
