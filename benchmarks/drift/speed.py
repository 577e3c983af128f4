"""`osd bench drift_speed`: speed and CPU time on drifting traffic with real vLLM, over an engine
without speculation.

Contender and reference are both up, each a tree of processes; on some schedules the reference is
the identical service with its trainer off. The schedule is served in chunks of
24 requests (208 on some of them, so that most rounds end within a turn): contender and reference
take turns to serve the same chunk, and the other one is idle. Neighbours in time are compared.

What makes the comparison fair:
* While the contender serves, its trainer runs on the same cores whenever a round is due. The
  figures include what that takes from serving.
* A round that is running when a chunk ends continues to its end, and its draft is swapped in. These
  seconds are added to the contender's time as if nothing had been served in them ("charged"). In
  continuous traffic some requests would have been served, so the charged figure is a lower bound
  and the figure of traffic alone an upper bound.
* Nothing is trained while the reference serves, because no round is due without traffic.
* CPU time covers all processes of a tree, with trainer, Ray and replay buffer, from a chunk's first
  request to its last answer or the end of its training.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drift import arms, jobs, names
from benchmarks.drift.arms import Server
from benchmarks.drift.speed_report import NO_SPECULATION, acceptance_of, summarise
from benchmarks.parts import narrowed
from benchmarks.record import Notebook, Options, Protocol, Row
from benchmarks.replays.charged import WITHIN_S
from benchmarks.result import Result
from benchmarks.service.serving import NAME
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, Family
from benchmarks.traffic.schedule import DIRECTORY, Schedule, arrivals, read, read_all
from osd.client.load import Answer, drive
from osd.errors import ConfigError, OSDError

__all__ = ["protocol", "run", "summarise"]

OF_PROSE = (*arms.WITHOUT_MEMORY, *arms.DRAWN, *arms.MIXED)
GENERATED = tuple(arm for arm in arms.ARMS if arm not in OF_PROSE)
PROSE, PROSE_HEAD = "home-and-de", "home-and-de-head"
LARGE = tuple(f"{PROSE}-large-{n}" for n in (1, 2))
"""A target that costs as much as one of 273 M parameters, for so many requests at a time."""
PAIRED = tuple(f"{name}-paired" for name in (*LARGE, f"{PROSE}-large-2-return"))
"""The same next to the identical service with its trainer off; the last one with more of the
traffic that returns."""
LONG_TURNS = {f"{name}-paired": name for name in ("sharp", "interleaved")}
"""The generated ones so, and the schedule whose requests each serves."""
AGAINST = {
    **dict.fromkeys(PAIRED, names.MIXED_FROZEN_LOOP),
    **dict.fromkeys(LONG_TURNS, names.FROZEN_LOOP),
}
"""Schedule -> the reference, where that is not an engine without speculation."""
STREAMS = 4
FEWER_STREAMS = dict(zip((*LARGE, *PAIRED), (1, 2, 1, 2, 2), strict=True))
"""Schedule -> requests at a time, where they are not as many."""
ARMS = {
    "sharp": GENERATED,
    "interleaved": arms.IN_CLOSED_LOOP,
    PROSE: (*OF_PROSE, *arms.IN_CLOSED_LOOP),
    PROSE_HEAD: arms.WITHOUT_MEMORY,
    **dict.fromkeys(LARGE, arms.MIXED),
    **dict.fromkeys(PAIRED, (names.MIXED_SERVED,)),
    **dict.fromkeys(LONG_TURNS, (names.SERVED, names.FROZEN_LOOP)),
}
"""Schedule -> who serves it. Trainer off next to trainer off shows what chance makes."""
PAYBACK_S = dict.fromkeys(("sharp", "interleaved", *LONG_TURNS), WITHIN_S)
"""Schedule -> within which training has to pay: about as long as its traffic lasts. Elsewhere the
default."""
PROSE_PHASES = (48, 192, 48)
HEAD_PHASES = (48, 384, 48)
"""A head's rounds take longer."""
LARGE_PHASES = (24, 96, 24)
"""A step takes a tenth of a second."""
PAIRED_PHASES = dict(zip(PAIRED, ((24, 120, 24), (24, 288, 24), (24, 192, 72)), strict=True))
"""Long enough for what is learnt to be used; one request at a time takes longer."""
CHUNK, LONG_CHUNK = 24, 208
"""Sharp traffic shifts within a long one, after 192 requests."""
SEED = 0
QUICK_SCHEDULE, QUICK_PHASES = "sharp", (24, 96)
"""Requests of the phases of a quick run."""
QUICK_ARMS = (names.NGRAM_TUNED, names.OURS)
WARM_UP = 8
"""Requests each engine serves before it is measured; none of them is of the schedule."""


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    prose = read(DIRECTORY / "prose" / f"{PROSE}.yaml")
    head = prose.shortened(HEAD_PHASES).model_copy(update={"family": "prose-head"})
    large = {
        name: prose.shortened(phases).model_copy(update={"family": "prose-large"})
        for name, phases in {**dict.fromkeys(LARGE, LARGE_PHASES), **PAIRED_PHASES}.items()
    }
    given = {**read_all(), PROSE: prose.shortened(PROSE_PHASES), PROSE_HEAD: head, **large}
    given |= {name: given[same] for name, same in LONG_TURNS.items()}
    schedules = {name: given[name] for name in ARMS}
    if options.quick:
        schedules = {QUICK_SCHEDULE: schedules[QUICK_SCHEDULE].shortened(QUICK_PHASES)}
    config = jobs.base_config()
    return Protocol(
        bench="drift_speed",
        question="How fast does each contender serve drifting traffic, and at what CPU time, over "
        "no speculation?",
        arms=QUICK_ARMS if options.quick else arms.ARMS,
        order="One contender after the other; chunks of requests in turns with an engine without "
        "speculation, or with another service.",
        sizes={
            "schedules": {name: schedule.model_dump() for name, schedule in schedules.items()},
            "chunk": {name: LONG_CHUNK if name in LONG_TURNS else CHUNK for name in schedules},
            "streams": {name: FEWER_STREAMS.get(name, STREAMS) for name in schedules},
            "seed": SEED,
            "against": {name: AGAINST.get(name) for name in schedules},
            "payback_s": {name: PAYBACK_S.get(name) for name in schedules},
            "k": config.speculation.k_max,
            "trainer": config.trainer.model_dump(),
            "gate": config.gate.model_dump(),
            "engine": config.serving.vllm,
            "target": "the family's target at the cost of a model of 77 M parameters (prose-large: "
            "273 M)",
        },
    )


