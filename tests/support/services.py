"""Whole services under test: how a test starts them, waits for them, and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from osd.client.http import Client
from osd.config import reading
from osd.exchange.registry import Registry
from osd.records import DraftRelease, EvalReport, RoundOutcome
from osd.releases.store import ReleaseStore
from osd.service.launch import Service
from osd.service.note import Running, find_all
from tests.support.paths import ROOT
from tests.support.traffic import MODEL

R = TypeVar("R")


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
        "serving.vllm={dtype: float32, enforce_eager: true, kv_cache_memory_bytes: 67108864,"
        " max_model_len: 256, max_num_seqs: 16, per_request_spec_decode_metrics: summary}",
        "serving.env={OMP_NUM_THREADS: 1, VLLM_CPU_OMP_THREADS_BIND: nobind, "
        "VLLM_ENABLE_V1_MULTIPROCESSING: 0}",
        "speculation.mode=fixed",  # acceptance is measured here, at whatever cost
        "speculation.k_max=4",
        "capture.accepted_fraction=1.0",
        "trainer.learning_rate=5.0e-3",
        "trainer.min_new_traces=24",
        "trainer.replay_batches=2",
        "trainer.patience_rounds=0",  # tests wait for rounds
        "gate.min_holdout_traces=4",
        # Tests choose drafts by hand and send requests that are not captured: no rollback on that.
        "gate.rollback_min_tested=1000000",
        "control.seconds_between_looks=0.2",
    ]


@contextmanager
def runtime_directory(path: Path) -> Iterator[Path]:
    """Commands and services of this process leave and find their notes in `path`."""
    path.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSD_RUNTIME_DIR", str(path))
        yield path


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
    """`osd serve` as a process that leads its own process group, as a shell starts it."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.log, self.started_at = log, time.monotonic()
        self.deployment = arguments[0].removeprefix("deployment=")
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "osd", "serve", *arguments],
                cwd=ROOT,
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = 600) -> Running:
        """Its note. Fails with the service's log when the process ends."""
        found: Running = wait_until(self._note, seconds, f"{self.deployment} is ready")
        print(f"{self.deployment}: ready after {time.monotonic() - self.started_at:.1f} s")
        return found

    def _note(self) -> Running | None:
        assert self.process.poll() is None, self.log.read_text()
        return next((r for r in find_all() if r.pid == self.process.pid), None)

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Ends the process, whatever state it is in."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
        self.process.wait()


class Detached:
    """`osd serve --detach`: the command has ended, the service runs on."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.deployment = arguments[0].removeprefix("deployment=")
        command = [sys.executable, "-m", "osd", "serve", "--detach", *arguments]
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done
        print(f"{self.deployment}: detached after {time.monotonic() - started:.1f} s")
        self.said = done.stdout
        self.note = next(r for r in find_all() if r.deployment == self.deployment)

    def stop(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "osd", "stop", "--deployment", self.deployment]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    def end(self) -> None:
        """Ends the service, whatever state it is in."""
        if any(r.pid == self.note.pid for r in find_all()):
            with suppress(ProcessLookupError):
                os.kill(self.note.pid, signal.SIGKILL)  # its reaper ends the rest


def osd(*arguments: object, ok: bool = True) -> Any:
    """A command as a user runs it. Returns its JSON where that was asked for, else its text; what
    it wrote to stderr when it failed."""
    command = [sys.executable, "-m", "osd", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is ok, done
    if not ok:
        return done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


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
    """`/osd/status`; {} while the control port does not answer."""
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
    """How many traces were ever stored, once that number stands still."""
    num = -1
    while (newer := int(status(control_url)["buffer"]["num_put"])) != num:
        num = newer
        time.sleep(2)
    return num


def admin(service: Service | Running) -> Client:
    return Client(service.control_url, token=service.token)


def pause_training(service: Service | Running) -> int:
    """Pauses, lets a round end, and waits until the current version serves. Returns it."""
    admin(service).admin("pause")
    wait_until(
        lambda: status(service.control_url).get("phase") == "waiting", 60, "no round is under way"
    )
    version = int(status(service.control_url)["version"])
    wait_for_version(service.control_url, version)
    return version


# Releases and records


def store(service: Service) -> ReleaseStore:
    return ReleaseStore(service.config.releases_path)


def current(service: Service) -> DraftRelease:
    release = store(service).current(service.plan.target_id)
    assert release is not None
    return release


def records_of(service: Service, record_type: type[R]) -> list[R]:
    """All records of one kind that replicas and controller wrote, oldest first."""
    registry = Registry(service.redis_url, service.config.deployment)
    found = [record for _, record in registry.read("0", 100_000) if isinstance(record, record_type)]
    registry.close()
    return found


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
