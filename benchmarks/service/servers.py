"""The two servers that `osd bench serving` compares, each in separate processes: `osd serve`, and
vLLM alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from osd.errors import OSDError
from osd.service import note

T = TypeVar("T")

SECONDS_TO_START = 240
SECONDS_TO_STOP = 30


@contextmanager
def process(
    command: list[str], log: Path, environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `log`; interrupted at the end, killed if that does not
    help."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        try:
            child.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def serve_command(config: Path, overrides: list[str]) -> list[str]:
    """`osd serve`."""
    return [sys.executable, "-m", "osd", "serve", "--config", str(config), *overrides]


def vllm_command(
    target: Path, draft: Path, *, name: str, port: int, k: int, options: Mapping[str, Any]
) -> list[str]:
    """vLLM's own OpenAI server with the same models, and `options` under vLLM's names."""
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}
    return bare_command(target, speculation, name=name, port=port, options=options)


def bare_command(
    target: Path,
    speculation: Mapping[str, Any] | None,
    *,
    name: str,
    port: int,
    options: Mapping[str, Any],
) -> list[str]:
    """vLLM's own OpenAI server with vLLM's `speculative_config`; None = no speculation."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    for key, value in options.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return command


def wait_for_service(child: subprocess.Popen[bytes], deployment: str, log: Path) -> note.Running:
    """Where `osd serve` answers, once it does."""

    def find() -> note.Running | None:
        try:
            return note.find(deployment)
        except OSDError:
            return None

    return wait_until(find, child, log)


def wait_for_health(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server says that it is well."""

    def is_well() -> bool | None:
        try:
            return httpx.get(f"{url}/health", timeout=2).status_code == 200 or None
        except httpx.HTTPError:
            return None

    wait_until(is_well, child, log)


def wait_until(found: Callable[[], T | None], child: subprocess.Popen[bytes], log: Path) -> T:
    """What `found` finds, once it finds something. Raises `OSDError` where the process ends
    first."""
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and child.poll() is None:
        if (answer := found()) is not None:
            return answer
        time.sleep(0.3)
    what = "ended" if child.poll() is not None else f"did not answer within {SECONDS_TO_START} s"
    raise OSDError(f"the measured server {what}; see {log}")