def run(options: Options) -> Result:
    """Every contender over every schedule, live."""
    plan = narrowed(protocol(options), options)
    if not any(set(plan.arms) & set(ARMS[name]) for name in plan.sizes["schedules"]):
        raise ConfigError("--only: leaves nothing to be measured; ask for more")
    notebook = Notebook(options, plan)
    for name, tree in plan.sizes["schedules"].items():
        schedule = Schedule.model_validate(tree)
        chunk = plan.sizes["chunk"][name]
        last = (schedule.num_requests - 1) // chunk * chunk
        for arm in (arm for arm in plan.arms if arm in ARMS[name]):
            if notebook.find({"schedule": name, "arm": arm, "start": last}):
                options.say(f"{name}: {arm}: is there already")
                continue
            options.say(f"{name}: {arm}")
            _measure(options, notebook, name, schedule, arm, chunk)
    return summarise(plan, notebook.rows)


def _measure(
    options: Options, notebook: Notebook, name: str, schedule: Schedule, arm: str, chunk: int
) -> None:
    family = FAMILIES[schedule.family]
    coming = arrivals(schedule, LONG_TURNS.get(name, name), SEED)
    streams = {
        domain: family.prompts(
            domain, FIRST_SERVED + SEED, 1 + max(a.index for a in coming if a.domain == domain)
        )
        for domain in {arrival.domain for arrival in coming}
    }
    prompts = [streams[arrival.domain][arrival.index] for arrival in coming]
    logs = options.directory / f"{name}-{arm}".replace(", ", "-").replace(" ", "-").lower()
    logs.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="osd-drift-") as data,
        arms.both(
            arm, *family.costly_models(), Path(data), logs, PAYBACK_S.get(name), AGAINST.get(name)
        ) as (
            contender,
            reference,
        ),
    ):
        pair = {"contender": contender, "reference": reference}
        num = FEWER_STREAMS.get(name, STREAMS)
        _warm_up(family, list(pair.values()), num)
        for number, start in enumerate(range(0, len(prompts), chunk)):
            some = prompts[start : start + chunk]
            at = [a.at - coming[start].at for a in coming[start : start + chunk]]
            times = at if schedule.requests_per_second else None
            order = list(pair) if number % 2 else list(pair)[::-1]
            before = contender.judged()
            parts = {who: _burst(pair[who], family, some, times, num) for who in order}
            judged = dict(contender.judged() - before)
            row = {"schedule": name, "arm": arm, "start": start, "first": order[0], **parts}
            notebook.add(**row, judged=judged, facts=contender.facts())
            acceptance = acceptance_of([judged])
            options.say(
                f"  {start + len(some):4d} of {len(prompts)}: {_speed(parts):.2f} x "
                + (AGAINST.get(name) or NO_SPECULATION)
                + ("" if acceptance is None else f", acceptance {acceptance:.2f}")
            )


def _warm_up(family: Family, servers: Sequence[Server], num_streams: int) -> None:
    """Some requests of home to each, from a block that is never measured."""
    block = FIRST_SERVED + SEED + 1
    for server in servers:
        _burst(server, family, family.prompts(family.home(), block, WARM_UP), None, num_streams)


def _burst(
    server: Server,
    family: Family,
    prompts: Sequence[str],
    times: Sequence[float] | None,
    num_streams: int,
) -> Row:
    """One chunk to one server, and what it cost until it was at rest."""
    cpu_before = server.cpu_seconds()
    started = time.perf_counter()
    answers = asyncio.run(_send(server.url, family, prompts, times, num_streams))
    ended = time.perf_counter()
    if failed := [answer.error for answer in answers if not answer.ok]:
        raise OSDError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    trained_until, cpu_after = server.settle(ended)
    return {
        "seconds": ended - started,
        "charged_s": trained_until - ended,
        "cpu_s": cpu_after - cpu_before,
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


async def _send(
    url: str,
    family: Family,
    prompts: Sequence[str],
    times: Sequence[float] | None,
    num_streams: int,
) -> list[Answer]:
    """As fast as they are answered, so many at a time, or each at its time."""
    settings: dict[str, Any] = {"max_tokens": family.max_tokens, "temperature": family.temperature}
    if times is None:
        return await drive(url, NAME, prompts, streams=num_streams, **settings)

    async def one(prompt: str, after: float) -> Answer:
        await asyncio.sleep(after)
        return (await drive(url, NAME, [prompt], streams=1, **settings))[0]

    return list(
        await asyncio.gather(*(one(p, after) for p, after in zip(prompts, times, strict=True)))
    )


def _speed(parts: dict[str, Row]) -> float:
    """Seconds of the reference over those of the contender, charged."""
    own, other = parts["contender"], parts["reference"]
    ratio: float = other["seconds"] / (own["seconds"] + own["charged_s"])
    return ratio
