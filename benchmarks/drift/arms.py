"""The contenders of `osd bench drift_speed` as servers. Each is a tree of processes, beside a plain
engine.

contender    `osd serve`, trainer on or off, or `vllm serve` with n-gram speculation
reference    `vllm serve` without speculation: same target, same options; or a service, too
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.drift import names
from benchmarks.drift.jobs import PRESET, base_config
from benchmarks.service import servers
from benchmarks.service.serving import NAME, SECONDS_TO_SETTLE
from osd.client.http import Client
from osd.config.schema import Config
from osd.service.plan import free_port

SECONDS_OF_QUIET = 1.2
"""No training for so long: none is coming, as the control loop looks twice a second."""
SECONDS_BETWEEN_LOOKS = 0.2
IN_CLOSED_LOOP = (names.FROZEN_LOOP, names.SERVED)
"""As `osd serve` serves by default, trainer off and on."""
WITHOUT_MEMORY = (names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP)
"""The same without a memory."""
DRAWN = (names.DRAWN_DRAFT_LOOP, names.DRAWN_SERVED)
"""With sampled drafts alone."""
MIXED = (names.MIXED_FROZEN_LOOP, names.MIXED_SERVED)
"""With sampled drafts, and the memory beside them."""
CLOSED_LOOPS = (*IN_CLOSED_LOOP, *WITHOUT_MEMORY, *DRAWN, *MIXED)
SERVICE_ARMS = (names.FROZEN, names.OURS, names.OURS_LORA, *CLOSED_LOOPS)
LOOKUPS: dict[str, dict[str, Any]] = {names.NGRAM: {}, names.NGRAM_TUNED: names.LOOKUP_TUNED}
"""Arm -> what vLLM is told of n-gram lookup beside k."""
JUDGED = {
    "osd_spec_position_tested": "tested",
    "osd_spec_position_accepted": "accepted",
}
"""Metric of the control port -> what it counts."""
ARMS = (names.FROZEN, *LOOKUPS, names.OURS, names.OURS_LORA, *CLOSED_LOOPS)


@dataclass(slots=True)
class Server:
    """A running server, and what its processes have used."""

    url: str
    pid: int
    kind: str
    """"bare" or "service"."""
    client: Client | None = None

    def cpu_seconds(self) -> float:
        """CPU time so far of all its processes, trainer, Ray and replay buffer included."""
        return tree_cpu_seconds(self.pid)

    def is_busy(self) -> bool:
        """Whether a round is under way, or a draft on its way into the engine."""
        if self.client is None:
            return False
        status = self.client.get("/osd/status")
        return status["phase"] != "waiting" or any(
            r["version"] != status["version"] for r in status["replicas"]
        )

    def facts(self) -> dict[str, Any]:
        """Version, rounds and swaps so far."""
        if self.client is None:
            return {}
        status = self.client.get("/osd/status")
        return {
            name: status[name] for name in ("version", "num_rounds", "num_swaps", "num_rollbacks")
        }

    def judged(self) -> Counter[str]:
        """Draft tokens so far that were `tested` (all before them accepted), and how many of them
        were `accepted`, whoever proposed them; of a service."""
        found: Counter[str] = Counter()
        if self.client is None:
            return found
        page = httpx.get(f"{self.client.url}/metrics").raise_for_status().text
        for family in text_string_to_metric_families(page):
            if what := JUDGED.get(family.name):
                found[what] += sum(
                    int(one.value) for one in family.samples if one.name.endswith("_total")
                )
        return found

    def settle(self, since: float) -> tuple[float, float]:
        """Wait until its training is over and its engine at rest: (when training ended, CPU time by
        then).

        `since`: when its last answer came (`time.perf_counter`).
        """
        ended, spent = since, self.cpu_seconds()
        while time.perf_counter() - ended < SECONDS_OF_QUIET:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            if self.is_busy():
                ended, spent = time.perf_counter(), self.cpu_seconds()
        time.sleep(max(0.0, since + SECONDS_TO_SETTLE[self.kind] - time.perf_counter()))
        return ended, spent


@contextmanager
def both(
    arm: str,
    target: Path,
    draft: Path,
    directory: Path,
    logs: Path,
    payback_s: float | None = None,
    against: str | None = None,
) -> Iterator[tuple[Server, Server]]:
    """The contender and the reference, up at once; both gone afterwards. `payback_s`: within which
    training has to pay in a closed loop; None = the default. `against`: the arm of a service that
    is the reference; None = no speculation."""
    config, own = base_config(), f"drift-{os.getpid()}"
    with ExitStack() as stack:
        if against is None:
            reference = _start_bare(stack, config, target, None, logs / "no-speculation.log")
        else:
            other = directory / "reference"
            given = overrides(against, config, target, draft, other, payback_s)
            reference = _start_service(stack, given, f"{own}-reference", logs / "reference.log")
        if arm in SERVICE_ARMS:
            given = overrides(arm, config, target, draft, directory / "contender", payback_s)
            contender = _start_service(stack, given, own, logs / "contender.log")
        else:
            speculation = {"method": "ngram", "num_speculative_tokens": config.speculation.k_max}
            speculation |= LOOKUPS[arm]
            contender = _start_bare(stack, config, target, speculation, logs / "contender.log")
        yield contender(), reference()


def overrides(
    arm: str,
    config: Config,
    target: Path,
    draft: Path,
    directory: Path,
    payback_s: float | None = None,
) -> list[str]:
    """What `osd serve` is told beside the preset."""
    found = [
        f"serving.target={target}",
        f"serving.draft={draft}",
        f"speculation.mode={'auto' if arm in CLOSED_LOOPS else 'fixed'}",
        f"serving.served_model_name={NAME}",
        f"data_dir={directory}",
        "serving.port=0",
        "control.port=0",
        "serving.vllm.enable_prefix_caching=false",
    ]
    if arm in CLOSED_LOOPS and payback_s is not None:
        found += [f"trainer.payback_seconds={payback_s}"]
    if arm in (*WITHOUT_MEMORY, *DRAWN):
        found += ["speculation.proposers=[draft]"]
    if arm in (*DRAWN, *MIXED):
        found += ["speculation.draft_sample_method=probabilistic"]
    if arm in names.UNTRAINED:
        found += ["trainer.enabled=false"]
    if arm == names.FROZEN:
        found += ["capture.enabled=false"]
    if arm == names.OURS_LORA:
        found += [
            "trainer.method=lora",
            f"trainer.learning_rate={names.LORA_RATE * config.trainer.learning_rate}",
        ]
    return found


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of all its descendants, those that have ended included."""
    try:
        tree = [root := psutil.Process(pid), *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    return sum(map(_cpu_seconds, tree))


def _cpu_seconds(process: psutil.Process) -> float:
    """User and system time, its own and that of children it has waited for."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def _start_bare(
    stack: ExitStack, config: Config, target: Path, speculation: dict[str, Any] | None, log: Path
) -> Any:
    """Begin; what is returned waits until it answers."""
    port = free_port("127.0.0.1")
    options = {**config.serving.vllm, "enable_prefix_caching": False}
    command = servers.bare_command(target, speculation, name=NAME, port=port, options=options)
    child = stack.enter_context(
        servers.process(command, log, {**config.serving.env, "VLLM_NO_USAGE_STATS": "1"})
    )
    url = f"http://127.0.0.1:{port}"

    def wait() -> Server:
        servers.wait_for_health(child, url, log)
        return Server(url=url, pid=child.pid, kind="bare")

    return wait


def _start_service(stack: ExitStack, given: list[str], deployment: str, log: Path) -> Any:
    """Begin; what is returned waits until it answers."""
    command = servers.serve_command(PRESET, [*given, f"deployment={deployment}"])
    child = stack.enter_context(servers.process(command, log, {}))

    def wait() -> Server:
        running = servers.wait_for_service(child, deployment, log)
        client = Client(running.control_url, token=running.token)
        return Server(url=running.service_url, pid=child.pid, kind="service", client=client)

    return wait
