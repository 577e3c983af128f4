"""A made-up run of the demo, and the report of it."""

from __future__ import annotations

from typing import Any

from osd.client.load import Answer
from osd.demo.report import course
from osd.records import SpecWindow, SwapReport

BEGAN = 1_790_000_000.0


def answers(num: int, started: float, acceptance: float) -> list[Answer]:
    """Answers of 21 tokens one after another, a second each; k is 4."""
    accepted = round(10 * acceptance)
    return [
        Answer(
            index=i,
            ok=True,
            token_ids=tuple(range(21)),
            started=started + i,
            ttft_s=0.2,
            seconds=1.0,
            histogram=(10 - accepted, accepted),
            num_draft_tokens=10,
        )
        for i in range(num)
    ]


def swap(at: float, version: int, *, ok: bool = True) -> SwapReport:
    return SwapReport(
        at=at, replica="r", version=version, previous=version - 1, ok=ok, stage_s=0.1, pause_s=0.006
    )


def windows(num: int, started: float, accepted: int, from_memory: int) -> list[SpecWindow]:
    """A second each, of ten steps of requests in which so many tokens were accepted."""
    nothing = {"num_accepted_tokens_per_pos": (), "num_tested_per_pos": ()}
    return [
        SpecWindow(
            at=started + i + 1,
            replica="r",
            version=1,
            k=4,
            seconds=1.0,
            num_drafts=6,
            num_draft_tokens=24,
            num_accepted_tokens=accepted,
            num_steps=10,
            num_output_tokens=10 + accepted + from_memory,
            num_memory_tokens=2 * from_memory,
            num_accepted_memory_tokens=from_memory,
            **nothing,
        )
        for i in range(num)
    ]


def report(*, from_memory: int = 6, **fields: Any) -> dict[str, Any]:
    """As `osd demo --report` writes it: 48 requests at home, then 96 of other traffic."""
    live = [
        ("arithmetic", answers(48, BEGAN, 0.9)),
        ("sql", answers(48, BEGAN + 48, 0.1) + answers(48, BEGAN + 96, 0.8)),
    ]
    counted = [*windows(48, BEGAN, 12, 0), *windows(96, BEGAN + 48, 8, from_memory)]
    swaps = [
        swap(BEGAN + 70, 2),
        swap(BEGAN + 71, 3, ok=False),
        swap(BEGAN + 100, 3),
        swap(BEGAN + 500, 1),
    ]
    return {
        "schema_version": 2,
        "speculation_mode": "auto",
        "k_max": 4,
        "streams": 4,
        "k": {"before_shift": 3.19, "after_shift": 0.95, "recovered": 3.91, "static_control": 0.18},
        "acceptance_rate": {
            "before_shift": 0.877,
            "after_shift": 0.149,
            "recovered": 0.737,
            "static_control": 0.12,
        },
        "token_shares": {
            "before_shift": {"target": 0.421, "draft": 0.579, "memory": 0.0},
            "after_shift": {"target": 0.833, "draft": 0.167, "memory": 0.0},
            "recovered": {"target": 0.417, "draft": 0.333, "memory": 0.25},
            "static_control": None,
        },
        "tokens_per_second": {"no_speculation": 83.2, "static_draft": 75.5, "adapted_draft": 172.8},
        "tpot_ms": {"no_speculation": 44.37, "static_draft": 48.95, "adapted_draft": 18.91},
        "requests": 632,
        "failed_requests": 0,
        "swaps": 7,
        "swap_pause_ms": {"p50": 23.7, "max": 34.52},
        "swaps_proved": True,
        "releases": [{"version": 2, "bad": False, "predicted_alpha": 0.91, "served_alpha": 0.89}],
        "lossless": True,
        "compared": 265,
        "target_parameters": 77_000_000,
        "seconds": 336.0,
        "course": course(live, swaps, counted),
        "machine": {
            "date": "2026-01-02",
            "cpu": "Some CPU 9000",
            "num_cores": 2,
            "versions": {"torch": "hidden"},
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0", "engine": "0.32.0"},
    } | fields
