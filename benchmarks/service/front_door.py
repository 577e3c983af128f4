"""`osd bench front_door`: what HAProxy before an engine costs its clients and the machine.

One vLLM server alone, asked in turns at its own port and through a front door that has it as its
only replica: the same engine answers in both arms. Beside it, where it is installed, a vLLM server
in a replica of Ray Serve, at a port of its own and through Serve's HAProxy; and two such replicas
behind each of the two HAProxies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import psutil

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Result, Spread
from benchmarks.service import front_door_serve as serve
from benchmarks.stats import Estimate, estimate, median_ratio
from osd.errors import OSDError

if TYPE_CHECKING:
    from osd.service.fleet.front_door import FrontDoor

NAME, K, MAX_TOKENS, SEED = "bench", 4, 40, 52_000
BARE, DOOR = "engine's own port", "front door"
SERVE_BARE, SERVE = "own port of an engine in Serve", "Serve"
TWO_DOOR, TWO_SERVE = "front door, two replicas", "Serve, two replicas"
REQUESTS = {1: 6, 8: 24, 32: 64}
"""Streams -> requests of a turn."""
SPEED, TTFT = "tokens/s over the engine's own port", "TTFT over the engine's own port"
ENGINE_CPU = "engine's CPU seconds per token over its own port"
SERVER_CPU = "server process's CPU per token at its own port"
MORE_CPU = "server process's CPU per token, more than at its own port"
DOOR_CPU = "HAProxy's CPU per token"
IN_SERVE = "tokens/s of an engine in Serve over one alone, both at their own ports"
IDLE = {
    BARE: {"engine": "engine's CPU while idle"},
    DOOR: {"door": "HAProxy's CPU while idle"},
    SERVE: {
        "engine": "CPU while idle of an engine in Serve",
        "door": "CPU while idle of Serve's HAProxy",
        "others": "CPU while idle of Serve's other processes, Ray's not counted",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Where an arm is asked, and the processes that work for it."""

    url: str
    engine: tuple[int, ...]
    door: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by part. `server` is the engine's process that answers HTTP, without
        that of the model."""
        engine, door = (sum(map(cpu_seconds, pids)) for pids in (self.engine, self.door))
        server, others = (sum(map(own_cpu_seconds, pids)) for pids in (self.engine, self.others))
        return {"engine": engine, "server": server, "door": door, "others": others}


def protocol(options: Options, left_out: str = "") -> Protocol:
    """What will be measured. `left_out` says why nothing in Ray Serve is."""
    with_serve = () if left_out else (SERVE_BARE, SERVE, TWO_DOOR, TWO_SERVE)
    return Protocol(
        bench="front_door",
        question="What does a front door before the engines cost?",
        arms=(BARE, DOOR, *with_serve),
        order="Both ports of one engine take turns with the same prompts, now one first, now the "
        "other. At last nothing is asked for a while. Then two engines are asked, through either "
        "HAProxy.",
        sizes={
            "streams": [1, 8] if options.quick else list(REQUESTS),
            "requests_per_turn": {str(n): m for n, m in REQUESTS.items()},
            "max_tokens": MAX_TOKENS,
            "num_pairs": 2 if options.quick else 16,
            "idle_seconds": 5 if options.quick else 30,
            "target": "the tiny target at the cost of a model of 77 M parameters",
            "serve": left_out or ", ".join(f"{k}={v}" for k, v in serve.SWITCHES.items()),
            "streams_of_two_replicas": [8] if options.quick else [8, 32],
        },
        goals=(
            Goal(figure=SPEED, bound="high", at_least=1.0),
            Goal(figure=TTFT, at_most=1.1),
        ),
    )


def run(options: Options) -> Result:
    """Start an engine and a front door, and drive both ports in turns; then Serve's."""
    if left_out := serve.left_out():
        options.say(left_out)
    plan = protocol(options, left_out)
    notebook = Notebook(options, plan)
    with ExitStack() as stack:
        url, pid = _engine(stack, options)
        door = _front_door(stack, options, [url])
        ways = {
            BARE: Way(url=url, engine=(pid,)),
            DOOR: Way(url=door.url, engine=(pid,), door=(door.pid,)),
        }
        if not left_out:
            served = serve.start(stack, options.directory, *_command(options), 1)
            ways |= {
                SERVE_BARE: Way(url=served.own_urls[0], engine=served.replicas),
                SERVE: _through(served),
            }
        _take_turns(notebook, ways, plan.sizes["streams"], title, options)
        before, seconds = {arm: way.cpu() for arm, way in ways.items()}, plan.sizes["idle_seconds"]
        time.sleep(seconds)
        for arm in IDLE:
            if arm in ways:
                spent = _spent(before[arm], ways[arm].cpu())
                notebook.add(group="idle", arm=arm, pair=0, seconds=seconds, **spent)
    if not left_out:
        with ExitStack() as stack:
            served = serve.start(stack, options.directory, *_command(options), 2)
            door = _front_door(stack, options, served.own_urls)
            ways = {
                TWO_DOOR: Way(url=door.url, engine=served.replicas, door=(door.pid,)),
                TWO_SERVE: _through(served),
            }
            streams = plan.sizes["streams_of_two_replicas"]
            _take_turns(notebook, ways, streams, title_of_two, options)
    return summarise(plan, notebook.rows)


def _through(served: serve.Served) -> Way:
    return Way(url=served.url, engine=served.replicas, door=served.haproxy, others=served.others)


def _front_door(stack: ExitStack, options: Options, urls: Sequence[str]) -> FrontDoor:
    from osd.service.fleet.front_door import FrontDoor
    from osd.service.plan import free_port

    log = options.directory / "front-door.log"
    door = FrontDoor("127.0.0.1", free_port("127.0.0.1"), dict, log=log)
    stack.callback(door.stop)
    door.start().follow({f"replica-{i}": url for i, url in enumerate(urls)})
    return door


