"""`osd bench soak`: a service under mixed traffic whose parts are killed one after the other, for half an hour.

Users are counted without mercy: no request is tried twice, every request that fails is counted, and every answer to a
known prompt is compared with the one it had before anything was broken. Only where the engine itself was killed may
requests fail: those it had, and those that came before it was back.

    load  ─► answers: failed? another text?      faults ─► kill -9 of a part, Valkey stopped, a draft swapped by hand
    looks ─► memory, open files, stored bytes
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from osd.bench.record import Goal, Notebook, Options, Protocol, Row
from osd.bench.result import Figure, Lines, Result
from osd.errors import ConfigError, OSDError
from osd.reaper import running

PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"
NAME = "tiny"
STREAMS = 4
NUM_KNOWN = 16
"""Prompts whose answers are compared."""
KNOWN_ONE_IN = 4
SECONDS_PER_DOMAIN = 150.0
SECONDS_BETWEEN_LOOKS = 5.0
SECONDS_TO_COME_BACK = 240.0
PARTS = {"engine": "VLLM::EngineCore", "trainer": "TrainerActor", "control": "ControlActor", "valkey": "valkey-server"}
"""What is killed, and how its process calls itself."""
FAULTS = (*PARTS, "valkey stopped", "swap")
GROWING = {
    "memory": "MiB",
    "open files": "files",
    "stored by Valkey": "MiB",
    "files on disk": "files",
    "bytes on disk": "MiB",
}


def protocol(options: Options) -> Protocol:
    """What will be done."""
    return Protocol(
        bench="soak",
        question="Does any user notice that parts of the service die, and does anything grow without end?",
        arms=("service",),
        order="Every kind of fault once per turn, in a random order, at random times; traffic never stops.",
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
            Goal(figure="answers changed", at_most=0),
            Goal(figure="slowest end of a stream in a killed engine", at_most=1.0),
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


def _break_and_look(subject: Subject, load: Load, notebook: Notebook, options: Options, plan: Protocol) -> None:
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
            notebook.add(kind="fault", fault=fault, **subject.inflict(fault, load))
            fault_at = time.time() + rng.uniform(*plan.sizes["seconds_between_faults"])
        time.sleep(SECONDS_BETWEEN_LOOKS)


class Load(threading.Thread):
    """Streams of requests until stopped: new prompts of one domain after another, known ones among them."""

    def __init__(self, url: str, max_tokens: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._max_tokens, self._seed = url, max_tokens, seed
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._known: dict[str, tuple[int, ...]] = {}
        """prompt -> its answer before anything was broken"""
        self.rows: list[Row] = []

    def learn_answers(self) -> None:
        """Ask the known prompts, once each. Raises `OSDError` when even that fails."""
        from osd.load import drive
        from osd.tiny.traffic import DOMAINS, requests

        prompts = [r.prompt for domain in DOMAINS for r in requests(domain, NUM_KNOWN // len(DOMAINS), self._seed)]
        for answer in asyncio.run(drive(self._url, NAME, prompts, streams=STREAMS, max_tokens=self._max_tokens)):
            if not answer.ok:
                raise OSDError(f"a request failed before anything was broken: {answer.error}")
            self._known[prompts[answer.index]] = answer.token_ids

    def run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001  raised where the load is ended
            self._error = error

    def stop(self) -> None:
        """Let the requests under way end. Raises what ended them too early: no traffic, no proof."""
        self._stopping.set()
        if self.is_alive():
            self.join(150)
        if self._error is not None:
            raise OSDError(f"the load ended by itself: {self._error}") from self._error

    def ended_since(self, at: float) -> list[Row]:
        """Requests that were under way at that time and have failed."""
        return [row for row in list(self.rows) if row["started"] <= at <= row["ended"] and row["error"]]

    async def _all(self) -> None:
        await asyncio.gather(*(self._stream(number) for number in range(STREAMS)))

    async def _stream(self, number: int) -> None:
        from osd.load import drive
        from osd.tiny.traffic import DOMAINS, stream

        rng = random.Random(self._seed * 1000 + number)
        sources = {domain: stream(domain, 70_000 + self._seed * 100 + number) for domain in DOMAINS}
        known, began = sorted(self._known), time.time()
        while not self._stopping.is_set():
            domain = DOMAINS[int((time.time() - began) / SECONDS_PER_DOMAIN) % len(DOMAINS)]
            is_known = rng.randrange(KNOWN_ONE_IN) == 0
            prompt = rng.choice(known) if is_known else next(sources[domain]).prompt
            started = time.time()
            (answer,) = await drive(self._url, NAME, [prompt], streams=1, max_tokens=self._max_tokens)
            is_changed = is_known and answer.ok and answer.token_ids != self._known[prompt]
            row = {"started": started, "ended": time.time(), "error": answer.error, "tokens": len(answer.token_ids)}
            self.rows.append(row | {"is_known": is_known, "is_changed": is_changed})
            if answer.error:
                await asyncio.sleep(0.5)  # the next request, not the same one again


class Subject:
    """The service under test, seen from outside."""

    def __init__(self, child_pid: int, note: Any, data: Path) -> None:
        from osd.client import Client

        self.url = note.service_url
        self._pid, self._data = child_pid, data
        self._client = Client(note.control_url, token=note.token)

    def look(self) -> Row:
        """What may grow: sums over all processes of the service, and over its directory."""
        pids = self._processes()
        files = [path for path in self._data.rglob("*") if path.is_file()]
        stored = (self._status().get("buffer") or {}).get("num_bytes", 0)
        return {
            "memory": sum(map(_resident, pids)) / 2**20,
            "open files": sum(map(_open_files, pids)),
            "stored by Valkey": stored / 2**20,
            "files on disk": len(files),
            "bytes on disk": sum(_size(path) for path in files) / 2**20,
        }

    def inflict(self, fault: str, load: Load) -> Row:
        """Break something and wait until it works again."""
        at = time.time()
        if fault == "swap":
            self._swap()
        elif fault == "valkey stopped":
            pid = self._pid_of(PARTS["valkey"])
            os.kill(pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(self._pid_of(PARTS[fault]), signal.SIGKILL)
            self._wait_until_back(fault, at)
        cut = [row["ended"] - at for row in load.ended_since(at)] if fault == "engine" else []
        return {"at": at, "seconds": time.time() - at, "cut": cut}

    def summary(self) -> Row:
        """Counters at the end."""
        status = self._status()
        dropped: dict[str, int] = dict((status.get("buffer") or {}).get("dropped", {}))
        for replica in status.get("replicas", []):
            for reason, num in {**replica["buffer_dropped"], **replica["capture_skipped"]}.items():
                dropped[reason] = dropped.get(reason, 0) + num
        return {name: status.get(name, 0) for name in ("num_rounds", "num_swaps", "num_rollbacks")} | {
            "num_stored": (status.get("buffer") or {}).get("num_put", 0),
            "lost": {reason: num for reason, num in dropped.items() if num},
        }

    def _swap(self) -> None:
        versions = [d["version"] for d in self._client.get("/osd/drafts") if not d["bad"] and not d["serving"]]
        if versions:
            with suppress(OSDError):
                self._client.admin("promote", version=max(versions))

    def _status(self) -> dict[str, Any]:
        with suppress(OSDError):
            return dict(self._client.get("/osd/status"))
        return {}

    def _wait_until_back(self, part: str, at: float) -> None:
        deadline = at + SECONDS_TO_COME_BACK
        while time.time() < deadline:
            time.sleep(0.5)
            with suppress(OSDError):
                self._pid_of(PARTS[part])
                if self._is_well(part):
                    return
        raise OSDError(f"the {part} was killed and did not come back within {SECONDS_TO_COME_BACK:.0f} s")

    def _is_well(self, part: str) -> bool:
        import httpx

        if part != "engine":
            status = self._status()
            return bool(status) and status["redis"] == status["trainer"] == "ok"
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        return False

    def _processes(self) -> list[int]:
        processes = running()
        found = {self._pid}
        while more := {pid for pid, p in processes.items() if p.parent in found} - found:
            found |= more
        return sorted(found)

    def _pid_of(self, name: str) -> int:
        for pid in self._processes():
            with suppress(OSError):
                if name in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                    return pid
        raise OSDError(f"no process {name} is running")


def _resident(pid: int) -> int:
    """Bytes of its own in memory: shared pages count by halves, thirds, ..."""
    with suppress(OSError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def _open_files(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _start(stack: ExitStack, options: Options, plan: Protocol) -> Subject:
    from osd.bench import servers

    if not PRESET.is_file():
        raise ConfigError(f"{PRESET}: not found; run the bench from a checkout of the project")
    data = stack.enter_context(tempfile.TemporaryDirectory(prefix="osd-soak-", ignore_cleanup_errors=True))
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
    excused = [row for row in failed if any(row["ended"] >= a and row["started"] <= b for a, b in outages)]
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
        Figure(group=service, name="requests failed, engine killed", value=len(excused), n=len(outages)),
        Figure(group=service, name="answers changed", value=sum(row["is_changed"] for row in known), n=len(known)),
        Figure(
            group=service,
            name="slowest end of a stream in a killed engine",
            value=max(cut, default=0.0),
            unit="s",
            n=len(cut),
        ),
        *(
            Figure(group=service, name=name.replace("num_", ""), value=end[name])
            for name in ("num_rounds", "num_swaps", "num_rollbacks")
        ),
        Figure(group=service, name="traces stored", value=end["num_stored"]),
        *(Figure(group=service, name=f"traces lost: {reason}", value=n) for reason, n in sorted(end["lost"].items())),
    ]
    for fault in FAULTS:
        times = [row["seconds"] for row in faults if row["fault"] == fault]
        if times:
            name = f"{fault}: slowest return"
            figures.append(Figure(group="faults", name=name, value=max(times), unit="s", n=len(times)))
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
    """Slope per hour over the second half of the run, with the 95 % interval of a bootstrap over blocks of a minute;
    by then caches are warm and the buffer of releases is at its length."""
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
        slopes.append(np.polyfit(at[: len(noise)], (slope * at + level)[: len(noise)] + noise, 1)[0])
    low, high = np.quantile(slopes, [0.025, 0.975])
    yield Figure(group="growth", name=f"{name}, at the end", value=float(values[-1]), unit=unit, n=len(half))
    yield Figure(
        group="growth",
        name=f"{name}, per hour",
        value=float(slope),
        low=float(low),
        high=float(high),
        unit=unit,
        n=len(half),
    )
