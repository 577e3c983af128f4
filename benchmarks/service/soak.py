"""`osd bench soak`: half an hour of mixed traffic while parts of the service are killed in turns.

No request is retried, every failed request is counted, and every answer to a known prompt is
compared with its answer before the first fault. Requests may fail only when the engine itself was
killed: those it was serving, and those that came before it was back.

    load   ─► answers: failed? another text?
    faults ─► kill -9 of a part, Valkey stopped, a draft swapped by hand
    looks  ─► memory, open files, stored bytes
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.record import Goal, Notebook, Options, Protocol, Row
from benchmarks.result import Figure, Lines, Result
from benchmarks.service.soak_load import STREAMS, Load
from benchmarks.service.soak_service import FAULTS, GROWING, Subject
from osd.errors import ConfigError

PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"
SECONDS_BETWEEN_LOOKS = 5.0

SLOWEST_END = "slowest end of a stream in a killed engine"


def protocol(options: Options) -> Protocol:
    """What will be done."""
    return Protocol(
        bench="soak",
        question="Does any user notice that parts of the service die, and does anything grow "
        "without end?",
        arms=("service",),
        order="Every kind of fault once per turn, in a random order, at random times; traffic "
        "never stops.",
        sizes={
            "preset": "configs/tiny-cpu.yaml",
            "target": "tiny",
            "streams": STREAMS,
            "seconds": 150 if options.quick else 1800,
            "seconds_between_faults": (8, 16) if options.quick else (30, 60),
            "max_tokens": 60,
            "seed": 11,
        },
        goals=(
            Goal(figure="requests failed, no engine killed", at_most=0),
            Goal(figure="kinds of faults", at_least=len(FAULTS)),
            Goal(figure="answers changed", at_most=0),
            Goal(figure=SLOWEST_END, at_most=1.0),
        ),
    )


def run(options: Options) -> Result:
    """Start the service, load it, break it, look at it; then add up."""
    plan = protocol(options)
    notebook = Notebook(options, plan)
    with ExitStack() as stack:
        subject = _start(stack, options, plan)
        load = Load(subject.url, plan.sizes["max_tokens"], plan.sizes["seed"])
        load.learn_answers()
        load.start()
        stack.callback(load.stop)
        _break_and_look(subject, load, notebook, options, plan)
        load.stop()
        for row in load.rows:
            notebook.add(kind="request", **row)
        notebook.add(kind="end", **subject.summary())
    return summarise(plan, notebook.rows)


def _break_and_look(
    subject: Subject, load: Load, notebook: Notebook, options: Options, plan: Protocol
) -> None:
    rng = random.Random(plan.sizes["seed"])
    began = time.time()
    ends, turn = began + plan.sizes["seconds"], list[str]()
    fault_at = began + rng.uniform(*plan.sizes["seconds_between_faults"])
    while (now := time.time()) < ends:
        notebook.add(kind="look", at=now - began, **subject.look())
        if now >= fault_at:
            turn = turn or rng.sample(FAULTS, len(FAULTS))
            fault = turn.pop()
            options.say(f"{now - began:5.0f} s: {fault}")
            notebook.add(kind="fault", fault=fault, **subject.inflict(fault, load.failed_since))
            fault_at = time.time() + rng.uniform(*plan.sizes["seconds_between_faults"])
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _start(stack: ExitStack, options: Options, plan: Protocol) -> Subject:
    from benchmarks.service import servers

    if not PRESET.is_file():
        raise ConfigError(f"{PRESET}: not found; run the bench from a checkout of the project")
    data = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="osd-soak-", ignore_cleanup_errors=True)
    )
    deployment, log = f"soak-{os.getpid()}", options.directory / "service.log"
    overrides = [
        f"serving.target={plan.sizes['target']}",
        f"deployment={deployment}",
        f"data_dir={data}",
        "serving.port=0",
        "control.port=0",
    ]
    options.say("starting the service")
    child = stack.enter_context(servers.process(servers.serve_command(PRESET, overrides), log, {}))
    return Subject(child.pid, servers.wait_for_service(child, deployment, log), Path(data))


# From rows to figures


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """Counts, and how fast what may grow did grow."""
    requests = [row for row in rows if row["kind"] == "request"]
    faults = [row for row in rows if row["kind"] == "fault"]
    looks = [row for row in rows if row["kind"] == "look"]
    end = next(row for row in rows if row["kind"] == "end")
    outages = [(f["at"], f["at"] + f["seconds"]) for f in faults if f["fault"] == "engine"]
    failed = [row for row in requests if row["error"]]
    excused = [
        row for row in failed if any(row["ended"] >= a and row["started"] <= b for a, b in outages)
    ]
    cut = [seconds for fault in faults for seconds in fault["cut"]]
    known = [row for row in requests if row["is_known"] and not row["error"]]
    service = "service"
    figures = [
        Figure(group=service, name="requests", value=len(requests), n=len(requests)),
        Figure(
            group=service,
            name="requests failed, no engine killed",
            value=len(failed) - len(excused),
            n=len(requests),
        ),
        Figure(
            group=service, name="requests failed, engine killed", value=len(excused), n=len(outages)
        ),
        Figure(
            group=service,
            name="answers changed",
            value=sum(row["is_changed"] for row in known),
            n=len(known),
        ),
        *(
            Figure(group=service, name=SLOWEST_END, value=slowest, unit="s", n=len(cut))
            for slowest in sorted(cut)[-1:]
        ),
        Figure(
            group=service,
            name="kinds of faults",
            value=len({fault["fault"] for fault in faults}),
            n=len(faults),
        ),
        *(
            Figure(group=service, name=name.replace("num_", ""), value=end[name])
            for name in ("num_rounds", "num_swaps", "num_rollbacks")
        ),
        Figure(group=service, name="traces stored", value=end["num_stored"]),
        *(
            Figure(group=service, name=f"traces lost: {reason}", value=n)
            for reason, n in sorted(end["lost"].items())
        ),
    ]
    for fault in FAULTS:
        times = [row["seconds"] for row in faults if row["fault"] == fault]
        if times:
            name = f"{fault}: slowest return"
            figures.append(
                Figure(group="faults", name=name, value=max(times), unit="s", n=len(times))
            )
    for name, unit in GROWING.items():
        figures += growth(looks, name, unit)
    drawing = Lines(
        title="Memory of all processes",
        x_label="s",
        y_label="MiB",
        lines={"memory": tuple((row["at"], row["memory"]) for row in looks)},
    )
    return Result(protocol=plan, figures=tuple(figures), drawings=(drawing,))


def growth(looks: Sequence[Row], name: str, unit: str) -> Iterable[Figure]:
    """Slope per hour over the second half of the run, with the 95 % interval of a bootstrap over
    blocks of a minute; by then caches are warm and the buffer of releases is at its length."""
    half = looks[len(looks) // 2 :]
    if len(half) < 4:
        return
    at, values = np.array([row["at"] for row in half]) / 3600, np.array([row[name] for row in half])
    slope, level = np.polyfit(at, values, 1)
    rest = values - (slope * at + level)
    block = max(1, round(60 / SECONDS_BETWEEN_LOOKS))
    starts = np.arange(max(1, len(rest) - block + 1))
    rng = np.random.default_rng(0)
    slopes = []
    for _ in range(500):
        picked = rng.choice(starts, -(-len(rest) // block))
        noise = np.concatenate([rest[s : s + block] for s in picked])[: len(rest)]
        slopes.append(
            np.polyfit(at[: len(noise)], (slope * at + level)[: len(noise)] + noise, 1)[0]
        )
    low, high = np.quantile(slopes, [0.025, 0.975])
    yield Figure(
        group="growth", name=f"{name}, at the end", value=float(values[-1]), unit=unit, n=len(half)
    )
    yield Figure(
        group="growth",
        name=f"{name}, per hour",
        value=float(slope),
        low=float(low),
        high=float(high),
        unit=unit,
        n=len(half),
    )