def _take_turns(
    notebook: Notebook,
    ways: Mapping[str, Way],
    streams: Sequence[int],
    group: Callable[[int], str],
    options: Options,
) -> None:
    num_pairs = protocol(options).sizes["num_pairs"]
    for pair in range(-1, num_pairs):  # the first warms up
        options.say(f"pair {pair + 1} of {num_pairs}: {', '.join(ways)}")
        for num in streams:
            for arm in list(ways)[:: 1 if pair % 2 else -1]:
                before = ways[arm].cpu()
                row = _turn(ways[arm].url, num, pair) | _spent(before, ways[arm].cpu())
                if pair >= 0:
                    notebook.add(group=group(num), arm=arm, pair=pair, **row)


def _spent(before: Mapping[str, float], after: Mapping[str, float]) -> Row:
    return {f"{part}_cpu_seconds": after[part] - before[part] for part in before}


def _command(options: Options) -> tuple[list[str], dict[str, str]]:
    """What starts vLLM's own server, and its environment."""
    from benchmarks.service import servers
    from osd.config import reading
    from osd.service.plan import free_port
    from osd.tiny.models import ensure, ensure_cost_shaped

    preset = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"
    serving = reading.load(preset, []).config.serving
    given = {**serving.vllm, "max_num_seqs": max(REQUESTS), "enable_prefix_caching": False}
    command = servers.vllm_command(
        ensure_cost_shaped(),
        ensure().draft,
        name=NAME,
        port=free_port("127.0.0.1"),
        k=K,
        options=given,
    )
    return command, {**serving.env, "VLLM_NO_USAGE_STATS": "1"}


def _engine(stack: ExitStack, options: Options) -> tuple[str, int]:
    """vLLM's own server: its URL and process."""
    from benchmarks.service import servers

    log = options.directory / "engine.log"
    command, env = _command(options)
    child = stack.enter_context(servers.process(command, log, env))
    port = command[command.index("--port") + 1]
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
    below = psutil.Process(pid).children(recursive=True)
    return sum(map(own_cpu_seconds, (pid, *(process.pid for process in below))))


def own_cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Each figure through a front door over the same without, by streams."""
    figures, spread = list[Figure](), []
    for group in dict.fromkeys(row["group"] for row in rows):
        arms = {
            arm: [row for row in rows if (row["group"], row["arm"]) == (group, arm)]
            for arm in plan.arms
        }
        for arm, base in ((DOOR, BARE), (SERVE, SERVE_BARE), (TWO_SERVE, TWO_DOOR)):
            if group != "idle" and arms.get(arm):
                figures += _compare(group, arm, arms[arm], arms[base])
                found = median_ratio(_speeds(arms[arm]), _speeds(arms[base]))
                spread.append((f"{group}: {arm} / {base}", found, ()))
        if group != "idle" and arms.get(SERVE_BARE):
            found = median_ratio(_speeds(arms[SERVE_BARE]), _speeds(arms[BARE]))
            figures.append(Figure.of(group, IN_SERVE, found))
    for row in (row for row in rows if row["group"] == "idle"):
        for part, name in IDLE[row["arm"]].items():
            share = 100 * row[f"{part}_cpu_seconds"] / row["seconds"]
            figures.append(Figure(group="idle", name=name, value=share, unit="% of a core"))
    drawing = Spread(
        title="tokens/s, one way over the other", unit="ratio", rows=tuple(spread), reference=1.0
    )
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def _compare(group: str, arm: str, rows: Sequence[Row], base: Sequence[Row]) -> Iterator[Figure]:
    """The figures of an arm over its base."""
    cpu, cpu_of_base = _per_token(rows, "engine"), _per_token(base, "engine")
    server, server_of_base = (np.array(_per_token(some, "server")) for some in (rows, base))
    ttft, ttft_of_base = ([row["ttft_s"] for row in some] for some in (rows, base))
    found: dict[str, tuple[Estimate, str]] = {
        SPEED: (median_ratio(_speeds(rows), _speeds(base)), ""),
        TTFT: (median_ratio(ttft, ttft_of_base), ""),
        ENGINE_CPU: (median_ratio(cpu, cpu_of_base), ""),
        # The mean: a tick of the clock is as long as some differences.
        SERVER_CPU: (estimate(server_of_base, np.mean), "µs"),
        MORE_CPU: (estimate(server - server_of_base, np.mean), "µs"),
        DOOR_CPU: (estimate(_per_token(rows, "door")), "µs"),
    }
    for name, (figure, unit) in found.items():
        yield Figure.of(group, named(name, arm), figure, unit)
    if arm == TWO_SERVE:
        yield Figure.of(group, DOOR_CPU, estimate(_per_token(base, "door")), "µs")


def named(name: str, arm: str) -> str:
    """A figure of the front door, as it is called for another arm."""
    if arm == DOOR:
        return name
    if arm == TWO_SERVE:
        for own in ("the engine's own port", "its own port"):
            name = name.replace(own, "the front door")
    return f"{arm}: {name}"


def _speeds(rows: Sequence[Row]) -> list[float]:
    return [row["num_tokens"] / row["seconds"] for row in rows]


def _per_token(rows: Sequence[Row], part: str) -> list[float]:
    """µs of CPU per token."""
    return [1e6 * row[f"{part}_cpu_seconds"] / row["num_tokens"] for row in rows]


def title(streams: int) -> str:
    return f"{streams} stream{'s' if streams > 1 else ''}"


def title_of_two(streams: int) -> str:
    return f"2 replicas, {title(streams)}"
