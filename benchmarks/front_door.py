"""`osd bench front_door`: what HAProxy before an engine costs its clients and the machine.

One vLLM server alone, asked in turns at its own port and through a front door that has it as its
only replica: the same engine answers in both arms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.stats import estimate, median_ratio
from osd.errors import OSDError

NAME, K, MAX_TOKENS, SEED = "bench", 4, 40, 52_000
BARE, DOOR = "engine's own port", "front door"
REQUESTS = {1: 6, 8: 24, 32: 64}
"""Streams -> requests of a turn."""
SPEED, TTFT = "tokens/s over the engine's own port", "TTFT over the engine's own port"
ENGINE_CPU = "engine's CPU seconds per token over its own port"
DOOR_CPU, IDLE = "HAProxy's CPU per token", "HAProxy's CPU while idle"


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    return Protocol(
        bench="front_door",
        question="What does a front door before the engines cost?",
        arms=(BARE, DOOR),
        order="Both ports of one engine take turns with the same prompts, now one first, now the "
        "other. At last nothing is asked for a while.",
        sizes={
            "streams": [1, 8] if options.quick else list(REQUESTS),
            "requests_per_turn": {str(n): m for n, m in REQUESTS.items()},
            "max_tokens": MAX_TOKENS,
            "num_pairs": 2 if options.quick else 16,
            "idle_seconds": 5 if options.quick else 30,
            "target": "the tiny target at the cost of a model of 77 M parameters",
        },
        goals=(
            Goal(figure=SPEED, bound="high", at_least=1.0),
            Goal(figure=TTFT, at_most=1.1),
        ),
    )


def run(options: Options) -> Result:
    """Start an engine and a front door, and drive both ports in turns."""
    from osd.service.fleet.front_door import FrontDoor
    from osd.service.plan import free_port

    plan = protocol(options)
    notebook = Notebook(options, plan)
    with ExitStack() as stack:
        url, pid = _engine(stack, options)
        door = FrontDoor(
            "127.0.0.1",
            free_port("127.0.0.1"),
            dict,
            log=options.directory / "front-door.log",
        )
        stack.callback(door.stop)
        door.start().follow({"replica-0": url})
        urls = {BARE: url, DOOR: door.url}
        for pair in range(-1, plan.sizes["num_pairs"]):  # the first warms up
            options.say(f"pair {pair + 1} of {plan.sizes['num_pairs']}")
            for streams in plan.sizes["streams"]:
                for arm in plan.arms[:: 1 if pair % 2 else -1]:
                    before = cpu_seconds(pid), cpu_seconds(door.pid)
                    row = _turn(urls[arm], streams, pair)
                    row |= {
                        "engine_cpu_seconds": cpu_seconds(pid) - before[0],
                        "door_cpu_seconds": cpu_seconds(door.pid) - before[1],
                    }
                    if pair >= 0:
                        notebook.add(group=title(streams), arm=arm, pair=pair, **row)
        before_s, seconds = cpu_seconds(door.pid), plan.sizes["idle_seconds"]
        time.sleep(seconds)
        row = {"seconds": seconds, "door_cpu_seconds": cpu_seconds(door.pid) - before_s}
        notebook.add(group="idle", arm=DOOR, pair=0, **row)
    return summarise(plan, notebook.rows)


def _engine(stack: ExitStack, options: Options) -> tuple[str, int]:
    """vLLM's own server: its URL and process."""
    from benchmarks import servers
    from osd.config import reading
    from osd.service.plan import free_port
    from osd.tiny.models import ensure, ensure_cost_shaped

    preset = Path(__file__).resolve().parents[1] / "configs" / "tiny-cpu.yaml"
    serving = reading.load(preset, []).config.serving
    port, log = free_port("127.0.0.1"), options.directory / "engine.log"
    given = {**serving.vllm, "max_num_seqs": max(REQUESTS), "enable_prefix_caching": False}
    command = servers.vllm_command(
        ensure_cost_shaped(), ensure().draft, name=NAME, port=port, k=K, options=given
    )
    child = stack.enter_context(
        servers.process(command, log, {**serving.env, "VLLM_NO_USAGE_STATS": "1"})
    )
    servers.wait_for_health(child, url := f"http://127.0.0.1:{port}", log)
    return url, child.pid


def _turn(url: str, streams: int, pair: int) -> Row:
    from osd.client.load import drive
    from osd.tiny.traffic import HOME, requests

    count = REQUESTS[streams]
    prompts = [r.prompt for r in requests(HOME, count, SEED, start=(pair + 1) * count)]
    answers = asyncio.run(drive(url, NAME, prompts, streams=streams, max_tokens=MAX_TOKENS))
    if failed := [a.error for a in answers if not a.ok]:
        raise OSDError(f"{url}: {len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return {
        "seconds": max(a.started + a.seconds for a in answers) - min(a.started for a in answers),
        "num_tokens": sum(len(a.token_ids) for a in answers),
        "ttft_s": median(a.ttft_s for a in answers),
    }


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of what lives below it."""
    first = psutil.Process(pid)
    times = [process.cpu_times() for process in (first, *first.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Each figure through the front door over the same at the engine's own port, by streams."""
    figures, spread = list[Figure](), []
    for group in [g for g in dict.fromkeys(row["group"] for row in rows) if g != "idle"]:
        door, bare = (
            [row for row in rows if (row["group"], row["arm"]) == (group, arm)]
            for arm in (DOOR, BARE)
        )

        def over(value: Any, door: Any = door, bare: Any = bare) -> Any:
            return median_ratio([value(row) for row in door], [value(row) for row in bare])

        speed = over(lambda row: row["num_tokens"] / row["seconds"])
        cpu = [1e6 * row["door_cpu_seconds"] / row["num_tokens"] for row in door]
        figures += [
            Figure.of(group, SPEED, speed),
            Figure.of(group, TTFT, over(lambda row: row["ttft_s"])),
            Figure.of(
                group, ENGINE_CPU, over(lambda row: row["engine_cpu_seconds"] / row["num_tokens"])
            ),
            Figure.of(group, DOOR_CPU, estimate(cpu), "µs"),
        ]
        spread.append((group, speed, ()))
    for row in (row for row in rows if row["group"] == "idle"):
        share = 100 * row["door_cpu_seconds"] / row["seconds"]
        figures.append(Figure(group="idle", name=IDLE, value=share, unit="% of a core"))
    drawing = Spread(title=SPEED, unit="ratio", rows=tuple(spread), reference=1.0)
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def title(streams: int) -> str:
    return f"{streams} stream{'s' if streams > 1 else ''}"
