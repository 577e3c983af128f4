"""`osd bench serving`: the whole service compared with vLLM alone. Both are up and take turns on
the same traffic.

    bare       `python -m vllm.entrypoints.openai.api_server`, same models, same sizes
    idle       `osd serve`: capture on, trainer up but paused
    training   `osd serve`: capture on, one training round after the other on the same machine

No draft is ever published (`gate.min_gain`), so all arms propose the same tokens. For some seconds
after its last request the service still fetches its engine's counters, which keeps a core busy;
`SECONDS_TO_SETTLE` waits for that.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import Estimate, estimate, median_ratio, quantile
from osd.errors import ConfigError, OSDError

PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"
ARMS = ("bare", "idle", "training")
NAME = "tiny"
SEED = 40_000
SECONDS_TO_SETTLE = {"bare": 1.5, "service": 4.5}
REQUESTS = {1: 12, 8: 24, 32: 48}
"""Streams -> requests per burst."""
LOOKS = "looks that saw a training round"
METRICS = {
    "throughput": "tokens/s",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "seconds": "request latency",
}


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="serving",
        question="What do capture, buffer, control and trainer cost the users of the service?",
        arms=ARMS,
        order="Per number of streams bare, idle, training, then in the other order, with the same "
        "prompts in each arm.",
        sizes={
            "preset": "configs/tiny-cpu.yaml",
            "target": "tiny" if options.quick else "tiny-cost-shaped",
            "requests_per_burst": {str(n): m for n, m in REQUESTS.items()},
            "streams": (1, 8) if options.quick else tuple(REQUESTS),
            "max_tokens": 40,
            "temperature": 0.0,
            "num_cycles": 2 if options.quick else 5,
            "seconds_to_settle": SECONDS_TO_SETTLE,
        },
        goals=(
            Goal(figure="tokens/s, idle / bare", at_least=0.97),
            Goal(figure="TPOT, idle / bare", at_most=1.03),
            Goal(figure=LOOKS, at_least=0.3),  # else nothing is known of training
        ),
    )


def run(options: Options) -> Result:
    """Start both servers, drive them in turns, stop them."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    with ExitStack() as stack:
        both = _start(stack, options, plan)
        for cycle in range(-1, plan.sizes["num_cycles"]):  # the first warms up
            if cycle >= 0:
                options.say(f"cycle {cycle + 1} of {plan.sizes['num_cycles']}")
            for i, streams in enumerate(plan.sizes["streams"]):
                arms = ARMS if (cycle + i) % 2 else ARMS[::-1]
                for arm in arms:
                    row = both.burst(arm, streams, cycle, plan.sizes["max_tokens"])
                    if cycle >= 0:
                        notebook.add(
                            group=f"{streams} stream{'s' * (streams > 1)}",
                            arm=arm,
                            cycle=cycle,
                            **row,
                        )
    return summarise(plan, notebook.rows)


def _start(stack: ExitStack, options: Options, plan: Protocol) -> _Both:
    from benchmarks.service import servers
    from osd.client.http import Client
    from osd.config import reading
    from osd.service.plan import free_port
    from osd.tiny.models import ensure, ensure_cost_shaped

    if not PRESET.is_file():
        raise ConfigError(f"{PRESET}: not found; run the bench from a checkout of the project")
    target = plan.sizes["target"]
    target_dir = ensure().target if target == "tiny" else ensure_cost_shaped()
    data = stack.enter_context(tempfile.TemporaryDirectory(prefix="osd-bench-"))
    deployment = f"bench-{os.getpid()}"
    overrides = _overrides(target, deployment, data)
    config = reading.load(PRESET, overrides).config
    serving = config.serving
    port = free_port("127.0.0.1")
    bare = servers.vllm_command(
        target_dir,
        ensure().draft,
        name=NAME,
        port=port,
        k=config.speculation.k_max,
        options=serving.vllm,
    )
    options.say("starting vLLM and the service")
    bare_log, log = options.directory / "bare.log", options.directory / "service.log"
    bare_child = stack.enter_context(
        servers.process(bare, bare_log, {**serving.env, "VLLM_NO_USAGE_STATS": "1"})
    )
    child = stack.enter_context(servers.process(servers.serve_command(PRESET, overrides), log, {}))
    servers.wait_for_health(bare_child, bare_url := f"http://127.0.0.1:{port}", bare_log)
    running = servers.wait_for_service(child, deployment, log)
    return _Both(bare_url, running.service_url, Client(running.control_url, token=running.token))


def _overrides(target: str, deployment: str, data: str) -> list[str]:
    return [
        f"serving.target={target}",
        f"deployment={deployment}",
        f"data_dir={data}",
        "serving.port=0",
        "control.port=0",
        f"serving.vllm.max_num_seqs={max(REQUESTS)}",
        # The same prompts are sent to the service twice; a prefix cache would favour the second
        # time.
        "serving.vllm.enable_prefix_caching=false",
        "speculation.mode=fixed",  # as vLLM's own: what is measured is capture and training
        "gate.min_gain=0.99",
        "trainer.min_new_traces=1",
        "trainer.patience_rounds=0",  # it never rests
    ]


