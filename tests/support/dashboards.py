"""A control port over a made-up but consistent history, to look at its page with a browser."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from osd.observe.dashboard import build_app
from osd.observe.history import History
from osd.observe.history_file import HistoryFile, Minute
from osd.observe.slots import SpeculationTimes
from osd.observe.status import describe_replica
from osd.records import (
    BufferStats,
    Counters,
    EvalReport,
    Event,
    ReplicaStatus,
    RoundOutcome,
    ServiceStatus,
    SpeculationReport,
    SpecWindow,
    SwapReport,
)

TOKEN = "correct-horse"
CLASSES = ("sql", "arithmetic", "python", "finance")


class Scene:
    """What the page shows: a controller's answers, and a history that may grow meanwhile."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.calls: list[tuple[Any, ...]] = []
        self.version = 3
        self.changes: dict[str, Any] = {}
        """Over `status`, to show trouble."""
        self.is_empty = False

    def status(self) -> ServiceStatus:
        if self.is_empty:
            replicas, last = [], None
        else:
            replicas, last = (
                [describe_replica(heartbeat(i, self.version), self.version, False) for i in (0, 1)],
                outcome(),
            )
        stats = BufferStats(
            num_traces=812,
            num_holdout=115,
            num_bytes=9_300_000,
            num_put=1600,
            oldest_at=time.time() - 900,
        )
        known = {
            "deployment": "default",
            "target": "tiny-target",
            "draft": "tiny-draft",
            "served_model_name": "tiny",
            "target_id": "9f2c",
            "version": self.version,
            "predicted_alpha": 0.72,
            "served_alpha": 0.715,
            "pinned": None,
            "paused": False,
            "training": True,
            "phase": "waiting",
            "phase_detail": "9 of 32 new traces",
            "k": 5,
            "replicas": tuple(replicas),
            "buffer": None if self.is_empty else stats,
            "alarm": "",
            "redis": "ok",
            "trainer": "ok",
            "last_round": last,
            "num_rounds": 12,
            "num_swaps": 4,
            "num_rollbacks": 1,
            "started_at": time.time() - 9000,
            "uptime_s": 9000.0,
        }
        return ServiceStatus(**(known | self.changes))

    def drafts(self) -> list[dict[str, Any]]:
        if self.is_empty:
            return []
        report = outcome().eval
        made = {
            "target_id": "9f2c",
            "sha256": "ab",
            "path": "/data",
            "pinned": False,
            "kept": False,
        }
        return [
            made
            | {
                "version": v,
                "parent": v - 1,
                "created_at": time.time() - 7000 + 1000 * v,
                "kind": "full",
                "bad": v == 2,
                "bad_reason": "served 0.41, replayed 0.44, the draft before 0.61" if v == 2 else "",
                "serving": v == self.version,
                "eval": report if v > 1 else None,
                "num_steps": 24 * (v > 1),
                "num_tokens": 3100 * (v > 1),
                "num_new_rows": 900,
                "loss_first": 2.1,
                "loss_last": 0.62,
                "seconds": 2.4,
                "predicted_alpha": 0.72,
                "served_alpha": 0.7,
                "served_tested": 12345,
            }
            for v in (1, 2, 3)
        ]

    def __getattr__(self, action: str) -> Any:
        def act(*args: Any) -> None:
            self.calls.append((action, *args))

        if action in ("pause", "resume", "promote", "rollback", "pin", "unpin", "keep"):
            return act
        raise AttributeError(action)


def outcome() -> RoundOutcome:
    report = EvalReport(
        num_traces=40,
        num_tokens=1600,
        k=4,
        alpha_base=0.41,
        alpha_candidate=0.72,
        diff=0.31,
        diff_low=0.27,
        diff_high=0.35,
        alpha_base_per_pos=(0.5, 0.4, 0.3, 0.2),
        alpha_candidate_per_pos=(0.8, 0.7, 0.7, 0.6),
        success_base=(0.5, 0.61, 0.66, 0.7, 0.72),
        success_candidate=(0.8, 0.88, 0.91, 0.93, 0.94),
    )
    return RoundOutcome(
        base_version=2,
        path="/data/candidates/17",
        num_steps=24,
        num_tokens=3100,
        loss_first=2.1,
        loss_last=0.62,
        seconds=2.4,
        trace_age_mean_s=4.0,
        trace_age_max_s=9.5,
        eval=report,
    )


