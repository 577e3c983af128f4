"""Whole services under test: started, looked at from outside (HTTP, /proc, Redis, files), broken, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import redis

from osd.client.http import Client
from osd.client.load import Answer, drive
from osd.config import reading
from osd.records import EvalReport, RoundOutcome
from osd.service import note
from osd.service.launch import Service
from osd.service.reaper import running
from tests.integration.pairs import VOCABULARY
from tests.support.paths import ROOT

MODEL = "pair"
Identity = tuple[int, int]
"""A process id and its start, which no other process shares."""


def settings(deployment: str, data_dir: Path, target: Path, draft: Path) -> list[str]:
    """Overrides for a service on a random pair that starts fast and learns fast."""
    return [
        f"deployment={deployment}",
        f"data_dir={data_dir}",
        f"serving.target={target}",
        f"serving.draft={draft}",
        f"serving.served_model_name={MODEL}",
        "serving.port=0",
        "control.port=0",
        "serving.seconds_between_polls=0.1",
        "serving.vllm={dtype: float32, enforce_eager: true, kv_cache_memory_bytes: 67108864, max_model_len: 256,"
        " max_num_seqs: 16, per_request_spec_decode_metrics: summary}",
        "serving.env={OMP_NUM_THREADS: 1, VLLM_CPU_OMP_THREADS_BIND: nobind, VLLM_ENABLE_V1_MULTIPROCESSING: 0}",
        "speculation.mode=fixed",  # acceptance is measured here, at whatever cost
        "speculation.k_max=4",
        "capture.accepted_fraction=1.0",
        "trainer.learning_rate=5.0e-3",
        "trainer.min_new_traces=24",
        "trainer.replay_batches=2",
        "trainer.patience_rounds=0",  # tests wait for rounds
        "gate.min_holdout_traces=4",
        # These tests choose drafts by hand, and send what is not captured: no draft is to be judged on that.
        "gate.rollback_min_tested=1000000",
        "control.seconds_between_looks=0.2",
    ]


@contextmanager
def supervised(arguments: Sequence[str]) -> Iterator[Service]:
    """A service in this process, with its supervisor in a thread."""
    service = Service(reading.load(None, arguments).config, lambda text: print(text, flush=True))
    stop = threading.Event()
    supervisor = threading.Thread(target=service.supervise, args=(stop,), daemon=True)
    try:
        service.start()
        supervisor.start()
        yield service
    finally:
        stop.set()
        if supervisor.is_alive():
            supervisor.join()
        service.stop()


class Served:
    """`osd serve` as a process of its own, at the head of a process group as a shell would start it."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log, self.started_at = log, time.monotonic()
        self.deployment = arguments[0].removeprefix("deployment=")
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "osd", "serve", *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = 600) -> note.Running:
        """Its note; with its own log in the failure when it ended or took too long."""

        def note() -> note.Running | None:
            assert self.process.poll() is None, self.log.read_text()
            return next((r for r in note.find_all() if r.pid == self.process.pid), None)

        found = wait_until(note, seconds, f"{self.deployment} is ready")
        print(f"{self.deployment}: ready after {time.monotonic() - self.started_at:.1f} s")
        return found

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Whatever happened: nothing of it stays."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
        self.process.wait()


class Detached:
    """`osd serve --detach`: the command has ended when this has begun, the service runs on."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.deployment = arguments[0].removeprefix("deployment=")
        command = [sys.executable, "-m", "osd", "serve", "--detach", *arguments]
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done
        print(f"{self.deployment}: detached after {time.monotonic() - started:.1f} s")
        self.said = done.stdout
        self.note = next(r for r in note.find_all() if r.deployment == self.deployment)

    def stop(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "osd", "stop", "--deployment", self.deployment]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    def end(self) -> None:
        """Whatever happened: nothing of it stays."""
        if any(r.pid == self.note.pid for r in note.find_all()):
            with suppress(ProcessLookupError):
                os.kill(self.note.pid, signal.SIGKILL)  # its reaper ends the rest


def osd(*arguments: object, ok: bool = True) -> Any:
    """A command as a user runs it: it finds the service by the note in the runtime directory."""
    command = [sys.executable, "-m", "osd", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is ok, done
    return json.loads(done.stdout) if ok else done.stderr


# Waiting


def wait_until(look: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer of `look`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def status(control_url: str) -> dict[str, Any]:
    """`/osd/status`, {} while the control port is away."""
    with suppress(httpx.HTTPError):
        response = httpx.get(f"{control_url}/osd/status", timeout=10)
        if response.status_code == 200:
            return dict(response.json())
    return {}


def replica_version(control_url: str) -> int:
    """The draft version the one replica reports; 0 when none does."""
    replicas = status(control_url).get("replicas") or [{"version": 0}]
    return int(replicas[0]["version"])


def wait_for_version(control_url: str, version: int, seconds: float = 60) -> None:
    wait_until(lambda: replica_version(control_url) == version, seconds, f"v{version} serves")


def num_stored(control_url: str) -> int:
    """Traces ever stored, once all is stored."""
    num = -1
    while (newer := int(status(control_url)["buffer"]["num_put"])) != num:
        num = newer
        time.sleep(2)
    return num


def admin(service: Service) -> Client:
    return Client(service.control_url, token=service.token)


def pause_training(service: Service) -> int:
    """Pause, let a round under way end, and wait until what is current serves: its version."""
    admin(service).admin("pause")
    wait_until(lambda: status(service.control_url).get("phase") == "waiting", 60, "no round is under way")
    version = int(status(service.control_url)["version"])
    wait_for_version(service.control_url, version)
    return version


# Releases


def outcome_of(alpha: float, base: int) -> RoundOutcome:
    """A round whose gate measured this α of its candidate."""
    report = EvalReport(
        num_traces=40,
        num_tokens=1600,
        k=4,
        alpha_base=0.5,
        alpha_candidate=alpha,
        alpha_base_per_pos=(0.5,) * 4,
        alpha_candidate_per_pos=(alpha,) * 4,
        diff=alpha - 0.5,
        diff_low=alpha - 0.55,
        diff_high=alpha - 0.45,
    )
    return RoundOutcome(
        base_version=base,
        path="",
        num_steps=1,
        num_tokens=1,
        loss_first=1.0,
        loss_last=0.5,
        seconds=1.0,
        trace_age_mean_s=1.0,
        trace_age_max_s=1.0,
        eval=report,
    )


# Traffic


def prompt_texts(num: int, seed: int, length: int = 10) -> list[str]:
    """Random prompts: "t25 t91 ...". Words that begin with a special token ("t1" in "t13") would be split there."""
    random = np.random.default_rng(seed)
    return [" ".join(f"t{i}" for i in random.integers(20, VOCABULARY, length)) for _ in range(num)]


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def ask(url: str, prompts: Sequence[str], *, streams: int = 4, max_tokens: int = 40, **more: Any) -> list[Answer]:
    """Chat requests, `streams` at a time; in a thread, for a browser's tests leave a loop running in this one."""
    job = drive(url, MODEL, prompts, streams=streams, max_tokens=max_tokens, **more)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, job).result()