@dataclass(slots=True)
class _Both:
    """Both servers, and which of them was busy last."""

    bare_url: str
    service_url: str
    client: Any
    last: str = "bare"

    def burst(self, arm: str, streams: int, cycle: int, max_tokens: int) -> Row:
        """Some requests to one arm, after the other has come to rest."""
        from osd.client.load import drive
        from osd.tiny.traffic import HOME, requests

        self._prepare(arm)
        count = REQUESTS[streams]
        prompts = [
            r.prompt for r in requests(HOME, count, SEED + streams, start=(cycle + 1) * count)
        ]
        url = self.bare_url if arm == "bare" else self.service_url
        phase = self._phase()
        answers = asyncio.run(drive(url, NAME, prompts, streams=streams, max_tokens=max_tokens))
        if failed := [a.error for a in answers if not a.ok]:
            raise OSDError(f"{arm}: {len(failed)} of {len(answers)} requests failed: {failed[0]}")
        return {
            # From the first request to the last token: what the client needs to begin is not the
            # server's.
            "seconds": max(a.started + a.seconds for a in answers)
            - min(a.started for a in answers),
            "phases": [phase, self._phase()],
            "requests": [
                {
                    "tokens": len(a.token_ids),
                    "ttft_s": a.ttft_s,
                    "seconds": a.seconds,
                    "hash": hash(a.token_ids),
                }
                for a in answers
            ],
        }

    def _prepare(self, arm: str) -> None:
        server = "bare" if arm == "bare" else "service"
        self.client.admin("resume" if arm == "training" else "pause")
        self._wait_for_phase("training" if arm == "training" else "waiting")
        if server != self.last:
            time.sleep(SECONDS_TO_SETTLE[self.last])
            self.last = server

    def _wait_for_phase(self, phase: str) -> None:
        deadline = time.monotonic() + 10  # the first time there may be nothing to train on
        while self._phase() != phase and time.monotonic() < deadline:
            time.sleep(0.1)

    def _phase(self) -> str:
        return str(self.client.get("/osd/status")["phase"])


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Figures per number of streams."""
    figures: list[Figure] = []
    drawings = []
    for metric in ("throughput", "tpot_s"):
        spread: list[tuple[str, Estimate, tuple[float, ...]]] = []
        for group in _groups(rows):
            mine = _per_burst(rows, group, metric)
            for arm in ARMS[1:]:
                observed = tuple(a / b for a, b in zip(mine[arm], mine["bare"], strict=True))
                spread.append((f"{group}, {arm}", median_ratio(mine[arm], mine["bare"]), observed))
        title = f"{METRICS[metric]}, service over bare vLLM"
        drawings.append(Spread(title=title, unit="ratio", rows=tuple(spread), reference=1.0))
    for group in _groups(rows):
        figures += [f for metric in METRICS for f in _metric(rows, group, metric)]
        figures += _checks(rows, group)
    return Result(protocol=plan, figures=tuple(figures), drawings=tuple(drawings))


def _groups(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["group"] for row in rows))


def _per_burst(rows: Sequence[Row], group: str, metric: str) -> dict[str, list[float]]:
    """arm -> one number per burst, in the order of cycles: the throughput, or the median of the
    requests."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for row in sorted((r for r in rows if r["group"] == group), key=lambda r: r["cycle"]):
        if metric == "throughput":
            value = sum(r["tokens"] for r in row["requests"]) / row["seconds"]
        else:
            value = median(_values(row, metric))
        found[row["arm"]].append(value)
    return found


def _values(row: Row, metric: str) -> list[float]:
    """One number per request."""
    if metric == "tpot_s":
        return [
            (r["seconds"] - r["ttft_s"]) / (r["tokens"] - 1)
            for r in row["requests"]
            if r["tokens"] > 1
        ]
    return [r[metric] for r in row["requests"]]


def _metric(rows: Sequence[Row], group: str, metric: str) -> list[Figure]:
    name, per_burst = METRICS[metric], _per_burst(rows, group, metric)
    figures = [
        Figure.of(group, f"{name}, {arm} / bare", median_ratio(per_burst[arm], per_burst["bare"]))
        for arm in ARMS[1:]
    ]
    for arm in ARMS:
        if metric == "throughput":
            figures.append(Figure.of(group, f"{name}, {arm}", estimate(per_burst[arm]), "/s"))
            continue
        values = [
            1e3 * v
            for row in rows
            if (row["group"], row["arm"]) == (group, arm)
            for v in _values(row, metric)
        ]
        for label, q in (("p50", 0.5), ("p99", 0.99)):
            value = quantile(values, q)
            figures.append(
                Figure(
                    group=group,
                    name=f"{name} {label}, {arm}",
                    value=value,
                    unit="ms",
                    n=len(values),
                )
            )
    return figures


def _checks(rows: Sequence[Row], group: str) -> list[Figure]:
    """Whether the arms did the same work, and whether the trainer was at it."""
    mine = {(row["arm"], row["cycle"]): row for row in rows if row["group"] == group}
    num_compared = num_different = 0
    for (arm, cycle), row in mine.items():
        for ours, theirs in zip(row["requests"], mine["bare", cycle]["requests"], strict=True):
            num_compared += arm != "bare"
            num_different += ours["hash"] != theirs["hash"]
    phases = [
        phase == "training"
        for (arm, _), row in mine.items()
        if arm == "training"
        for phase in row["phases"]
    ]
    share = sum(phases) / max(len(phases), 1)
    return [
        Figure(
            group=group,
            name="answers that differ from bare vLLM's",
            value=num_different,
            n=num_compared,
        ),
        Figure(group=group, name=LOOKS, value=share, n=len(phases)),
    ]