def heartbeat(number: int, version: int, at: float | None = None) -> ReplicaStatus:
    at = time.time() if at is None else at
    speculation = {
        "mode": "auto",
        "plan": "draft 3",
        "k": 3,
        "batch": 4,
        "predicted_tokens_per_second": 812.0,
        "plans": {
            "draft 3": {"steps": 88, "seconds": 2.0, "tokens": 1580},
            "off": {"steps": 12, "seconds": 0.2, "tokens": 96},
        },
        "net": {"ratio": 1.31, "low": 1.22, "high": 1.41, "windows": 6},
        "split": {
            "draft": 0.4 + at % 1e5,
            "verify": 1.2 + 3 * (at % 1e5),
            "sample": 0.1,
            "other": 0.2,
        },
        "num_probes": 2,
        "tested_per_position": [88, 70, 49],
        "accepted_per_position": [70, 49, 30],
        "by_context": {"<64": [207, 149]},
        "by_output": {"<16": [100, 81], "<64": [107, 68]},
        "spread": {"0.1": 0.4, "0.5": 0.72, "0.9": 0.9},
    }
    return ReplicaStatus(
        at=at,
        replica=f"replica-{number}",
        url=f"http://127.0.0.1:{8100 + number}",
        version=version,
        target_id="9f2c",
        k=5,
        pid=4242,
        started_at=at - 9000,
        engine="vllm 0.32.0 (cpu)",
        num_traces=1600,
        num_running=3,
        capture_rows={"rejected": 12_000, "accepted": 3_000, "plain": 400},
        capture_skipped={"opted_out": 12, "not_sampled": 3},
        speculation=msgspec.convert(speculation, SpeculationReport),
    )


def alpha_at(at: float, number: int = 0) -> float:
    return 0.55 + 0.25 * math.sin(at / 40_000 + number) + 0.04 * math.sin(at / 700 + 3 * number)


def counts(alpha: float, drafts: int = 600) -> Counters:
    """The memory proposes in as many steps as the draft, and has 1.5 tokens accepted in each."""
    tested, accepted = [drafts], []
    for _ in range(4):
        accepted.append(round(alpha * tested[-1]))
        tested.append(accepted[-1])
    from_memory = 3 * drafts // 2
    return Counters(
        60.0,
        2 * drafts,
        drafts,
        4 * drafts,
        sum(accepted),
        2 * drafts + sum(accepted) + from_memory,
        30,
        30,
        drafts,
        0.02 * drafts,
        accepted,
        tested[:4],
        2 * from_memory,
        from_memory,
    )


def minutes(now: float, days: float) -> Iterator[Minute]:
    """Windows of two replicas and four classes, minute by minute."""
    for start in range(int((now - 86400 * days) // 60) * 60, int(now // 60) * 60, 60):
        version = 1 + (start > now - 86400 * days / 2) + (start > now - 3600)
        for number in (0, 1):
            yield (
                "replica",
                (float(start), f"replica-{number}", version, 5),
                counts(alpha_at(start, number)),
            )
            yield (
                "speculation",
                (float(start), f"replica-{number}"),
                SpeculationTimes((1.3, 1.2, 1.4), {"draft": 10.0, "verify": 40.0}),
            )
        for number, name in enumerate(CLASSES):
            yield "class", (float(start), name), counts(alpha_at(start, number), 300)


def week(path: Path, days: float = 7.0) -> History:
    """A history of so many days, read from the file they are in, with swaps and events."""
    write_week(path, days)
    return History(86400 * days, HistoryFile(path))


def write_week(path: Path, days: float = 7.0) -> None:
    now = time.time()
    swaps = [
        SwapReport(
            at=now - ago,
            replica="replica-0",
            version=v,
            previous=p,
            ok=True,
            stage_s=0.1,
            pause_s=0.006,
            proved=True,
        )
        for ago, v, p in ((86400 * days / 2, 2, 1), (3600, 3, 2), (100, 4, 3), (60, 3, 4))
    ]
    events = [
        Event(
            at=now - 3700,
            kind="published",
            text="v3: held-out alpha 0.41 -> 0.72 on 40 requests",
            version=3,
        ),
        Event(
            at=now - 3000,
            kind="refused",
            text="held-out alpha +0.4 (-0.6 ... +1.4) pt: not proved better",
        ),
        Event(
            at=now - 400, kind="trainer_failed", text="ActorDiedError: the trainer's process ended"
        ),
    ]
    file = HistoryFile(path)
    file.write(minutes(now, days), [*swaps, *events], oldest=now - 86400 * days)
    file.close()


def window(
    at: float,
    alpha: float,
    *,
    drafts: int = 40,
    version: int = 3,
    domain: str = "",
    replica: str = "replica-0",
) -> SpecWindow:
    """Half a second of traffic that accepts so much."""
    c = counts(alpha, drafts)
    return SpecWindow(
        at=at,
        replica=replica,
        version=version,
        domain=domain,
        seconds=0.5,
        k=4,
        num_drafts=c.num_drafts,
        num_draft_tokens=c.num_draft_tokens,
        num_accepted_tokens=c.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(c.num_accepted_tokens_per_pos),
        num_tested_per_pos=tuple(c.num_tested_per_pos),
        num_steps=c.num_steps,
        num_memory_tokens=c.num_memory_tokens,
        num_accepted_memory_tokens=c.num_accepted_memory_tokens,
        num_output_tokens=c.num_output_tokens,
        num_finished=2,
        num_captured=2,
        decode_seconds=0.5,
        num_decode_tokens=60,
    )


@contextmanager
def served(scene: Scene, port: int = 0) -> Iterator[str]:
    """The control port over the scene, at the returned URL; port 0 means any free port."""
    config = uvicorn.Config(
        build_app(scene, scene.history, TOKEN), host="127.0.0.1", port=port, log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.config.app.state.stopping.set()
        server.should_exit = True
        thread.join(10)