class Traffic(threading.Thread):
    """The same prompts again and again until stopped; `answers` holds what came, rounds one after another."""

    def __init__(self, url: str, prompts: Sequence[str], **options: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._prompts, self._options = url, list(prompts), options
        self._stop_event = threading.Event()
        self.answers: list[Answer] = []

    def run(self) -> None:
        while not self._stop_event.is_set():
            self.answers += ask(self._url, self._prompts, **self._options)

    def __enter__(self) -> Traffic:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self.join(120)

    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.ok]


# Acceptance


def counts(answers: Sequence[Answer]) -> np.ndarray:
    """int[R, 2]: accepted and tested draft tokens per request, from vLLM's own histograms."""
    return np.array(
        [
            (
                sum(j * n for j, n in enumerate(a.histogram)),
                sum(min(j + 1, len(a.histogram) - 1) * n for j, n in enumerate(a.histogram)),
            )
            for a in answers
        ]
    )


def alpha(counts_R2: np.ndarray) -> float:
    """Conditional acceptance over all these requests."""
    accepted, tested = counts_R2.sum(0)
    return float(accepted / tested)


def resampled_alphas(counts_R2: np.ndarray, num_requests: int, num: int = 2000) -> np.ndarray:
    """α of `num` samples of `num_requests` requests each, drawn with replacement."""
    rows = np.random.default_rng(0).integers(0, len(counts_R2), (num, num_requests))
    accepted, tested = counts_R2[rows].sum(1).T
    return np.asarray(accepted / tested)


# Processes


def descendants(pid: int) -> set[Identity]:
    """`pid` and everything below it."""
    processes = running()
    found = {pid} & processes.keys()
    while more := {p for p, process in processes.items() if process.parent in found} - found:
        found |= more
    return {(p, processes[p].start) for p in found}


def alive(identities: set[Identity]) -> dict[int, str]:
    """Those that still live, with their command lines."""
    processes = running()
    left = [pid for pid, start in identities if pid in processes and processes[pid].start == start]
    return {pid: command_line(pid) for pid in left}


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def named(identities: set[Identity], name: str) -> list[int]:
    """Those of them whose title contains `name`."""
    return sorted(pid for pid, _ in identities if name in command_line(pid))


def ray_directories(identities: set[Identity]) -> set[Path]:
    """Directories of private Rays that these processes name."""
    found = re.findall(r"(/\S*?/osd-ray-\w+)", " ".join(command_line(pid) for pid, _ in identities))
    return {Path(path) for path in found}


def is_listening(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) == 0


# What is stored


def stored_bytes(redis_url: str, *directories: Path) -> Iterator[tuple[str, bytes]]:
    """(where, content) of every value in the server and of every file under the directories."""
    client: Any = redis.Redis.from_url(redis_url, protocol=2)
    readers = {
        b"string": lambda key: [client.get(key)],
        b"hash": lambda key: [part for item in client.hgetall(key).items() for part in item],
        b"set": lambda key: client.smembers(key),
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": lambda key: [part for _, fields in client.xrange(key) for item in fields.items() for part in item],
    }
    for key in client.scan_iter(count=1000):
        for value in (key, *readers[client.type(key)](key)):
            yield f"redis {key.decode(errors='replace')}", value or b""
    client.close()
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                with suppress(FileNotFoundError):
                    yield str(path), path.read_bytes()


def places_of(token_ids: Sequence[int], redis_url: str, *directories: Path) -> set[str]:
    """Where these token ids are stored: as int32, as JSON, or as text."""
    patterns, stored = _written(token_ids), stored_bytes(redis_url, *directories)
    return {where for where, content in stored if any(pattern in content for pattern in patterns)}


def stored_ones(candidates: Sequence[list[int]], redis_url: str, *directories: Path) -> list[list[int]]:
    """Those of them that `places_of` would find anywhere."""
    contents = [content for _, content in stored_bytes(redis_url, *directories)]
    return [ids for ids in candidates if any(p in content for p in _written(ids) for content in contents)]


def _written(token_ids: Sequence[int]) -> list[bytes]:
    words = [f"t{i}" for i in token_ids]
    return [
        np.asarray(token_ids, "<i4").tobytes(),
        *(separator.join(map(str, token_ids)).encode() for separator in (",", ", ")),
        " ".join(words).encode(),
        "".join(words).encode(),
    ]
